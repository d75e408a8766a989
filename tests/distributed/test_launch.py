"""A user's own script under ``megatron_taco.launch``: unedited, compressed, refused, resumed."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import losses, metrics
from tests.ranks import RankRunner

SCRIPT = str(Path(__file__).parent / "users_script.py")
ROOT = str(Path(__file__).parent.parent.parent)
FLAGS = shlex.split("""
--distributed-backend gloo --transformer-impl local --use-cpu-initialization
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --attention-backend unfused
--num-workers 0 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64
--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --lr 3e-3
--lr-decay-style constant --lr-decay-iters 20 --eval-iters 0 --eval-interval 100 --log-interval 1
--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 128
--distributed-timeout-minutes 1 --bf16 --mock-data
""")
TP2 = ["--tensor-model-parallel-size", "2"]
TP2_PP2 = [*TP2, "--pipeline-model-parallel-size", "2"]
ON = ["--compression.tensor_parallel.mode", "on", "--compression.tensor_parallel.min_bytes=1KiB"]
OFF = ["--compression.tensor_parallel.mode", "off"]


def launch(rank: int, world_size: int, argv: list[str], expected: int = 0) -> list[str]:
    """Run the launcher in this rank's process; returns what is still replaced in Megatron."""
    from megatron_taco.launch import main

    sys.path.insert(0, ROOT)  # where the script finds `tests`, as if PYTHONPATH said so
    code = main(argv)
    assert code == expected, f"exit code {code}, expected {expected}"
    return sys.argv


def launch_with_own_flags(rank: int, world_size: int, by_rank: list[list[str]]) -> None:
    launch(rank, world_size, by_rank[rank], 2)


def plain(rank: int, world_size: int, arguments: list[str]) -> list[float]:
    """Run the script without us, on the CPU shim; returns the losses on the ranks that have any."""
    from megatron_taco.patching.cpu import CpuShim

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    CpuShim().install().install_megatron()
    import megatron.core.datasets.utils as data_utils
    import megatron.training.training as loop

    from megatron_taco.drop_in.script import run_script

    data_utils.compile_helpers = lambda: None
    found: list[float] = []
    log = loop.training_log

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        found.extend(float(value) for value in loss_dict.values())
        return log(loss_dict, *args, **kwargs)

    loop.training_log = training_log
    sys.path.insert(0, ROOT)
    run_script(SCRIPT, arguments)
    return found


