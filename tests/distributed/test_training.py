"""The trainer over real processes: parallel layouts, recomputation, resumption, bit-equality."""

import json
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import (
    DISTRIBUTED_OPTIMIZER,
    INTERLEAVED,
    OFF,
    SP,
    TP2_PP2,
    losses,
    metrics,
    train,
    write_config,
)
from tests.ranks import RankRunner


def tensor_parallel_copies(model: Any) -> list[torch.Tensor]:
    """Parameters that every rank of a tensor-parallel group holds a copy of."""
    return [
        parameter.detach().clone()
        for chunk in model
        for parameter in chunk.parameters()
        if not getattr(parameter, "tensor_model_parallel", False)
    ]


@pytest.mark.parametrize("layout", [(), (SP, *INTERLEAVED)], ids=["plain", "sp-vp2"])
def test_3d_layouts_train_compressed(
    run_ranks: RankRunner, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    """TP 2 × PP 2 × DP 2 follows the uncompressed run, and resuming at step 10 changes no bit."""
    config = write_config(tmp_path)
    base = (*TP2_PP2, *layout, DISTRIBUTED_OPTIMIZER, "megatron.train_iters=14")
    save = ("megatron.save_interval=10", f"megatron.save={tmp_path / 'saved'}")

    whole = run_ranks(
        train, 8, config, [*base, *save], None, tensor_parallel_copies, init=False, timeout=240
    )
    # Ranks 0 and 1 are a tensor-parallel group: what both hold must not have drifted apart.
    for left, right in ((0, 1), (2, 3), (4, 5), (6, 7)):
        pairs = list(zip(whole[left], whole[right], strict=True))
        assert pairs
        assert all(torch.equal(a, b) for a, b in pairs)

    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("10")
    run_ranks(
        train, 8, config, [*base, f"megatron.load={tmp_path / 'saved'}", "run.name=resumed"],
        init=False, timeout=240,
    )  # fmt: skip
    unbroken, after = losses(tmp_path), losses(tmp_path, "resumed")
    assert sorted(after) == [11, 12, 13, 14]
    assert {step: unbroken[step] for step in after} == after

    assert unbroken[14] < unbroken[1] - 0.3
    if layout and layout != (SP,):
        return  # interleaving changes the order of the same work: one comparison a kind is enough
    run_ranks(train, 8, config, [*base, OFF, "run.name=off"], init=False, timeout=240)
    uncompressed = losses(tmp_path, "off")
    assert unbroken[14] == pytest.approx(uncompressed[14], rel=0.01)
    assert unbroken != uncompressed


def test_resuming_without_the_distributed_optimizer_changes_no_bit(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    """With dropout, whose masks must be alike on both ranks and go on after the load."""
    config = write_config(tmp_path)
    tp2 = ["megatron.tensor_model_parallel_size=2", "megatron.hidden_dropout=0.1"]
    save = [f"megatron.save={tmp_path / 'saved'}", "megatron.save_interval=3"]
    copies = run_ranks(
        train, 2, config, [*tp2, *save], None, tensor_parallel_copies, init=False, timeout=120
    )
    assert all(torch.equal(a, b) for a, b in zip(*copies, strict=True))
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    resume = ["run.name=resumed", f"megatron.load={tmp_path / 'saved'}"]
    run_ranks(train, 2, config, [*tp2, *resume], init=False, timeout=120)
    unbroken, after = losses(tmp_path), losses(tmp_path, "resumed")
    assert sorted(after) == [4, 5, 6]
    assert {step: unbroken[step] for step in after} == after


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("model.num_query_groups=2", "model.normalization=LayerNorm", "model.qk_layernorm=true"),
        ("megatron.apply_query_key_layer_scaling=true", "megatron.bf16=false"),
    ],
    ids=["rmsnorm", "gqa-layernorm-qknorm", "layer-scaling"],
)
def test_torch_layers_compute_megatrons_model(
    run_ranks: RankRunner, tmp_path: Path, extra: tuple[str, ...]
) -> None:
    """Torch's attention and norms give Megatron's losses to FP32 rounding, large weights too."""
    config = write_config(tmp_path)
    fp32 = ["megatron.bf16=false", "model.init_method_std=0.3", "megatron.train_iters=2", OFF]
    for attention in ("sdpa", "megatron"):
        overrides = [*fp32, *extra, f"model.attention={attention}", f"run.name={attention}"]
        run_ranks(train, 1, config, list(dict.fromkeys(overrides)), init=False, timeout=60)
    for step, loss in losses(tmp_path, "megatron").items():
        assert losses(tmp_path, "sdpa")[step] == pytest.approx(loss, rel=2e-5)


