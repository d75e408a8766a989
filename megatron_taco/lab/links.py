"""Makes, finds and removes labs: namespaces joined by veth pairs with a rate on each end.

All netlink requests are made inside the lab's own namespaces, so no interface of the machine is
ever named in one, and no link of ours is in the machine's namespace even for a moment. Two hosts
are joined by one veth pair; more by a bridge that has a namespace to itself. Every end has a
qdisc with a token bucket, so a host neither sends nor receives faster than its rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from megatron_taco.lab import namespaces, shaping
from megatron_taco.lab.guard import guarded
from megatron_taco.lab.link import MAX_HOSTS, NAMESPACE, PREFIX, Lab, LabError, Link
from megatron_taco.lab.shaping import explained


def create(hosts: int, link: Link) -> Lab:
    """Makes a lab under the first free name.

    Raises:
        LabError: This machine cannot, or ``hosts`` is no number of hosts; nothing is left then.
    """
    if not 2 <= hosts <= MAX_HOSTS:
        raise LabError(f"{hosts} hosts: a lab has 2 to {MAX_HOSTS}")
    namespaces.require()
    lab = _claim(hosts, link)
    try:
        for name in (*lab.namespaces[1:], *([lab.switch] if lab.switch else [])):
            namespaces.create(name)
        if lab.switch is None:
            namespaces.inside(lab.namespaces[0], lambda: _join_two(lab))
        else:
            namespaces.inside(lab.switch, lambda: _join_many(lab))
        for host in range(hosts):
            namespaces.inside(lab.namespaces[host], partial(_set_up, lab, host))
    except BaseException:
        destroy(lab.name)
        raise
    return lab


@contextmanager
def temporary(hosts: int, link: Link) -> Iterator[Lab]:
    """A lab for as long as the context lasts, or this process lives: see :mod:`guard`."""
    lab = create(hosts, link)
    with ExitStack() as stack:
        stack.callback(destroy, lab.name)  # for when the guard does not start
        stack.enter_context(guarded(lab.name))
        stack.callback(destroy, lab.name)
        yield lab


def destroy(name: str) -> list[int]:
    """Removes a lab with all that runs in it; does nothing if there is none of that name.

    Returns:
        The ids of the processes that were killed.
    """
    namespaces.require()
    found = [text for text in namespaces.names() if _lab_of(text) == name]
    return namespaces.remove(found)


def find() -> list[str]:
    """Returns the names of the labs that are up, or were left half made or half removed."""
    labs = {lab for name in namespaces.names() if (lab := _lab_of(name)) is not None}
    return sorted(labs, key=lambda lab: int(lab.removeprefix(PREFIX)))


def read(name: str) -> Lab:
    """Returns a lab that is up, as its qdiscs and interfaces say it is.

    Raises:
        LabError: There is none of that name, or it is not whole.
    """
    namespaces.require()
    matches = [NAMESPACE.match(text) for text in namespaces.names()]
    hosts = sum(1 for m in matches if m and m.group(1) == name and m.group(2) is not None)
    if not hosts:
        raise LabError(f"no lab {name} is up; up: {', '.join(find()) or 'none'}")
    try:
        link = namespaces.inside(f"{name}-h0", lambda: shaping.read(f"{name}-link"))
    except (OSError, LookupError) as error:
        raise LabError(f"lab {name} is not whole ({error!r}); remove it: lab down") from error
    return Lab(name=name, hosts=hosts, link=link)


def _lab_of(namespace: str) -> str | None:
    match = NAMESPACE.match(namespace)
    return match.group(1) if match else None


def _claim(hosts: int, link: Link) -> Lab:
    """Makes the first host's namespace under a free name, which no other process then takes."""
    for number in range(1000):
        lab = Lab(name=f"{PREFIX}{number}", hosts=hosts, link=link)
        if lab.name in find():
            continue
        try:
            namespaces.create(lab.namespaces[0])
        except FileExistsError:
            continue
        return lab
    raise LabError("1000 labs are up; remove them: megatron-taco lab down")


def _join_two(lab: Lab) -> None:
    from pyroute2 import IPRoute

    peer = {"ifname": lab.interface, "net_ns_fd": lab.namespaces[1]}
    with IPRoute() as ip, explained("a veth pair"):
        ip.link("add", ifname=lab.interface, kind="veth", peer=peer)


def _join_many(lab: Lab) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        bridge = f"{lab.name}-br"
        with explained("a bridge (three hosts or more)"):
            ip.link("add", ifname=bridge, kind="bridge")
        master = ip.link_lookup(ifname=bridge)[0]
        for host, namespace in enumerate(lab.namespaces):
            peer = {"ifname": lab.interface, "net_ns_fd": namespace}
            with explained("a veth pair"):
                ip.link("add", ifname=lab.port(host), kind="veth", peer=peer)
            index = ip.link_lookup(ifname=lab.port(host))[0]
            shaping.limit(ip, index, lab.link, delay=False)
            ip.link("set", index=index, mtu=lab.link.mtu, master=master, state="up")
        ip.link("set", index=master, mtu=lab.link.mtu, state="up")


def _set_up(lab: Lab, host: int) -> None:
    from pyroute2 import IPRoute

    with IPRoute() as ip:
        index = ip.link_lookup(ifname=lab.interface)[0]
        shaping.limit(ip, index, lab.link, delay=True)
        ip.addr("add", index=index, address=lab.address(host), prefixlen=24)
        ip.link("set", index=ip.link_lookup(ifname="lo")[0], state="up")
        ip.link("set", index=index, mtu=lab.link.mtu, state="up")
