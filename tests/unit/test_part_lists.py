"""The lists of parts in scripts/reproduce: every command is one that its program takes."""

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_taco.cli.bench import BENCHMARKS
from megatron_taco.config import load
from megatron_taco.lab.part import Part
from megatron_taco.lab.step_arms import Layout

FOLDER = Path(__file__).parent.parent.parent / "scripts" / "reproduce"
LISTS = ("one_gpu_speed", "two_gpus", "four_gpus", "eight_gpus", "taco_throughput")
GPUS = {"two_gpus": 2, "four_gpus": 4, "eight_gpus": 8, "taco_throughput": 8}
BENCH = ("-m", "megatron_taco.cli", "bench")
TORCHRUN = ("-m", "torch.distributed.run")


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the folder, imported as it is when it runs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in (request.param, "several_parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(request.param)


def parts_of(module: ModuleType) -> list[Part]:
    if module.__name__ != "taco_throughput":
        return list(module.PARTS)
    words = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h0", "--small"]
    args, rest = module.parse(words)
    assert rest == ["--small"]
    found: list[Part] = module.parts(args)
    return found


def check(command: tuple[str, ...], *, ranks: int | None, cpu: bool) -> None:
    """Parse a command as its program does; a step's configuration is loaded as well."""
    if command[:2] == TORCHRUN:
        from torch.distributed.run import get_args_parser

        args = get_args_parser().parse_args(command[2:])
        assert (args.nnodes, args.node_rank, args.master_addr) == ("2", 1, "h0")
        assert args.module
        ranks = 2 * int(args.nproc_per_node)
        command = ("-m", args.training_script, *args.training_script_args)
    if command[:3] != BENCH:
        script = command[1] if command[0] == "-m" else command[0]
        assert importlib.util.find_spec(script) if command[0] == "-m" else Path(script).is_file()
        if Path(script).stem == "axes_losses":
            script_module = importlib.import_module("axes_losses")
            parser = argparse.ArgumentParser()
            script_module.add_arguments(parser)
            args = parser.parse_args([*command[1:], "--json", "out.json"])
            assert (args.ranks, args.cpu) == (ranks, cpu)
            axes = script_module.axes_of(args.ranks, args.overrides)
            for arm in ("uncompressed", *args.arms):
                more = script_module.compression(arm, axes)
                load(script_module.CONFIG, [*script_module.TEXT, *args.overrides, *more])
        return
    benchmark, *words = command[3:]
    parser = argparse.ArgumentParser()
    importlib.import_module(BENCHMARKS[benchmark][0]).add_arguments(parser)
    args = parser.parse_args([*words, "--json", "out.json"])
    if ranks is not None and args.hosts is not None:
        assert args.hosts * args.ranks_per_host == ranks
    if ranks is not None and args.ranks is not None:
        assert args.ranks == ranks
    if benchmark != "kernels" and (args.ranks or args.hosts) and ranks is not None:
        assert args.cpu == cpu
    if benchmark == "step" and args.config is not None:
        config = load(args.config, args.overrides)
        assert ranks is not None
        layout = Layout.of(config, ranks)
        assert layout.axes(args.axis)
        micro, whole = (config.megatron[f"{n}_batch_size"] for n in ("micro", "global"))
        assert whole % (micro * layout.data) == 0
        assert config.model.num_layers % layout.pipeline == 0
        for heads in (config.model.num_attention_heads, config.model.num_query_groups):
            assert not heads or heads % layout.tensor == 0 or layout.tensor % heads == 0
        assert config.model.num_attention_heads % layout.tensor == 0


@pytest.mark.parametrize("module", LISTS, indirect=True)
def test_the_lists_ask_for_what_the_programs_take(module: ModuleType) -> None:
    parts = parts_of(module)
    gpus = GPUS.get(module.__name__)
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        check(part.command, ranks=gpus, cpu=False)
        if gpus is None:
            continue
        assert part.gpus == gpus
        assert bool(part.small) != bool(part.no_small), part.name
        if part.small:
            small = part.in_small_form()
            assert small.environment["CUDA_VISIBLE_DEVICES"] == ""
            check(small.command, ranks=gpus, cpu=True)


@pytest.mark.parametrize("module", ["taco_throughput"], indirect=True)
def test_machines_are_given_as_to_torchrun(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NODE_RANK", "SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for words, message in (
        (["--master-addr", "h0"], "--node-rank (or NODE_RANK): the number of this machine"),
        (["--node-rank", "2", "--master-addr", "h0"], "0 to 1, found 2"),
        (["--node-rank", "1"], "--master-addr (or MASTER_ADDR)"),
    ):
        with pytest.raises(SystemExit) as caught:
            module.parse(words)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    args, _ = module.parse([])
    assert (args.nnodes, args.node_rank, args.master_addr) == (2, 1, "10.0.0.1")
    assert (args.nproc_per_node, args.master_port) == (8, 29500)


@pytest.mark.parametrize("name", ["two_gpus", "taco_throughput"])
def test_the_shell_scripts_start_the_lists(name: str) -> None:
    """As the first host of a lab: its rank is the machine's number."""
    environ = {**os.environ, "PYTHON": sys.executable, "RANK": "0", "MASTER_ADDR": "10.77.0.1"}
    environ.pop("NODE_RANK", None)
    done = subprocess.run(
        ["bash", str(FOLDER / f"{name}.sh"), "--list"],
        env=environ, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = {"two_gpus": "bench collectives --ranks 2", "taco_throughput": "--node-rank 0"}
    assert shown[name] in done.stdout
