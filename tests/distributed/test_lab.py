"""The lab for real: namespaces, rates, and nothing left behind.

Where namespaces may not be made (no root, no rights in a container, no tbf in the kernel) the same
calls must be refused with one message, and each test checks that instead.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_taco.cli import main
from tests.processes import marked, wait_until

NETNS = Path("/run/netns")
REFUSAL = re.compile(
    r"megatron-taco lab: (the lab makes network namespaces, which needs root; .*"
    r"|the lab needs (Linux|pyroute2) .*"
    r"|network namespace \S+ cannot be made .*CAP_SYS_ADMIN.*"
    r"|this kernel does not have .*|the kernel refused .*)\n"
)
CHILDREN = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
time.sleep(0.3)
os.write(1, b"up\\n")
time.sleep(600)
"""
"""Starts one child in the rank's session and one that leaves it."""
PRINT_LINK = "import os; os.write(1, (os.environ['MEGATRON_TACO_LINK'] + '\\n').encode())"
"""One write a rank: ``print`` may write its newline apart, behind another rank's text."""
RING = """
import os, socket, sys
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
names = sorted(name for _, name in socket.if_nameindex())
assert names == sorted(["lo", os.environ["GLOO_SOCKET_IFNAME"]]), names
server = socket.create_server(("", 4000))
import time
def reach(host):
    while True:
        try:
            return socket.create_connection((f"10.77.0.{host + 1}", 4000), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.05)
with reach((rank + 1) % ranks) as there, server.accept()[0] as here:
    there.sendall(bytes([rank]) * 300_000)
    there.shutdown(socket.SHUT_WR)
    got = b"".join(iter(lambda: here.recv(65536), b""))
assert got == bytes([(rank - 1) % ranks]) * 300_000
os.write(1, b"ring %d\\n" % rank)
"""


Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Calls megatron-taco with some words, in this process; ranks write where it writes."""

    def called(*words: str) -> Done:
        capfd.readouterr()
        code = main(words)
        out, err = capfd.readouterr()
        return Done(words, code, out, err)

    return called


def _may_make_namespaces() -> bool:
    code = "import os, pyroute2; os.unshare(os.CLONE_NEWNET)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def _refused(done: Done) -> bool:
    """Whether the call was refused; then it has to have been for a reason, and politely."""
    if done.returncode != 2:
        return False
    assert REFUSAL.fullmatch(done.stderr), done.stderr
    assert done.stdout == ""
    assert not _may_make_namespaces() or "kernel" in done.stderr
    return True


def _lab_of(stderr: str) -> str:
    found = re.search(r"megatron-taco lab: (taco\d+): ", stderr)
    assert found, stderr
    return found.group(1)


def _gone(lab: str) -> bool:
    """Nothing of a lab is there: no namespace, no interface outside of one."""
    named = [*(os.listdir(NETNS) if NETNS.is_dir() else []), *(n for _, n in socket.if_nameindex())]
    return not [name for name in named if name.startswith(f"{lab}-")]


@contextlib.contextmanager
def _running(marker: str) -> Iterator[subprocess.Popen[str]]:
    """A lab whose two ranks, and their children, wait; or one that has been refused."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "megatron_taco.cli", "lab", "run", "--hosts", "2"),
            *("--rate", "1Gbit", "--cpu", "--", "-c", CHILDREN, marker),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline():
            assert process.stdout.readline() == "up\n"
            assert len(marked(marker)) >= 6  # two ranks with two children each
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_link_is_as_slow_as_it_says(call: Call, tmp_path: Path) -> None:
    """4 MiB over 100 Mbit/s take 0.336 s over gloo, within a tenth; sooner in neither pattern."""
    report = tmp_path / "check.json"
    arguments = ["--sizes", "4MiB", "--repeats", "3", "--json", str(report)]
    done = call("lab", "check", "--hosts", "2", "--rate", "100Mbit", "--cpu", *arguments)
    if _refused(done):
        return
    assert done.returncode == 0, done.stderr
    assert _gone(_lab_of(done.stderr))
    found = json.loads(report.read_text())
    one_way, all_to_all = found["checks"]
    assert one_way["crossing"] == 4 << 20
    assert one_way["expected_s"] == pytest.approx((4 << 20) * 8 / 100e6)
    assert 0.98 <= one_way["share"] <= 1.1
    # gloo may send one way at a time here, so above there is no bound.
    assert all_to_all["crossing"] == 2 << 20
    assert all_to_all["share"] >= 0.98
    assert found["usable"]


