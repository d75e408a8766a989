"""The examples call torchrun and the launcher with arguments that these take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_taco.config import load_settings
from megatron_taco.drop_in.command_line import parse

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
RECORDER = f"""#!{sys.executable}
import json, os, sys
names = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "CUDA_DEVICE_MAX_CONNECTIONS")
record = {{"argv": sys.argv[1:], "env": {{name: os.environ.get(name) for name in names}}}}
open(os.environ["RECORD"], "a").write(json.dumps(record) + "\\n")
"""
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
for SLURM_PROCID in 0 1; do SLURM_PROCID=$SLURM_PROCID "$@" || exit; done
"""


def run(
    script: str, tmp_path: Path, arguments: tuple[str, ...] = (), **env: str
) -> list[dict[str, dict[str, str]]]:
    """Run an example with stand-ins for the programs it calls; returns what torchrun was given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {"torchrun": RECORDER, "srun": SRUN, "scontrol": "#!/bin/sh\necho n1\necho n2\n"}
    for name, text in stand_ins.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    record = tmp_path / "record"
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record)}
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        environ.pop(name, None)
    subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments], env=environ | env, check=True, timeout=60
    )
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.parametrize("script", ["single_node.sh", "two_nodes.sh", "elastic.sh", "slurm.sbatch"])
def test_an_example_starts_the_launcher_with_what_it_takes(script: str, tmp_path: Path) -> None:
    calls = run(
        script, tmp_path, ("--train-iters", "7"), MEGATRON="/m", NODE_RANK="1", MASTER_ADDR="n1",
        SAVE="/s", TACO="--device cpu", SLURM_SUBMIT_DIR=str(ROOT), SLURM_JOB_NODELIST="n[1-2]",
        SLURM_JOB_ID="12345", SLURM_JOB_NUM_NODES="2", SLURM_GPUS_ON_NODE="8",
    )  # fmt: skip
    assert len(calls) == (2 if script == "slurm.sbatch" else 1)
    from torch.distributed.run import get_args_parser

    for number, call in enumerate(calls):
        args = get_args_parser().parse_args(call["argv"])
        assert args.module
        assert args.training_script == "megatron_taco.launch"
        launch = parse(args.training_script_args)
        assert launch.script == "/m/pretrain_gpt.py"
        assert launch.device == "cpu"
        assert launch.arguments[-2:] == ("--train-iters", "7")
        assert "--tensor-model-parallel-size" in launch.arguments
        assert load_settings(launch.compression).compression.tensor_parallel.mode == "auto"
        assert call["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        if script == "slurm.sbatch":
            assert (args.nnodes, args.node_rank, args.master_addr) == ("2", number, "n1")
            assert args.master_port == 22345
            assert args.nproc_per_node == "8"
        if script == "elastic.sh":
            assert args.max_restarts == 3
            assert launch.arguments.count("/s") == 2


def test_megatron_takes_the_flags_and_we_the_settings() -> None:
    from megatron_taco.training.megatron_options import megatron_options

    parser = megatron_options().parser
    files = sorted((EXAMPLES / "flags").glob("*.txt"))
    assert files
    for file in files:
        args = parser.parse_args(file.read_text().split())  # raises on a flag that there is not
        assert args.tensor_model_parallel_size == 2
        assert args.transformer_impl == "local"
        # What needs Apex's extensions, and is on unless one says otherwise.
        assert not args.masked_softmax_fusion
        assert not args.gradient_accumulation_fusion
        assert args.no_persist_layer_norm
        assert not args.apply_rope_fusion
    for file in sorted(EXAMPLES.glob("*.yaml")):
        assert load_settings(file).compression.tensor_parallel.enabled


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "MEGATRON"}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "single_node.sh")],
        env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "MEGATRON: the folder of your Megatron-LM checkout" in done.stderr
