"""The lab without a lab: arguments, names, refusals, places. No namespace is made here."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_taco.cli import bench, main
from megatron_taco.lab import link_check, links, namespaces, places
from megatron_taco.lab.link import LINK_VARIABLE, NAMESPACE, Lab, LabError, Link, RankLink

LINK = Link(rate=10**9, burst=64_000)


def _fails(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one message that a wrong call ends with, exit code 2."""
    try:
        code = main(arguments)
    except SystemExit as error:  # argparse's own way
        code = int(error.code or 0)
    assert code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lab up --rate 1Gbit", "--hosts N and --rate RATE are needed"),
        ("lab up --hosts 2", "--hosts N and --rate RATE are needed"),
        ("lab up --hosts 0 --rate 1Gbit", "at least 1"),
        ("lab up --hosts 1 --rate 1Gbit", "a lab has 2 to 64"),
        ("lab up --hosts 65 --rate 1Gbit", "a lab has 2 to 64"),
        ("lab up --hosts 2 --rate 1GB", "is not a rate"),
        ("lab up --hosts 2 --rate 1Gbit --mtu 100", "--mtu 100"),
        ("lab up --hosts 2 --rate 1Gbit --burst 9000", "below one frame"),
        ("lab up --hosts 2 --rate 1Gbit --burst tiny", "is not a size"),
        ("lab up --hosts 2 --rate 1Gbit --delay 3", "is not a time"),
        ("lab run --hosts 2 --rate 1Gbit", "nothing to run"),
        ("lab run --hosts 2 --rate 1Gbit --ranks 2 -- x.py", "--ranks is for loopback"),
        ("lab run --lab taco0 --rate 1Gbit -- x.py", "leave --hosts, --rate out"),
        ("lab run --share-gpu --cpu --ranks 2 -- x.py", "not allowed with"),
        ("lab check --hosts 2 --rate 1Gbit --sizes 0", "size of nothing"),
        ("lab sideways", "invalid choice"),
        ("bench collectives", "no ranks"),
        ("bench collectives --ranks 2 --hosts 2", "--ranks is for loopback"),
        ("bench collectives --ranks 2 --formats e4m3,fp8", "'fp8' is none of e4m3"),
        ("bench colectives", "nearest: collectives"),
    ],
)
def test_a_wrong_call_is_one_message(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "create", _never)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert message in _fails(arguments.split(), capsys)


def _never(*_: Any) -> None:
    raise AssertionError("a namespace would have been made")


ACTIONS = [
    "lab up --hosts 2 --rate 1Gbit",
    "lab down",
    "lab check --hosts 2 --rate 1Gbit",
    "lab run --hosts 2 --rate 1Gbit -- x.py",
    "lab run --lab taco0 -- x.py",
    "bench collectives --hosts 2 --rate 1Gbit",
]


@pytest.mark.parametrize("arguments", ACTIONS)
def test_without_root_it_refuses(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(namespaces, "create", _never)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = _fails(arguments.split(), capsys)
    assert "needs root" in message
    assert "1000" in message


@pytest.mark.parametrize("arguments", ACTIONS)
def test_without_pyroute2_it_says_what_to_install(
    arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(namespaces, "create", _never)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.util, "find_spec", lambda name: None)
    message = _fails(arguments.split(), capsys)
    assert "pip install 'megatron-taco[lab]'" in message


def test_elsewhere_than_on_linux_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="darwin"):
        namespaces.require()


def test_without_the_right_to_make_namespaces_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(namespaces, "inside", refused)
    with pytest.raises(LabError, match="CAP_SYS_ADMIN"):
        namespaces.create("taco99999-h0")


