"""Tokenisers: bytes, and Hugging Face folders."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_taco.data import ByteTokenizer, DataError, HfTokenizer, load_tokenizer


def save_hf_tokenizer(folder: Path, **special_tokens: str) -> Path:
    """Writes a tokeniser of words a, b, c and unknown, as save_pretrained() does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<end>": 1, "a": 2, "b": 3, "c": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapper = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special_tokens)
    wrapper.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf_tokenizer(tmp_path_factory.mktemp("words"), eos_token="<end>")


@given(st.binary(max_size=200), st.booleans())
def test_bytes_are_their_own_ids(text: bytes, append_eod: bool) -> None:
    tokens = ByteTokenizer().encode(text, "doc", append_eod)
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == list(text) + ([256] if append_eod and text else [])


def test_hf_encodes_and_ends_documents(hf_folder: Path) -> None:
    tokenizer = load_tokenizer(f"hf:{hf_folder}")
    assert (tokenizer.vocab_size, tokenizer.eod) == (5, 1)
    assert tokenizer.encode(b"b a nothing c", "doc").tolist() == [3, 2, 0, 4, 1]
    assert tokenizer.encode(b"b", "doc", append_eod=False).tolist() == [3]
    assert tokenizer.encode(b"", "doc").tolist() == []


def test_hf_takes_sep_where_there_is_no_eos(tmp_path: Path) -> None:
    assert HfTokenizer(save_hf_tokenizer(tmp_path, sep_token="<end>")).eod == 1


def test_hf_without_eos_refuses_only_eod(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(save_hf_tokenizer(tmp_path))
    assert tokenizer.eod is None
    assert tokenizer.encode(b"a", "doc", append_eod=False).tolist() == [2]
    with pytest.raises(DataError, match=r"no EOS .* --no-append-eod"):
        tokenizer.encode(b"a", "doc")


def test_hf_names_the_byte_that_is_not_utf8(hf_folder: Path) -> None:
    with pytest.raises(DataError, match=r"notes\.txt: not UTF-8 at byte 2 \(0xff\)"):
        HfTokenizer(hf_folder).encode(b"a \xff b", "notes.txt")


def test_megatron_builds_tokenizers_of_the_same_ids(hf_folder: Path) -> None:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.config.training_config import TokenizerConfig

    for spec in ("bytes", f"hf:{hf_folder}"):
        ours = load_tokenizer(spec)
        config = TokenizerConfig(**ours.megatron_arguments(), pad_vocab_size=False)
        theirs = build_tokenizer(config)
        assert (theirs.vocab_size, theirs.eod) == (ours.vocab_size, ours.eod)


def test_fingerprint_follows_the_folder(tmp_path: Path) -> None:
    first = HfTokenizer(save_hf_tokenizer(tmp_path / "one", eos_token="<end>"))
    same = HfTokenizer(save_hf_tokenizer(tmp_path / "two", eos_token="<end>"))
    other = HfTokenizer(save_hf_tokenizer(tmp_path / "three", eos_token="<unk>"))
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert first.fingerprint != ByteTokenizer().fingerprint


@pytest.mark.parametrize("spec", ["byte", "hf:", "HF:x", "gpt2", ""])
def test_unknown_tokenizers_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match="allowed are 'bytes' and 'hf:PATH'"):
        load_tokenizer(spec)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: no such folder"):
        HfTokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot be loaded"):
        HfTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(DataError, match="cannot be loaded"):
        HfTokenizer(tmp_path)