def test_samples_fp16_and_sparse_reports(run_ranks: RankRunner, tmp_path: Path) -> None:
    """train_samples instead of train_iters; FP16's overflowing steps spoil no statistics."""
    config = write_config(tmp_path)
    overrides = [
        "megatron.tensor_model_parallel_size=2",
        *("megatron.bf16=false", "megatron.fp16=true", "megatron.initial_loss_scale=1048576"),
        *("megatron.train_iters=null", "megatron.train_samples=72", "megatron.lr_decay_iters=null"),
        *("megatron.log_interval=4", "telemetry.error_every=1"),
    ]
    run_ranks(train, 2, config, overrides, init=False, timeout=120)
    assert sorted(losses(tmp_path)) == [4, 8, 9]
    assert all(loss is not None for loss in losses(tmp_path).values())
    end = next(line for line in metrics(tmp_path) if line["event"] == "end")
    assert end["flows"]["tp.forward all_reduce"]["error"] == pytest.approx(0.026, rel=0.05)


def test_recomputation_sends_the_same_bytes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Full recomputation repeats every forward collective; the losses keep every bit."""
    config = write_config(tmp_path)
    full = (
        "megatron.recompute_granularity=full",
        "megatron.recompute_method=uniform",
        "megatron.recompute_num_layers=1",
    )
    tp2 = ("megatron.tensor_model_parallel_size=2",)
    for ranks, layout in ((2, tp2), (4, (*TP2_PP2, SP))):
        name = f"run.name=stored{len(layout)}"
        again = f"run.name=recomputed{len(layout)}"
        for overrides in ([name], [again, *full]):
            run_ranks(train, ranks, config, [*layout, *overrides], init=False, timeout=120)
        stored = losses(tmp_path, f"stored{len(layout)}")
        recomputed = losses(tmp_path, f"recomputed{len(layout)}")
        assert len(stored) == 6
        assert stored == recomputed


def test_checkpoints_cross_over(run_ranks: RankRunner, tmp_path: Path) -> None:
    """A checkpoint trained without compression goes on with it, and the reverse."""
    config = write_config(tmp_path)
    for first, second, name in ((OFF, None, "to-on"), (None, OFF, "to-off")):
        folder = tmp_path / f"saved-{name}"
        base = ["megatron.tensor_model_parallel_size=2", f"run.name={name}"]
        start = [*base, *([first] if first else []), f"megatron.save={folder}"]
        start += ["megatron.train_iters=9", "megatron.exit_interval=6"]
        run_ranks(train, 2, config, [*start, "megatron.save_interval=6"], init=False, timeout=120)
        go_on = [*base, *([second] if second else []), f"megatron.load={folder}"]
        run_ranks(train, 2, config, [*go_on, "megatron.train_iters=9"], init=False, timeout=120)
        found = losses(tmp_path, name)
        assert sorted(found) == list(range(1, 10))
        assert found[9] < found[1]
        compressed = [
            flow["compressed"]
            for line in metrics(tmp_path, name)
            if line["event"] == "step" and line["iteration"] > 6
            for flow in line["flows"].values()
        ]
        assert any(compressed) is (second is None)


def test_resuming_on_another_schedule_or_from_a_damaged_file_is_explained(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    save = [f"megatron.save={tmp_path / 'saved'}", "megatron.save_interval=2"]
    run_ranks(train, 1, config, [OFF, *save, "megatron.train_iters=2"], init=False, timeout=60)
    longer = [OFF, f"megatron.load={tmp_path / 'saved'}", "megatron.lr_decay_iters=30"]
    with pytest.raises(AssertionError) as caught:
        run_ranks(train, 1, config, longer, init=False, timeout=60)
    text = " ".join(str(caught.value).split())
    assert "exit code 2" in text
    assert "error: megatron.load: the checkpoint was trained on another schedule" in text
    assert "megatron.override_opt_param_scheduler: true" in text
    (damaged,) = (tmp_path / "saved").rglob("__0_0.distcp")
    damaged.write_bytes(damaged.read_bytes()[:5000])
    with pytest.raises(AssertionError) as caught:
        run_ranks(
            train, 1, config, [OFF, f"megatron.load={tmp_path / 'saved'}"], init=False, timeout=60
        )
    text = " ".join(str(caught.value).split())
    assert "exit code 1" in text
    assert "rank 0 failed outside of a training step" in text


def test_start_step_postpones_compression(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Steps before start_step equal the uncompressed run's to the last bit; later ones do not."""
    config = write_config(tmp_path)
    late = "compression.tensor_parallel.start_step=3"
    for overrides in (["run.name=late", late], ["run.name=off", OFF]):
        run_ranks(
            train,
            2,
            config,
            ["megatron.tensor_model_parallel_size=2", *overrides],
            init=False,
            timeout=120,
        )
    late_losses, off_losses = losses(tmp_path, "late"), losses(tmp_path, "off")
    assert [late_losses[s] for s in (1, 2, 3)] == [off_losses[s] for s in (1, 2, 3)]
    assert late_losses[5] != off_losses[5]


