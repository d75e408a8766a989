"""Data, tokenizer and checkpoint that a run cannot use are refused before it starts."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_taco.config import Config, load
from megatron_taco.data.writer import DocumentWriter
from megatron_taco.training import data_checks

TEXT = """\
data: {source: mock}
model: {preset: gpt-tiny}
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, lengths: list[int], last_id: int = 256, vocab_size: int = 257) -> str:
        with DocumentWriter(tmp_path / name, vocab_size) as writer:
            for length in lengths:
                tokens = np.full(length, 65, dtype=np.uint16)
                tokens[-1:] = last_id
                writer.add(tokens, name)
        return str(tmp_path / name)

    return write


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    path = tmp_path / "x.yaml"
    path.write_text(TEXT)
    return lambda *overrides: load(path, overrides)


def arguments(**changed: Any) -> Namespace:
    settings: dict[str, Any] = {
        "split": "969, 30, 1",
        "seq_length": 64,
        "eval_iters": 2,
        "full_validation": False,
        "load": None,
        "save": None,
        "pretrained_checkpoint": None,
        "non_persistent_ckpt_type": None,
    }
    return Namespace(**{**settings, **changed})


def found(config: Config, **changed: Any) -> list[str]:
    return [str(problem) for problem in data_checks.check(config, arguments(**changed))]


def divided(prefix: str, split: str | None = None) -> str:
    said = f", split: '{split}'" if split else ""
    return f"data={{path: {prefix}, tokenizer: bytes{said}}}"


def test_a_split_without_documents_is_refused_used_or_not(
    write: Write, configured: Callable[..., Config]
) -> None:
    prefix = write("one", [1000])
    config = configured(divided(prefix, "9,1,0"))
    for eval_iters in (0, 2):
        (message,) = found(config, split="9,1,0", eval_iters=eval_iters)
        assert message.endswith(
            f"{prefix} has 1 document (1000 tokens), of which data.split '9,1,0' gives validation "
            "a share of 0.1, 0 documents (0 tokens); Megatron would never finish building "
            "that part: give more documents or other shares, in data.split, for instance 0 for "
            "validation"
        )
    assert found(config, split="1,0,0") == []


def test_megatrons_own_split_is_named_where_none_is_set(
    write: Write, configured: Callable[..., Config]
) -> None:
    (message,) = found(configured(divided(write("some", [100] * 100))))
    assert "data.split (not set) '969, 30, 1' gives test a share of 0.001, 0 documents" in message
    assert found(configured(divided(write("many", [100] * 2000)))) == []


def test_less_than_a_sequence_is_refused_where_it_is_used(
    write: Write, configured: Callable[..., Config]
) -> None:
    config = configured(divided(write("short", [65] * 9 + [64]), "9,1"))
    (message,) = found(config, split="9,1")
    assert "1 document (64 tokens); one sequence needs 65 tokens" in message
    assert found(config, split="9,1", eval_iters=0) == []
    assert len(found(config, split="9,1", eval_iters=0, full_validation=True)) == 1
    assert found(config, split="9,1", seq_length=63) == []
    (message,) = found(config, split="1", seq_length=649)
    assert "gives training a share of 1, 10 documents (649 tokens)" in message


def test_every_prefix_is_looked_at_by_itself(
    write: Write, configured: Callable[..., Config]
) -> None:
    good, short = write("good", [100] * 10), write("short", [10])
    blend = f"data={{path: [0.7, {good}, 0.3, {short}], split: '1', tokenizer: bytes}}"
    (message,) = found(configured(blend), split="1")
    assert f"{short} has 1 document (10 tokens), of which data.split '1' gives training" in message
    own = f"data={{train_path: {good}, valid_path: {short}, tokenizer: bytes}}"
    (message,) = found(configured(own))
    assert f"{short} has 1 document (10 tokens); one sequence needs 65" in message
    assert found(configured(own), eval_iters=0) == []


@pytest.mark.parametrize("split", ["9,1,0", "969, 30, 1", "1,1,1", "0.5,0.5", "7,2,1"])
@pytest.mark.parametrize("documents", [3, 25, 77])
def test_documents_are_divided_as_megatron_divides_them(
    write: Write, split: str, documents: int
) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    class Divided(GPTDataset):
        def __init__(self, dataset: Any, path: Any, indices: Any, *rest: Any) -> None:
            self.part = (rest[1].value, int(indices[0]), int(indices[-1]) + 1, len(indices))

    prefix = write("text", [2] * documents)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        blend=([prefix], None),
        split=split,
        tokenizer=NullTokenizer(257),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    ours = list(data_checks._shares("path", documents, Namespace(split=split)))
    if any(begin == end for _, _, begin, end in ours):
        # Where we see nothing, so does Megatron: there is no first index.
        with pytest.raises(IndexError):
            BlendedMegatronDatasetBuilder(Divided, [1, 1, 1], lambda: True, config).build()
        return
    builder = BlendedMegatronDatasetBuilder(Divided, [1, 1, 1], lambda: True, config)
    theirs = [part.part for part in builder._build_blended_dataset_splits() if part is not None]
    assert [(i, begin, end, end - begin) for i, _, begin, end in ours] == theirs


