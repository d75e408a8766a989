"""Section `data`: what is trained on."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from megatron_taco.config.section import Section
from megatron_taco.config.tokenizer import BYTE_VOCABULARY, Tokenizer, parse_tokenizer

_SPLIT: Final = re.compile(r"[0-9]+(\.[0-9]+)?(\s*,\s*[0-9]+(\.[0-9]+)?){0,2}\Z")
_BLEND_ALLOWED: Final = (
    "allowed: a prefix of .bin/.idx files, a list of prefixes, or weights and prefixes in turn "
    "[0.7, a_text_document, 0.3, b_text_document]"
)


def _blend(value: object) -> tuple[str | float, ...] | None:
    """Return Megatron's list of prefixes, or of weights and prefixes in turn."""
    if value is None:
        return None
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items:
        raise ValueError(f"{value!r} is not a data set; {_BLEND_ALLOWED}")
    weights = [item for item in items if isinstance(item, int | float)]
    for i, item in enumerate(items):
        weight_expected = bool(weights) and i % 2 == 0
        if weight_expected:
            if isinstance(item, bool) or not isinstance(item, int | float) or item <= 0:
                raise ValueError(f"element {i} is {item!r}, not a weight above 0; {_BLEND_ALLOWED}")
        elif not isinstance(item, str) or not item:
            raise ValueError(f"element {i} is {item!r}, not a prefix; {_BLEND_ALLOWED}")
    if weights and len(items) % 2:
        raise ValueError(f"the last weight, {items[-1]!r}, has no prefix; {_BLEND_ALLOWED}")
    return tuple(items)


def _split(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _SPLIT.match(value) or not _positive(value):
        raise ValueError(
            f"{value!r} is not a split; allowed: text with the shares of training, validation "
            "and test, for example '969, 30, 1'"
        )
    return value


def _positive(split: str) -> bool:
    return sum(float(share) for share in split.split(",")) > 0


Blend = Annotated[tuple[str | float, ...] | None, BeforeValidator(_blend)]


class Data(Section):
    """Where the tokens come from: exactly one of `source`, `path` and `train_path`.

    Attributes:
        source: `python-stdlib`, the source text of Python's own library, written on first use;
            or `mock`, Megatron's counting sequences.
        path: Prefix(es) as for Megatron's --data-path; divided by `split`.
        train_path: Prefix(es) as for Megatron's --train-data-path.
        valid_path: Prefix(es) for validation, beside `train_path`.
        test_path: Prefix(es) for the test set, beside `train_path`.
        split: Shares of training, validation and test in `path`.
        tokenizer: What the token ids mean; `bytes` unless said, and to be said for own data.
        cache: Folder in which a `source` is prepared.
    """

    source: Literal["python-stdlib", "mock"] | None = None
    path: Blend = None
    train_path: Blend = None
    valid_path: Blend = None
    test_path: Blend = None
    split: Annotated[str | None, BeforeValidator(_split)] = None
    tokenizer: Annotated[Any, BeforeValidator(parse_tokenizer)] = Tokenizer(
        kind="bytes", vocab_size=BYTE_VOCABULARY
    )
    cache: str = Field(default=".cache/data", min_length=1)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield keys that exclude or need each other."""
        given = [k for k in ("source", "path", "train_path") if getattr(self, k) is not None]
        if not given:
            yield "", "no data; give exactly one of source, path, train_path"
        for other in given[1:]:
            yield other, f"contradicts data.{given[0]}; give exactly one of {', '.join(given)}"
        for name in ("valid_path", "test_path"):
            if getattr(self, name) is not None and self.train_path is None:
                yield name, "needs data.train_path (data.path is divided by data.split)"
        if self.split is not None and self.path is None:
            yield "split", "needs data.path; only that is divided"
        if given and self.source is None and "tokenizer" not in self.model_fields_set:
            yield (
                given[0],
                "needs data.tokenizer, the one the data was written with; "
                "allowed: bytes, {hf: FOLDER}, {null: VOCABULARY_SIZE}",
            )
        if self.source == "python-stdlib" and self.tokenizer.kind == "null":
            yield "tokenizer", "null reads no text; source: python-stdlib needs bytes or {hf: ...}"

    def plain(self) -> dict[str, Any]:
        """Return the section as YAML would hold it, a single prefix as text."""
        result = super().plain()
        for key in ("path", "train_path", "valid_path", "test_path"):
            if key in result and len(result[key]) == 1:
                result[key] = result[key][0]
        return result