def test_a_large_bucket_is_found_out(call: Call) -> None:
    """A burst of half the message lets it through in half the time: the lab says so, and fails."""
    arguments = ["--burst", "2MiB", "--sizes", "4MiB", "--repeats", "1", "--cpu"]
    done = call("lab", "check", "--hosts", "2", "--rate", "100Mbit", *arguments)
    if _refused(done):
        return
    assert done.returncode == 1, done.stderr
    assert "UNUSABLE" in done.stdout
    assert _gone(_lab_of(done.stderr))


def test_three_hosts_reach_each_other_and_nothing_else(call: Call) -> None:
    """Over the bridge; the machine's own interfaces are not there."""
    done = call("lab", "run", "--hosts", "3", "--rate", "1Gbit", "--cpu", "--", "-c", RING)
    if _refused(done):
        return
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "ring 0", "ring 1", "ring 2"]
    assert _gone(_lab_of(done.stderr))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_lab_leaves_nothing(number: signal.Signals) -> None:
    """SIGKILL too: a guard outlives the lab for that."""
    marker = f"lab-signal-{os.getpid()}-{number.name}"
    with _running(marker) as process:
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    if _refused(Done([], process.returncode, "", err)):
        return
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    lab = _lab_of(err)
    if number == signal.SIGKILL:
        assert wait_until(lambda: _gone(lab))
    assert _gone(lab)
    assert wait_until(lambda: not marked(marker), 2.0)


def test_a_killed_rank_leaves_nothing(call: Call) -> None:
    """The exit code is the rank's; its children and the other rank go with it."""
    marker = f"lab-rank-{os.getpid()}"
    code = CHILDREN.replace("time.sleep(600)\n", "os.kill(os.getpid(), 9)\n")
    assert code != CHILDREN
    done = call("lab", "run", "--hosts", "2", "--rate", "1Gbit", "--cpu", "--", "-c", code, marker)
    if _refused(done):
        return
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert _gone(_lab_of(done.stderr))
    assert not marked(marker)


@pytest.mark.parametrize(
    ("rate", "bits", "burst"), [("200Mbit", 2e8, 64_000), ("100Gbit", 1e11, 1_000_000)]
)
def test_up_run_down(call: Call, rate: str, bits: float, burst: int) -> None:
    """A lab that stays serves runs, is found out by reading it, and goes; twice down is fine."""
    done = call("lab", "up", "--hosts", "2", "--rate", rate, "--mtu", "4000")
    if _refused(done):
        return
    found = re.match(r"(taco\d+): 2 hosts, (.*); use it", done.stdout)
    assert found, done.stdout
    lab = found.group(1)
    try:
        assert not _gone(lab)
        done = call("lab", "run", "--lab", lab, "--cpu", "--", "-c", PRINT_LINK)
        assert done.returncode == 0, done.stderr
        link = json.loads(done.stdout.splitlines()[0])["link"]
        assert (link["rate"], link["mtu"], link["delay_us"]) == (bits, 4000, 0)
        assert link["burst"] == pytest.approx(burst, rel=0.01)
        assert not _gone(lab)
    finally:
        done = call("lab", "down", "--lab", lab)
    assert done.stdout == f"removed {lab}\n"
    assert _gone(lab)
    assert call("lab", "down", "--lab", lab).stdout == f"{lab} is not up\n"
    done = call("lab", "run", "--lab", lab, "--", "x.py")
    assert done.returncode == 2
    assert f"no lab {lab} is up" in done.stderr


def test_delay_works_or_says_that_netem_is_missing(call: Call) -> None:
    """A delay is made where the kernel can; else it is refused, and nothing stays."""
    link = ["--hosts", "2", "--rate", "1Gbit", "--delay", "20ms"]
    done = call("lab", "run", *link, "--cpu", "--", "-c", PRINT_LINK)
    if _refused(done):
        if _may_make_namespaces():
            assert re.search("netem|tbf", done.stderr)
        return
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["link"]["delay_us"] == 20_000
    assert _gone(_lab_of(done.stderr))
