"""ResBM (arXiv 2604.11947): a small trained encoder and decoder beside a rectangular identity.

    z  = E(x) + I_kd x       E: d -> h -> k with SiLU between; I_kd keeps the first k coordinates
    x^ = D(z) + I_dk z       D: k -> h -> d;                   I_dk appends d - k zeros

Nothing is constrained: the weights are ordinary parameters. The sender holds E, the receiver D.
The second layer of each begins at zero, so that training starts from plain truncation. h and the
initial values were not found in the sources; h = d / 4 gives about the published 3% of parameters.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from megatron_taco.boundaries.boundary import Boundary, Place
from megatron_taco.boundaries.quantizers import Quantizer
from megatron_taco.boundaries.random import normal, stream_key


class TwoLayers(nn.Module):
    """Linear, SiLU, linear, without biases.

    Args:
        inputs: Size of the input.
        inner: Size between the layers.
        outputs: Size of the output.
        key: Random stream of the first layer, Gaussian with variance 1 / inputs.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, key: int) -> None:
        super().__init__()
        first = normal(key, (inner, inputs)) / inputs**0.5
        self.first = nn.Parameter(first.float())
        self.second = nn.Parameter(torch.zeros(outputs, inner))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return linear(silu(linear(x, self.first)), self.second)


class ResidualBottleneck(Boundary):
    """The boundary above.

    Args:
        place: Where it is.
        hidden: Size of the activations d.
        rank: Size of the bottleneck k.
        there: Quantiser of z.
        back: Quantiser of its gradient.
        inner: Size between the layers h; d / 4 if 0.

    Raises:
        ValueError: If the rank or ``inner`` is out of range.
    """

    kind = "residual_bottleneck"

    def __init__(
        self,
        place: Place,
        hidden: int,
        rank: int,
        there: Quantizer,
        back: Quantizer,
        inner: int = 0,
    ) -> None:
        super().__init__(place, hidden, rank, there, back)
        if not 1 <= rank <= hidden:
            raise ValueError(f"rank is {rank}, allowed is 1 .. {hidden} (the hidden size)")
        if inner < 0:
            raise ValueError(f"residual_bottleneck: inner is {inner}, allowed is 0 or more")
        inner = inner or max(1, hidden // 4)
        self.encoder: TwoLayers | None = None
        self.decoder: TwoLayers | None = None
        if place.ends != "receiver":
            key = stream_key("encoder", place.seed, place.index)
            self.encoder = TwoLayers(hidden, inner, rank, key)
        if place.ends != "sender":
            key = stream_key("decoder", place.seed, place.index)
            self.decoder = TwoLayers(rank, inner, hidden, key)

    def encode(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """Return z [s, b, k] of ``x`` [s, b, d].

        Raises:
            ValueError: If this process is the receiver.
        """
        if self.encoder is None:
            raise ValueError(f"boundary {self.place.index}: a receiver has no encoder")
        return self.encoder(x) + x[..., : self.width]

    def decode(self, z: Tensor, ids: Tensor | None) -> Tensor:
        """Return x^ [s, b, d] of ``z`` [s, b, k].

        Raises:
            ValueError: If this process is the sender.
        """
        if self.decoder is None:
            raise ValueError(f"boundary {self.place.index}: a sender has no decoder")
        return self.decoder(z) + pad(z, (0, self.hidden - self.width))
