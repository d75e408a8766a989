"""The rate on one end of a link: puts it on an interface, and reads it back.

``tbf`` up to 34.3 Gbit, the largest rate that its 32-bit number of bytes per second holds; ``htb``
with a single class above, whose rate has 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from megatron_taco.lab.link import LabError, Link
from megatron_taco.lab.rates import LARGEST_TBF

_ROOT: Final = 0xFFFFFFFF
_SHAPER: Final = 0x0001_0000
_CLASS: Final = 1
_NETEM: Final = 0x0002_0000
_QUEUE_S: Final = 0.05
_SMALLEST_QUEUE: Final = 1 << 20
_NETEM_PACKETS: Final = 1_000_000
_HTB_QUANTUM: Final = 200_000
_NO_SUCH_KIND: Final = 2
"""ENOENT, netlink's answer to a qdisc or link of a kind that the kernel does not have."""


def limit(ip: Any, index: int, link: Link, *, delay: bool) -> None:
    """Puts the rate, and the delay where asked for, on what leaves through an interface.

    Args:
        ip: A ``pyroute2.IPRoute`` of the interface's namespace.
        index: Of the interface.
        link: Rate in bits per second, burst in bytes, delay in microseconds.
        delay: Whether the link's delay is put there too.

    Raises:
        LabError: The kernel has no such qdisc.
    """
    parent = _ROOT
    if delay and link.delay_us:
        with explained("the netem qdisc (sch_netem), which --delay needs"):
            ip.tc("add", "netem", index, _NETEM, delay=link.delay_us, limit=_NETEM_PACKETS)
        parent = _NETEM + 1
    rate = link.rate // 8
    if link.rate <= LARGEST_TBF:
        queue = max(_SMALLEST_QUEUE, int(rate * _QUEUE_S))
        with explained("the tbf qdisc (sch_tbf)"):
            sizes = {"rate": rate, "burst": link.burst, "limit": queue}
            ip.tc("add", "tbf", index, _SHAPER, parent=parent, **sizes)
        return
    with explained("the htb qdisc (sch_htb), which rates above 34.3 Gbit need"):
        ip.tc("add", "htb", index, _SHAPER, parent=parent, default=_CLASS)
        # Equal bursts of rate and ceiling: the class has nobody to borrow from.
        ip.tc(
            "add-class",
            "htb",
            index,
            _SHAPER + _CLASS,
            parent=_SHAPER,
            rate=rate,
            burst=link.burst,
            cburst=link.burst,
            quantum=_HTB_QUANTUM,
        )


def read(interface: str) -> Link:
    """Returns the link that an interface of the present namespace has, as its qdiscs say.

    Raises:
        LookupError: There is no such interface, or it has no rate.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.rtnl.tcmsg.common import tick_in_usec

    with IPRoute() as ip:
        index = ip.link_lookup(ifname=interface)[0]
        mtu = next(iter(ip.get_links(index))).get_attr("IFLA_MTU")
        options = {
            qdisc.get_attr("TCA_KIND"): qdisc.get_attr("TCA_OPTIONS")
            for qdisc in ip.get_qdiscs(index=index)
        }
        if "tbf" in options:
            found = options["tbf"].get_attr("TCA_TBF_PARMS")
            rate = found["rate"]
        elif "htb" in options:
            shaper = next(iter(ip.get_classes(index=index))).get_attr("TCA_OPTIONS")
            found = shaper.get_attr("TCA_HTB_PARMS")
            rate = shaper.get_attr("TCA_HTB_RATE64") or found["rate"]
        else:
            raise LookupError(f"{interface} has no rate")
    delay = options["netem"]["delay"] / tick_in_usec if "netem" in options else 0
    return Link(
        rate=rate * 8,
        burst=round(found["buffer"] / tick_in_usec / 1e6 * rate),
        mtu=mtu,
        delay_us=round(delay),
    )


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns netlink's refusal of something into a :class:`LabError` that names it."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except NetlinkError as error:
        if error.code in (_NO_SUCH_KIND, 95):  # EOPNOTSUPP, for kinds of links
            raise LabError(f"this kernel does not have {what}") from error
        raise LabError(f"the kernel refused {what}: {error}") from error