def test_a_table_of_roles_is_recorded(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Calls and bytes of each role are those that the model's layout makes."""
    config = write_config(tmp_path)
    run_ranks(
        train, 2, config,
        ["megatron.tensor_model_parallel_size=2", "compression.tensor_parallel.embedding=true"],
        init=False, timeout=120,
    )  # fmt: skip
    end = next(line for line in metrics(tmp_path) if line["event"] == "end")
    flows = end["flows"]
    steps, micro_batches, layers, ranks = 6, 4, 4, 2
    calls = 2 * layers * micro_batches * steps * ranks
    elements = 64 * 2 * 64  # sequence × micro-batch × hidden
    assert flows["tp.forward all_reduce"]["calls"] == calls
    assert flows["tp.backward all_reduce"]["calls"] == calls
    assert flows["tp.embedding all_reduce"]["compressed"] == micro_batches * steps * ranks
    assert flows["tp.output_layer all_reduce"]["compressed"] == 0
    assert flows["tp.output_layer all_reduce"]["calls"] == micro_batches * steps * ranks
    # At P = 2 a ring all-reduce sends each element once; a payload is a byte for each and two
    # FP32 scales for each block of 256.
    assert flows["tp.forward all_reduce"]["raw_bytes"] == calls * elements * 2
    assert flows["tp.forward all_reduce"]["wire_bytes"] == calls * (elements + elements // 256 * 8)
    assert flows["tp.forward all_reduce"]["error"] == pytest.approx(0.026, rel=0.05)


def prepare_text(folder: Path) -> None:
    """Two byte-level data sets of this repository's own sources, as ``prepare-data`` makes them."""
    from megatron_taco.cli import main

    source = Path(__file__).parent.parent.parent / "megatron_taco"
    for part in ("config", "patching"):
        command = ["prepare-data", str(source / part), "--output", str(folder / part)]
        assert main([*command, "--tokenizer", "bytes", "--append-eod", "--include", "*.py"]) == 0


def prepare_text_once(rank: int, world_size: int, folder: str) -> None:
    prepare_text(Path(folder))


def wandb_records(folder: Path) -> list[Any]:
    """What an offline run of wandb has kept."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (file,) = folder.glob("**/offline-run-*/run-*.wandb")
    store = DataStore()
    store.open_for_scan(str(file))
    records = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def test_prepared_data_blends_and_trackers(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Own .bin/.idx prefixes as a weighted blend, split as Megatron does.

    Scalars and the resolved configuration go to TensorBoard and, offline, to wandb.
    """
    wandb = util.find_spec("wandb") is not None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = write_config(tmp_path)
    prefixes = [str(tmp_path / f"{part}_text_document") for part in ("config", "patching")]
    overrides = [
        "data.source=null",
        f"data.path=[0.7, {prefixes[0]}, 0.3, {prefixes[1]}]",
        "data.split='9,1,0'",
        "data.tokenizer=bytes",
        "telemetry.tensorboard=true",
        *(["telemetry.wandb={project: test, mode: offline}"] if wandb else []),
        "megatron.eval_iters=2",
        "megatron.train_iters=12",
        "megatron.lr_decay_iters=12",
    ]
    run_ranks(prepare_text_once, 1, str(tmp_path), init=False, timeout=120)
    two = ["megatron.tensor_model_parallel_size=2", "megatron.tensorboard_log_interval=1"]
    run_ranks(train, 2, config, [*overrides, *two], init=False, timeout=120)
    found = losses(tmp_path)
    assert found[12] < found[1] - 0.5
    validation = [line for line in metrics(tmp_path) if line["event"] == "validation"]
    assert [line["iteration"] for line in validation] == [12]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    name = "megatron_taco/tp.forward/all_reduce"
    assert len(events.Scalars(f"{name}/wire_bytes")) == 12
    ratio = (
        events.Scalars(f"{name}/wire_bytes")[3].value / events.Scalars(f"{name}/raw_bytes")[3].value
    )
    assert ratio == pytest.approx(0.516, abs=0.001)
    assert len(events.Scalars("lm loss")) == 12
    (text,) = events.Tensors("megatron_taco/configuration/text_summary")
    assert b"min_bytes: 1024" in text.tensor_proto.string_val[0]
    if not wandb:
        pytest.skip("TensorBoard's part has passed; the extra [dev] brings wandb")
    records = wandb_records(tmp_path / "run" / "wandb")
    logged = [
        {item.key or item.nested_key[-1]: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [float(step[f"{name}/wire_bytes"]) for step in logged if f"{name}/wire_bytes" in step]
    described = [
        update.value_json
        for record in records
        for update in (*record.config.update, *record.run.config.update)
        if (update.key or update.nested_key[-1]) == "megatron_taco_configuration"
    ]
    assert json.loads(described[-1])["compression"]["tensor_parallel"]["min_bytes"] == 1024
