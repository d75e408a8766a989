"""A compressor that notes how long its calls keep the host, to tell what compiled."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from megatron_taco.compressors.base import Compressor


class Timed(Compressor):
    """Passes every call on to another compressor.

    The first call of a kernel compiles it, which takes seconds; any other only gives the device
    something to do, which takes microseconds.

    Attributes:
        seconds: Host seconds of all calls by what was called, in the order of the first calls.
    """

    name = "timed"

    def __init__(self, inner: Compressor) -> None:
        """Takes the compressor that does the work."""
        self.block = inner.block
        self.seconds: dict[str, float] = {}
        self._inner = inner

    def _call(self, what: str, call: Callable[..., Tensor], *args: object) -> Tensor:
        start = perf_counter()
        result = call(*args)
        self.seconds[what] = self.seconds.get(what, 0.0) + perf_counter() - start
        return result

    def payload_bytes(self, numel: int) -> int:
        """See ``Compressor.payload_bytes``."""
        return self._inner.payload_bytes(numel)

    def encode_rows(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``Compressor.encode_rows``."""
        return self._call(f"encode {_name(x.dtype)}", self._inner.encode_rows, x, out)

    def decode_rows(
        self, payloads: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """See ``Compressor.decode_rows``."""
        call = self._inner.decode_rows
        return self._call(f"decode {_name(dtype)}", call, payloads, numel, dtype, out)

    def decode_sum(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """See ``Compressor.decode_sum``."""
        what = f"decode-sum of {payloads.shape[0]}"
        return self._call(what, self._inner.decode_sum, payloads, numel, out)

    def reduce_encode(self, payloads: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
        """See ``Compressor.reduce_encode``."""
        what = f"reduce-encode of {payloads.shape[0]}"
        return self._call(what, self._inner.reduce_encode, payloads, numel, out)

    def nonfinite_blocks(self, payloads: Tensor, numel: int) -> Tensor:
        """See ``Compressor.nonfinite_blocks``."""
        return self._inner.nonfinite_blocks(payloads, numel)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
