"""Which tokenizer the data was, or is to be, written with."""

from dataclasses import dataclass
from typing import Any, Final, Literal

from megatron_taco.config.errors import nearest

BYTE_VOCABULARY: Final = 257
"""Ids 0 to 255 are the bytes, 256 ends a document."""

_ALLOWED = "allowed: bytes, {hf: FOLDER}, {null: VOCABULARY_SIZE}"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer by kind.

    Attributes:
        kind: `bytes`; `hf`, a Hugging Face tokenizer in a local folder; or `null`, token ids
            without text, the last id ending a document.
        path: The folder, for `hf`.
        vocab_size: Number of ids, for `bytes` and `null`; unknown (None) for `hf` here.
    """

    kind: Literal["bytes", "hf", "null"]
    path: str | None = None
    vocab_size: int | None = None

    def __str__(self) -> str:
        """Return `bytes`, `hf:FOLDER` or `null:SIZE`, as the command line spells it."""
        return self.kind if self.kind == "bytes" else f"{self.kind}:{self.path or self.vocab_size}"

    def plain(self) -> str | dict[str, Any]:
        """Return what a YAML file says for it."""
        if self.kind == "hf":
            return {"hf": self.path}
        if self.kind == "null":
            return {"null": self.vocab_size}
        return "bytes"


def parse_tokenizer(value: object) -> Tokenizer:
    """Return the tokenizer that the value of `data.tokenizer` names.

    Raises:
        ValueError: It names none.
    """
    if isinstance(value, Tokenizer):
        return value
    if value == "bytes":
        return Tokenizer(kind="bytes", vocab_size=BYTE_VOCABULARY)
    if not isinstance(value, dict):
        hint = " (nearest: bytes)" if isinstance(value, str) and nearest(value, ["bytes"]) else ""
        raise ValueError(f"{value!r} is not a tokenizer; {_ALLOWED}{hint}")
    if len(value) != 1:
        raise ValueError(f"a mapping with {len(value)} keys is not a tokenizer; {_ALLOWED}")
    ((kind, setting),) = value.items()
    if kind == "hf":
        if not isinstance(setting, str) or not setting:
            raise ValueError(f"hf: {setting!r} is not a folder name; {_ALLOWED}")
        return Tokenizer(kind="hf", path=setting)
    if kind == "null":
        if isinstance(setting, bool) or not isinstance(setting, int) or setting < 1:
            raise ValueError(f"null: {setting!r} is not a positive whole number; {_ALLOWED}")
        return Tokenizer(kind="null", vocab_size=setting)
    close = nearest(kind, ["hf", "null"])
    hint = f" (nearest: {close})" if close else ""
    raise ValueError(f"unknown key {kind!r} in a tokenizer; {_ALLOWED}{hint}")