def test_an_unedited_script_trains_compressed_and_off_is_without_us(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """TP 2 × PP 2: within 0.5% of the run without us after 10 steps; off is equal bit for bit."""
    flags = [*FLAGS, *TP2_PP2, "--train-iters", "10"]
    without = run_ranks(plain, 4, flags, init=False, timeout=120)[-1]
    for name, mode in (("on", ON), ("off", OFF)):
        argv = ["--device", "cpu", "--run-dir", str(tmp_path / name), *mode, SCRIPT, *flags]
        run_ranks(launch, 4, argv, init=False, timeout=120, cwd=tmp_path)
    assert len(without) == 10
    assert list(losses(tmp_path, "off").values()) == without
    on = losses(tmp_path, "on")
    assert on[10] != without[-1]
    assert abs(on[10] - without[-1]) < 0.005 * without[-1]
    end = metrics(tmp_path, "on")[-1]
    assert end["event"] == "end"
    for role in ("tp.forward", "tp.backward"):
        flow = end["flows"][f"{role} all_reduce"]
        assert flow["compressed"] == flow["calls"] > 0
        assert 0.50 < flow["wire_bytes"] / flow["raw_bytes"] < 0.53
    assert metrics(tmp_path, "off")[-1]["event"] == "step"


def test_a_script_imports_megatron_itself_saves_and_resumes_bit_equal(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """Megatron is imported by the script alone; a checkpoint holds an object of the script's.

    Figures go beside the checkpoints, and a resumed run goes on with them.
    """
    saved = tmp_path / "saved"
    config = tmp_path / "taco.yaml"
    config.write_text("compression: {tensor_parallel: {mode: on, min_bytes: 1KiB}}\n")
    ours = ["--device", "cpu", "--compression", str(config)]
    flags = [*FLAGS, *TP2, "--save", str(saved), "--save-interval", "2"]
    env = {"TORCHDYNAMO_DISABLE": "1"}
    run_ranks(
        launch, 2, [*ours, SCRIPT, *flags, "--train-iters", "4"], init=False, timeout=200, env=env,
        cwd=tmp_path, preload="torch",
    )  # fmt: skip
    unbroken = losses(saved, "megatron_taco")
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = [*flags, "--train-iters", "4", "--load", str(saved)]
    run_ranks(launch, 2, [*ours, SCRIPT, *resumed], init=False, timeout=120, cwd=tmp_path)
    records = metrics(saved, "megatron_taco")
    again = [line["event"] for line in records].index("resume")
    assert records[again]["iteration"] == 2
    after = {x["iteration"]: x["loss"] for x in records[again:] if x["event"] == "step"}
    assert after == {step: unbroken[step] for step in (3, 4)}
    assert (saved / "megatron_taco" / "previous-1" / "config.yaml").is_file()


def test_ranks_that_differ_are_refused_in_one_line(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Contract 8, in a script that is not ours."""
    base = ["--device", "cpu", "--run-dir", str(tmp_path / "run")]
    rest = [SCRIPT, *FLAGS, *TP2, "--train-iters", "2"]
    different = ["--compression.tensor_parallel.block", "128"]
    by_rank = [[*base, *ON, *rest], [*base, *ON, *different, *rest]]
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_after, 2, by_rank, init=False, timeout=60, cwd=tmp_path)
    text = re.sub(r"\s+", " ", str(caught.value))
    assert "rank 1 differs from rank 0: compression.tensor_parallel.block: 256 != 128" in text
    assert "all ranks left with the expected code" in text
    assert "Traceback" not in text.partition("output of rank 0")[2].partition("--- rank")[0]


def fail_after(rank: int, world_size: int, by_rank: list[list[str]]) -> None:
    """Fail on purpose once the launcher has returned 2, so that what was printed is shown."""
    launch_with_own_flags(rank, world_size, by_rank)
    print("all ranks left with the expected code", file=sys.stderr, flush=True)
    raise AssertionError("shown on purpose")


def test_what_does_not_go_with_compression_is_refused_by_its_flag(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    argv = ["--device", "cpu", *ON, SCRIPT, *FLAGS, "--train-iters", "2"]
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_after, 2, [argv, argv], init=False, timeout=60, cwd=tmp_path)
    text = re.sub(r"\s+", " ", str(caught.value))
    assert "error: --tensor-model-parallel-size 1 with compression.tensor_parallel.mode: on" in text
    assert "all ranks left with the expected code" in text
    assert not (tmp_path / "megatron_taco_runs").exists()


def test_a_role_that_is_never_compressed_fails_the_run(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """Contract 7: the default threshold of 1 MiB is above all that this model sends."""
    argv = ["--device", "cpu", *ON[:2], SCRIPT, *FLAGS, *TP2, "--train-iters", "3"]
    with pytest.raises(AssertionError) as caught:
        run_ranks(launch, 2, argv, init=False, timeout=60, cwd=tmp_path)
    text = re.sub(r"\s+", " ", str(caught.value))
    assert "role tp.forward (all_reduce) was seen" in text
    assert "never compressed" in text
    assert "exit code 1, expected 0" in text
    assert (tmp_path / "megatron_taco_runs" / "users_script" / "config.yaml").is_file()


def test_auto_and_a_boundary_on_a_model_that_the_script_builds(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """TP 2 × PP 2, as in examples/taco.yaml; what auto finds here does not matter."""
    ours = ["--device", "cpu", "--run-dir", str(tmp_path / "run")]
    ours += ["--compression.tensor_parallel.mode=auto", "--compression.tensor_parallel.min_bytes=0"]
    pipeline = ("mode=on", "boundary=mapl", "rank=16")
    ours += [f"--compression.pipeline_parallel.{setting}" for setting in pipeline]
    flags = [*FLAGS, *TP2_PP2, "--train-iters", "3"]
    run_ranks(launch, 4, [*ours, SCRIPT, *flags], init=False, timeout=120, cwd=tmp_path)
    policy = json.loads((tmp_path / "run" / "policy.json").read_text())
    assert {measured["role"] for measured in policy["measured"]} == {"tp.forward", "tp.backward"}
    flows = metrics(tmp_path)[-1]["flows"]
    for role in ("pp.forward", "pp.backward"):
        (flow,) = (flow for name, flow in flows.items() if name.startswith(role))
        assert flow["compressed"] == flow["calls"] > 0


def test_the_data_parallel_axis_of_a_users_script(run_ranks: RankRunner, tmp_path: Path) -> None:
    ours = ["--device", "cpu", "--run-dir", str(tmp_path / "run")]
    data = ["--compression.data_parallel.mode=on", "--compression.data_parallel.min_bytes=1KiB"]
    flags = [*FLAGS, "--train-iters", "3", "--use-distributed-optimizer"]
    run_ranks(launch, 2, [*ours, *data, SCRIPT, *flags], init=False, timeout=60, cwd=tmp_path)
    flow = metrics(tmp_path)[-1]["flows"]["dp.gradients.mlp reduce_scatter"]
    assert flow["compressed"] == flow["calls"] > 0
    assert flow["wire_bytes"] < 0.3 * flow["raw_bytes"]
