"""Every kind of mistake: one line with the place, the key, what was found, what is allowed."""

from pathlib import Path

import pytest

from megatron_taco.config import ConfigError, load

GOOD = "data: {source: mock}\nmodel: {preset: gpt-tiny}\n"


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def tensor_parallel(line: str) -> str:
    return f"{GOOD}compression:\n  tensor_parallel:\n    {line}\n"


CODES = "allowed: e4m3, e5m2, int8, int6, int4"
SECTIONS = "run, data, model, megatron, compression, telemetry"
TP = "x.yaml:5: compression.tensor_parallel"
TOKENIZERS = "allowed: bytes, {hf: FOLDER}, {null: VOCABULARY_SIZE}"
SIZES = "allowed: a whole number of bytes, or with a unit, for example 1MiB, 512KiB or 10MB"

CASES = {
    "value": (
        tensor_parallel("format: e4m4"),
        f"{TP}.format: 'e4m4' is not allowed; {CODES} (nearest: e4m3)",
    ),
    "value without a near one": (
        tensor_parallel("format: zzz"),
        f"{TP}.format: 'zzz' is not allowed; {CODES}",
    ),
    "true for on": (
        tensor_parallel("mode: true"),
        f"{TP}.mode: true is not allowed; allowed: off, on, auto (nearest: on)",
    ),
    "on for true": (
        tensor_parallel("forward: off"),
        f"{TP}.forward: 'off' is not allowed; allowed: true or false (nearest: false)",
    ),
    "block": (
        tensor_parallel("block: 100"),
        f"{TP}.block: 100 is not a block size; "
        "allowed: a power of two from 32 to 512: 32, 64, 128, 256, 512",
    ),
    "block too large": (
        tensor_parallel("block: 1024"),
        f"{TP}.block: 1024 is not a block size; "
        "allowed: a power of two from 32 to 512: 32, 64, 128, 256, 512",
    ),
    "size": (
        tensor_parallel("min_bytes: 1Mib"),
        f"{TP}.min_bytes: '1Mib' is not a size; {SIZES} (nearest: 1MiB)",
    ),
    "negative size": (
        tensor_parallel("min_bytes: -1"),
        f"{TP}.min_bytes: -1 is negative; {SIZES}",
    ),
    "part of a byte": (
        tensor_parallel("min_bytes: 0.3B"),
        f"{TP}.min_bytes: '0.3B' is not a whole number of bytes; {SIZES}",
    ),
    "range": (
        tensor_parallel("start_step: -1"),
        f"{TP}.start_step: -1 is out of range; allowed: at least 0",
    ),
    "whole number": (
        tensor_parallel("start_step: 1.5"),
        f"{TP}.start_step: 1.5 is not allowed; allowed: a whole number",
    ),
    "number as text": (
        tensor_parallel("start_step: '3'"),
        f"{TP}.start_step: '3' is not allowed; allowed: a whole number",
    ),
    "clips without dual scales": (
        tensor_parallel("{published_clips: true, scales: merged_bf16}"),
        f"{TP}.published_clips: true needs scales: dual, but scales is merged_bf16; "
        "set scales: dual or published_clips: false",
    ),
    "clips of an integer format": (
        tensor_parallel("{published_clips: true, format: int8}"),
        f"{TP}.published_clips: true needs one of the formats e4m3, e5m2, but format is int8; "
        "set format: e4m3 or published_clips: false",
    ),
    "clips by peer reads": (
        tensor_parallel("{published_clips: true, algorithm: peer_read}"),
        f"{TP}.algorithm: peer_read sums by kernels, and published_clips: true has none; "
        "set algorithm: auto or published_clips: false",
    ),
    "too many chunks": (
        tensor_parallel("forward_chunks: 17"),
        f"{TP}.forward_chunks: 17 is out of range; allowed: at most 16",
    ),
    "chunks of nothing": (
        tensor_parallel("{mode: on, forward: false, forward_chunks: 4}"),
        f"{TP}.forward_chunks: 4 sends compressed activations in parts, but forward and "
        "output_layer are false; set forward: true or forward_chunks: 1",
    ),
    "nothing to compress": (
        tensor_parallel("{mode: on, forward: false, backward: false}"),
        f"{TP}.mode: 'on' with forward: false and backward: false compresses nothing; "
        "set one of them to true, or mode: off",
    ),
    "unknown section": (
        GOOD + "telemetri: {}",
        f"x.yaml:3: telemetri: unknown key; allowed: {SECTIONS} (nearest: telemetry)",
    ),
    "hyphen": (
        GOOD + "telemetry: {error-every: 3}",
        "x.yaml:3: telemetry.error-every: unknown key; "
        "allowed: error_every, tensorboard, wandb (nearest: error_every)",
    ),
    "not a section": (
        GOOD + "run: 5",
        "x.yaml:3: run: 5 is not a section; allowed keys: name, dir, device, quiet",
    ),
    "not a sub-section": (
        GOOD + "telemetry: {wandb: false}",
        "x.yaml:3: telemetry.wandb: false is not a section; "
        "allowed: a mapping with the keys project, entity, mode",
    ),
    "wandb without a project": (
        GOOD + "telemetry:\n  wandb:\n    mode: offline",
        "x.yaml:4: telemetry.wandb.project: required",
    ),
    "text": (
        GOOD + "run: {name: 7}",
        "x.yaml:3: run.name: 7 is not allowed; allowed: text (nearest: '7', in quotes)",
    ),
    "null": (
        GOOD + "run: {name: null}",
        "x.yaml:3: run.name: null is not allowed; allowed: text",
    ),
    "name": (
        GOOD + "run: {name: a/b}",
        "x.yaml:3: run.name: 'a/b' is not a folder name; allowed: a name without '/'",
    ),
    "duplicate": (
        GOOD + "run:\n  name: a\n  dir: b\n  name: c",
        "x.yaml:6: run.name: duplicated key, first given on line 4; keep one of them",
    ),
    "duplicate section": (
        GOOD + "data: {source: mock}",
        "x.yaml:3: data: duplicated key, first given on line 1; keep one of them",
    ),
    "infinite": (
        GOOD + "megatron: {lr: .inf}",
        "x.yaml:3: megatron.lr: .inf is not a finite number",
    ),
    "not a number": (
        GOOD + "megatron: {lr: [1, .nan]}",
        "x.yaml:3: megatron.lr.1: .nan is not a finite number",
    ),
    "too large": (
        GOOD + "megatron: {lr: 1e999}",
        "x.yaml:3: megatron.lr: 1e999 is not a finite number",
    ),
    "tag": (
        GOOD + "run: {name: !!python/name:os.system x}",
        "x.yaml:3: run.name: the tag 'tag:yaml.org,2002:python/name:os.system' "
        "is not allowed; remove it",
    ),
    "merge key": (
        GOOD + "run: {<<: {name: a}}",
        "x.yaml:3: run.<<: merge keys (<<) are not allowed",
    ),
    "alias in itself": (
        GOOD + "megatron: &a\n  lr: [*a]",
        "x.yaml:3: megatron.lr.0: an alias (*name) stands inside its own anchor",
    ),
    "dot in a key": (
        GOOD + "run.name: a",
        "x.yaml:3: run.name: the key 'run.name' holds a dot; nest it instead: run: {name: ...}",
    ),
    "architecture under megatron": (
        GOOD + "megatron: {num_layers: 3}",
        "x.yaml:3: megatron.num_layers: belongs to another section; write it as model.num_layers",
    ),
    "tokenizer under megatron": (
        GOOD + "megatron: {tokenizer_type: NullTokenizer}",
        "x.yaml:3: megatron.tokenizer_type: belongs to another section; write it as data.tokenizer",
    ),
    "flag under megatron": (
        GOOD + "megatron: {--train-iters: 3}",
        "x.yaml:3: megatron.--train-iters: unknown key; "
        "Megatron's names have underscores (nearest: train_iters)",
    ),
    "mapping under megatron": (
        GOOD + "megatron: {lr: {a: 1}}",
        "x.yaml:3: megatron.lr: a mapping is not allowed; allowed: a scalar or a list of scalars",
    ),
    "another YAML": (
        GOOD + "megatron: {yaml_cfg: a}",
        "x.yaml:3: megatron.yaml_cfg: not allowed: "
        "this file takes the place of Megatron's own YAML; write the arguments here",
    ),
    "attention mask": (
        GOOD + "megatron: {reset_attention_mask: true}",
        "x.yaml:3: megatron.reset_attention_mask: true is not allowed: the training step passes no "
        "attention mask, attention is causal over the whole sequence; remove it "
        "(reset_position_ids and eod_mask_loss work)",
    ),
    "attention mask of the data set": (
        GOOD + "megatron: {create_attention_mask_in_dataloader: true}",
        "x.yaml:3: megatron.create_attention_mask_in_dataloader: true is not allowed: the training "
        "step passes no attention mask, attention is causal over the whole sequence; remove it",
    ),
    "mask between documents": (
        GOOD + "megatron: {dataloader_inter_document_masking: true}",
        "x.yaml:3: megatron.dataloader_inter_document_masking: true is not allowed: the training "
        "step passes no attention mask, attention is causal over the whole sequence; remove it",
    ),
    "context parallel": (
        GOOD + "megatron:\n  transformer_impl: local\n  context_parallel_size: 2.0",
        "x.yaml:5: megatron.context_parallel_size: 2 needs Transformer Engine's attention; set "
        "megatron.transformer_impl: transformer_engine and model.attention: megatron, or "
        "model.attention: te, or "
        "megatron.context_parallel_size: 1",
    ),
    "zero-centred gamma": (
        GOOD + "megatron: {apply_layernorm_1p: true}",
        "x.yaml:3: megatron.apply_layernorm_1p: true needs norms with a zero-centred gamma, which "
        "torch's, used with model.attention: auto, do not have; set model.attention: megatron, or "
        "megatron.apply_layernorm_1p: false",
    ),
    "sliding window": (
        GOOD + "megatron: {window_size: '64,0'}",
        "x.yaml:3: megatron.window_size: '64,0': torch's attention, used with model.attention: "
        "auto, has no sliding window; set model.attention: megatron, or remove the key",
    ),
    "softmax": (
        "data: {source: mock}\nmodel: {preset: gpt-tiny, attention: sdpa}\n"
        "megatron: {softmax_type: off-by-one}",
        "x.yaml:3: megatron.softmax_type: 'off-by-one': torch's attention, used with "
        "model.attention: sdpa, has only vanilla; set model.attention: megatron, or "
        "megatron.softmax_type: vanilla",
    ),
    "sequence parallel": (
        GOOD + "megatron:\n  sequence_parallel: true\n  tensor_model_parallel_size: 3",
        "x.yaml:2: model.max_position_embeddings: 128 tokens do not divide into 3 equal parts, "
        "which megatron.sequence_parallel with tensor_model_parallel_size 3 needs; allowed: a "
        "multiple of 3, or megatron.sequence_parallel: false",
    ),
    "sequence parallel of shorter sequences": (
        GOOD + "megatron: {sequence_parallel: true, tensor_model_parallel_size: 2, seq_length: 63}",
        "x.yaml:3: megatron.seq_length: 63 tokens do not divide into 2 equal parts, which "
        "megatron.sequence_parallel with tensor_model_parallel_size 2 needs; allowed: a multiple "
        "of 2, or megatron.sequence_parallel: false",
    ),
    "two sources": (
        "data:\n  source: mock\n  path: a\n  tokenizer: bytes\nmodel: {preset: gpt-tiny}",
        "x.yaml:3: data.path: contradicts data.source; give exactly one of source, path",
    ),
    "no source": (
        "model: {preset: gpt-tiny}",
        "x.yaml:1: data: no data; give exactly one of source, path, train_path",
    ),
    "split of a source": (
        "data: {source: mock, split: '9,1'}\nmodel: {preset: gpt-tiny}",
        "x.yaml:1: data.split: needs data.path; only that is divided",
    ),
    "split": (
        "data: {path: a, split: 90, tokenizer: bytes}\nmodel: {preset: gpt-tiny}",
        "x.yaml:1: data.split: 90 is not a split; allowed: text with the shares of training, "
        "validation and test, for example '969, 30, 1'",
    ),
    "validation alone": (
        "data: {source: mock, valid_path: v}\nmodel: {preset: gpt-tiny}",
        "x.yaml:1: data.valid_path: needs data.train_path (data.path is divided by data.split)",
    ),
    "own data without a tokenizer": (
        "data: {path: a}\nmodel: {preset: gpt-tiny}",
        "x.yaml:1: data.path: needs data.tokenizer, the one the data was written with; "
        f"{TOKENIZERS}",
    ),
    "tokenizer": (
        "data: {source: mock, tokenizer: byte}\nmodel: {preset: gpt-tiny}",
        f"x.yaml:1: data.tokenizer: 'byte' is not a tokenizer; {TOKENIZERS} (nearest: bytes)",
    ),
    "tokenizer key": (
        "data: {source: mock, tokenizer: {hff: a}}\nmodel: {preset: gpt-tiny}",
        f"x.yaml:1: data.tokenizer: unknown key 'hff' in a tokenizer; {TOKENIZERS} (nearest: hf)",
    ),
    "tokenizer size": (
        "data: {source: mock, tokenizer: {null: 0}}\nmodel: {preset: gpt-tiny}",
        f"x.yaml:1: data.tokenizer: null: 0 is not a positive whole number; {TOKENIZERS}",
    ),
    "tokenizer of text": (
        "data: {source: python-stdlib, tokenizer: {null: 9}}\nmodel: {preset: gpt-tiny}",
        "x.yaml:1: data.tokenizer: null reads no text; "
        "source: python-stdlib needs bytes or {hf: ...}",
    ),
    "vocabulary": (
        "data: {source: mock}\nmodel:\n  preset: gpt-tiny\n  vocab_size: 256",
        "x.yaml:4: model.vocab_size: 256 rows are too few for the 257 ids of data.tokenizer "
        "(bytes); allowed: at least 257",
    ),
    "preset": (
        "data: {source: mock}\nmodel: {preset: qwen3-8B}",
        "x.yaml:2: model.preset: 'qwen3-8B' is no preset; allowed: gpt-tiny, gpt-reference, "
        "gpt-350m, gpt-1.3b, gpt-6.7b, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen3-0.6b, "
        "qwen3-1.7b, qwen3-8b, llama-150m, llama-500m, llama-1b (nearest: qwen3-8b)",
    ),
    "size of the model": (
        "data: {source: mock}\nmodel:\n  preset: gpt-tiny\n  num_layers: 0",
        "x.yaml:4: model.num_layers: 0 is out of range; allowed: at least 1",
    ),
    "heads": (
        "data: {source: mock}\nmodel:\n  preset: gpt-tiny\n  num_attention_heads: 5",
        "x.yaml:4: model.num_attention_heads: 5 does not divide hidden_size (128); "
        "change one of them or set kv_channels",
    ),
    "groups": (
        "data: {source: mock}\nmodel:\n  preset: gpt-tiny\n  num_query_groups: 3",
        "x.yaml:4: model.num_query_groups: 3 does not divide num_attention_heads (4)",
    ),
    "biases": (
        "data: {source: mock}\nmodel:\n  preset: gpt-tiny\n  add_qkv_bias: false",
        "x.yaml:4: model.add_qkv_bias: false contradicts add_bias_linear: true, "
        "which gives every linear layer a bias",
    ),
    "empty": (
        "# nothing\n",
        f"x.yaml:1: the file is empty; allowed: a mapping of the sections {SECTIONS}",
    ),
    "a list": (
        "- a\n",
        f"x.yaml:1: ['a'] is not a mapping; allowed: a mapping of the sections {SECTIONS}",
    ),
    "two documents": ("a: 1\n---\nb: 1\n", "x.yaml:3: a second YAML document; only one is allowed"),
    "unknown anchor": (
        "a: *b\n",
        "x.yaml:1: YAML syntax error: found undefined alias 'b'",
    ),
    "syntax": (
        "run:\n  name: [a\n",
        "x.yaml:3: YAML syntax error: while parsing a flow sequence expected ',' or ']', "
        "but got '<stream end>'",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_mistake_is_one_line(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    assert problems(tmp_path, text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "megatron: {reset_attention_mask: false, reset_position_ids: true, eod_mask_loss: true}",
        "megatron: {no_create_attention_mask_in_dataloader: true}",
        "megatron: {apply_layernorm_1p: false, softmax_type: vanilla, window_size: null}",
        "megatron: {sequence_parallel: true, tensor_model_parallel_size: 4.0, seq_length: 64}",
        "megatron: {sequence_parallel: true, seq_length: 63}",
        "megatron: {context_parallel_size: 1}",
        "compression: {tensor_parallel: {published_clips: true, format: e5m2}}",
    ],
)
def test_what_goes_together_is_accepted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(GOOD + text)
    load(path)


def test_megatrons_own_layers_take_what_torchs_do_not(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "data: {source: mock}\nmodel: {preset: gpt-tiny, attention: megatron}\n"
        "megatron: {apply_layernorm_1p: true, softmax_type: learnable, window_size: '64,0', "
        "context_parallel_size: 2, transformer_impl: transformer_engine}"
    )
    load(path)


OVERRIDES = {
    "compression.tensor_parallel.format=e4m4": (f"'e4m4' is not allowed; {CODES} (nearest: e4m3)"),
    "foo": "no '='; write overrides as key=value, for example run.name=test",
    "=3": "the key must be names joined by dots, for example run.name=test",
    "run..name=3": "the key must be names joined by dots, for example run.name=test",
    "run.nme=a": "unknown key; allowed: name, dir, device, quiet (nearest: name)",
    "a.b=1": f"unknown key; allowed: {SECTIONS}",
    "run={nme: 1}": "unknown key; allowed: name, dir, device, quiet (nearest: name)",
    "data.source.x=1": "data.source is 'mock' (x.yaml:1), not a section",
    "model.preset.x=1": "model.preset is 'gpt-tiny' (x.yaml:2), not a section",
    "megatron.lr=[": (
        "YAML syntax error: while parsing a flow node expected the node content, "
        "but found '<stream end>'"
    ),
    "megatron.lr=.nan": ".nan is not a finite number",
    "megatron.num_layers=2": "belongs to another section; write it as model.num_layers",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_wrong_override_is_shown_as_it_was_typed(tmp_path: Path, override: str) -> None:
    found = problems(tmp_path, GOOD, override)
    shown = [line.replace(": run.nme: ", ": ") for line in found]
    assert shown == [f"command line: {override}: {OVERRIDES[override]}"]


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = """\
telemetri: {}
model: {preset: gpt-tyny, hidden_size: big}
data: {source: mok}
megatron: {lr: .inf, num_layers: 2}
compression:
  tensor_parallel: {format: e4m4, block: 1, block: 2}
"""
    found = problems(tmp_path, text, "nothing", "run.device=gpu")
    places = [":".join(line.split(":")[:3]) for line in found]
    assert places == [
        "x.yaml:1: telemetri",
        "x.yaml:2: model.preset",
        "x.yaml:2: model.hidden_size",
        "x.yaml:3: data.source",
        "x.yaml:4: megatron.lr",
        "x.yaml:4: megatron.num_layers",
        "x.yaml:6: compression.tensor_parallel.block",
        "x.yaml:6: compression.tensor_parallel.format",
        "x.yaml:6: compression.tensor_parallel.block",
        "command line: nothing: no '='; write overrides as key=value, for example run.name=test",
        "command line: run.device=gpu: 'gpu' is not allowed; allowed",
    ]


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "gpt-350m.yaml").write_text(GOOD)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "gpt-350.yaml")
    expected = f"{tmp_path}/gpt-350.yaml: no such file (nearest: gpt-350m.yaml)"
    assert str(caught.value) == expected


def test_a_folder_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"run: \xff")
    with pytest.raises(ConfigError, match="not UTF-8 text: byte 5 is 0xff"):
        load(binary)


def test_a_file_that_unfolds_without_end_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for i in range(1, 9):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]")
    found = problems(tmp_path, "\n".join(lines))
    assert any("more than 100000 values" in line for line in found)