def test_only_our_names_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What down removes: whole names of ours, and of the lab that is meant."""
    ours = ["taco0-h0", "taco0-h1", "taco10-h0", "taco10-switch"]
    others = ["taco0", "taco-h0", "xtaco0-h0", "taco0-h0x", "tacos", "blue", "taco0-hx", "Taco0-h0"]
    monkeypatch.setattr(namespaces, "names", lambda: ours + others)
    monkeypatch.setattr(namespaces, "require", lambda: None)
    removed: list[str] = []

    def remove(found: list[str]) -> list[int]:
        removed.extend(found)
        return []

    monkeypatch.setattr(namespaces, "remove", remove)
    assert links.find() == ["taco0", "taco10"]
    links.destroy("taco10")
    assert removed == ["taco10-h0", "taco10-switch"]
    links.destroy("taco1")
    assert removed == ["taco10-h0", "taco10-switch"]


def test_every_name_of_a_lab_has_its_prefix_and_fits_the_kernel() -> None:
    lab = Lab(name="taco999", hosts=64, link=LINK)
    assert lab.switch is not None
    assert all(NAMESPACE.match(name) for name in (*lab.namespaces, lab.switch))
    for name in (lab.interface, *(lab.port(host) for host in range(64))):
        assert name.startswith("taco999-")
        assert len(name) <= 15
    assert len({lab.address(host) for host in range(64)}) == 64
    assert Lab(name="taco0", hosts=2, link=LINK).switch is None


def _environments(found: list[places.Place], name: str) -> list[str | None]:
    return [place.environment.get(name) for place in found]


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setattr(namespaces, "inside", lambda name, function: function())
    return Lab(name="taco0", hosts=2, link=LINK)


def test_ranks_on_hosts_with_a_gpu_each(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = places.lab_places(lab, 2)
    assert [place.netns for place in found] == ["taco0-h0", "taco0-h0", "taco0-h1", "taco0-h1"]
    assert _environments(found, "RANK") == ["0", "1", "2", "3"]
    assert _environments(found, "LOCAL_RANK") == ["0", "1", "0", "1"]
    assert _environments(found, "CUDA_VISIBLE_DEVICES") == ["4,5", "4,5", "6,7", "6,7"]
    hosts = _environments(found, "NCCL_HOSTID")
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert set(_environments(found, name)) == {"taco0-link"}
    for name, value in (
        ("MASTER_ADDR", lab.address(0)),
        ("WORLD_SIZE", "4"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("NCCL_IB_DISABLE", "1"),
    ):
        assert set(_environments(found, name)) == {value}
    assert len(set(_environments(found, "MASTER_PORT"))) == 1


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_to_nccl(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for found in (
        places.lab_places(lab, 2, gpus="share"),
        places.loopback_places(4, gpus="share"),
    ):
        assert _environments(found, "LOCAL_RANK") == ["0"] * 4
        assert len(set(_environments(found, "NCCL_HOSTID"))) == 4
        assert _environments(found, "CUDA_VISIBLE_DEVICES") == [None] * 4


def test_too_few_gpus_are_refused_with_what_to_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(LabError, match=r"2 ranks and 1 GPU.*--share-gpu.*--cpu"):
        places.lab_places(lab, 1)
    assert _environments(places.lab_places(lab, 1, gpus="none"), "CUDA_VISIBLE_DEVICES") == ["", ""]


def test_ranks_know_their_link(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankLink.from_environment() is None
    (text, *_) = _environments(places.lab_places(lab, 2, gpus="share"), LINK_VARIABLE)
    assert text is not None
    monkeypatch.setenv(LINK_VARIABLE, text)
    found = RankLink.from_environment()
    assert found == RankLink(link=LINK, hosts=2, ranks_per_host=2, shared_gpu=True)
    # Each of a host's 2 ranks sends half of its 400 bytes to the other host.
    assert found.crossing(400) == 400


def _check(pattern: str, *shares: float) -> link_check.Check:
    return link_check.Check(
        pattern=pattern,
        size=1000,
        crossing=1000,
        expected_s=2.0,
        measured_s=[2 * s for s in shares],
    )


def test_one_message_that_is_too_fast_makes_a_lab_unusable() -> None:
    good, slow = _check("one way", 1.02, 0.99), _check("all-to-all", 2.0)
    assert link_check.verdict([good, slow]).startswith("usable: ")
    for bad in (_check("one way", 1.01, 0.979), _check("all-to-all", 0.5)):
        assert not bad.honest
        assert link_check.verdict([good, slow, bad]).startswith("UNUSABLE")
    assert "does not fill" in link_check.verdict([_check("one way", 1.3), slow])


def test_the_check_is_for_ranks_of_a_lab(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        link_check.main([])
    assert LINK_VARIABLE in capsys.readouterr().err


def test_benchmarks_can_be_listed_without_torch(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys\nfrom megatron_taco.cli import main\n"
        "for words in (['bench', '--help'], ['bench', 'collectives', '--help'], ['lab', '--help'],"
        " ['lab', 'run', '--help']):\n"
        "    try: main(words)\n    except SystemExit as error: assert error.code == 0\n"
        "heavy = {'torch', 'megatron', 'pyroute2'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in bench.BENCHMARKS:
        assert name in done.stdout