def test_ids_of_another_tokenizer_are_refused(
    write: Write, configured: Callable[..., Config]
) -> None:
    prefix = write("foreign", [100] * 10, last_id=299, vocab_size=300)
    (message,) = found(configured(divided(prefix, "1")), split="1")
    assert message.endswith(
        f"{prefix} holds the token id 299; the 257 ids of data.tokenizer (bytes) are 0 to 256: it "
        "was written with another tokenizer; name that one, or prepare the data again"
    )
    null = f"data={{path: {prefix}, split: '1', tokenizer: {{null: 300}}}}"
    assert found(configured(null), split="1") == []


def test_only_a_sample_of_a_large_corpus_is_read(
    write: Write, configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "_CHUNKS", 4)
    monkeypatch.setattr(data_checks, "_CHUNK_TOKENS", 8)
    # Ends of documents lie outside of the four chunks: they are looked at by themselves.
    prefix = write("large", [100] * 50, last_id=299, vocab_size=300)
    (message,) = found(configured(divided(prefix, "1")), split="1")
    assert "token id 299" in message


@pytest.mark.parametrize("cut", [".bin", ".idx", "header", "odd"])
def test_files_that_are_cut_off_are_named(
    write: Write, configured: Callable[..., Config], cut: str
) -> None:
    prefix = write("cut", [100] * 10)
    file = Path(prefix + (cut if cut.startswith(".") else ".idx" if cut == "header" else ".bin"))
    keep = {"header": 12, "odd": 1001}.get(cut, file.stat().st_size // 2)
    file.write_bytes(file.read_bytes()[:keep])
    (message,) = found(configured(divided(prefix, "1")), split="1")
    assert prefix in message
    assert message.endswith("prepare it again")


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    import tokenizers

    folder = tmp_path / "hf"
    folder.mkdir()
    words = {"<eos>": 0, **{f"w{i}": i for i in range(1, 300)}}
    model = tokenizers.models.WordLevel(words, unk_token="<eos>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_tokenizer_of_more_ids_than_the_model_has_rows(
    configured: Callable[..., Config], hf_folder: Path
) -> None:
    mock = f"data={{source: mock, tokenizer: {{hf: {hf_folder}}}}}"
    config = configured(mock, "model.vocab_size=299")
    (message,) = found(config)
    assert message == (
        "command line: model.vocab_size=299: 299 rows are too few for the 300 ids of "
        f"data.tokenizer (hf:{hf_folder}); allowed: at least 300"
    )
    assert found(configured(mock, "model.vocab_size=300")) == found(configured(mock)) == []


def test_a_folder_without_a_tokenizer(configured: Callable[..., Config], tmp_path: Path) -> None:
    (message,) = found(configured(f"data={{source: mock, tokenizer: {{hf: {tmp_path}}}}}"))
    assert message.startswith("command line: data=")
    assert f"tokenizer hf:{tmp_path}: cannot be loaded" in message


def test_ids_are_compared_with_the_hf_tokenizer(
    write: Write, configured: Callable[..., Config], hf_folder: Path
) -> None:
    for last_id, count in ((299, 0), (300, 1)):
        prefix = write(f"text{last_id}", [100] * 10, last_id=last_id, vocab_size=400)
        own = f"data={{path: {prefix}, split: '1', tokenizer: {{hf: {hf_folder}}}}}"
        assert len(found(configured(own), split="1")) == count


def test_a_checkpoint_that_is_not_there(configured: Callable[..., Config], tmp_path: Path) -> None:
    config = configured("megatron.load=ck")
    folder, other = tmp_path / "ck", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (message,) = found(config, load=str(folder))
    assert message == (
        f"command line: megatron.load=ck: there is no checkpoint in {folder} (no "
        "latest_checkpointed_iteration.txt); to start from nothing leave load out"
    )
    (message,) = found(config, pretrained_checkpoint=str(other))
    assert f"megatron.pretrained_checkpoint: there is no checkpoint in {other}" in message
    assert len(found(config, load=str(folder), pretrained_checkpoint=str(other))) == 2
    (other / "latest_checkpointed_iteration.txt").write_text("2")
    assert found(config, load=str(folder), pretrained_checkpoint=str(other)) == []
    marker = folder / "latest_checkpointed_iteration.txt"
    marker.write_text("4")
    (message,) = found(config, load=str(folder))
    assert f"there is no iter_0000004 in {folder}; there are: none" in message
    (folder / "iter_0000004").mkdir()
    assert found(config, load=str(folder)) == []
    (message,) = found(config, load=str(folder), ckpt_step=5)
    assert f"megatron.ckpt_step: there is no iter_0000005 in {folder}" in message
    marker.write_text("banana")
    (message,) = found(config, load=str(folder))
    assert f"{marker} holds 'banana', allowed: a number of an iteration" in message
    assert "there are: iter_0000004" in message
    marker.write_text("release")
    assert found(config, load=str(folder)) == []


def test_where_checkpoints_cannot_be_written(
    configured: Callable[..., Config], tmp_path: Path
) -> None:
    config = configured("megatron.save=out")
    assert found(config, save=str(tmp_path / "new" / "out")) == []
    (tmp_path / "file").touch()
    (message,) = found(config, save=str(tmp_path / "file" / "out"))
    assert f"{tmp_path / 'file'} is no folder or not ours" in message


def test_a_run_without_files_has_nothing_to_check(configured: Callable[..., Config]) -> None:
    assert found(configured()) == []
