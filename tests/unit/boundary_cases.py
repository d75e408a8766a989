"""What the tests of boundaries share: data, and the two ends of a boundary that is cut."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_taco.boundaries import Boundary, BoundarySettings, Chain

S, B, D, R, V = 6, 2, 64, 32, 11


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal FP32 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_ids(seed: int = 0, s: int = S, b: int = B) -> Tensor:
    """Return int64 [b, s] below V, some of them more than once."""
    return torch.randint(0, V, (b, s), generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the relative RMS error, in FP64."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


def chain_boundary(chain: Chain, index: int = 1) -> Boundary:
    """Return a boundary which the chain is known to have."""
    found = chain.boundary(index)
    assert found is not None
    return found


def randomise(*chains: Chain) -> None:
    """Give anchors and trained layers values that are not zero, the same in every chain."""
    for chain in chains:
        for name, parameter in chain.named_parameters():
            seed = sum(name.encode())
            parameter.data.copy_(0.3 * noise(*parameter.shape, seed=seed))


@dataclass
class Passed:
    """What one micro-batch gave: the output, and the gradient of the input."""

    y: Tensor
    dx: Tensor


def pass_in_place(boundary: Boundary, x: Tensor, ids: Tensor, gradient: Tensor) -> Passed:
    """Send a micro-batch through an uncut boundary and back."""
    x = x.clone().requires_grad_()
    y = boundary(x, ids)
    y.backward(gradient)
    assert x.grad is not None
    return Passed(y.detach(), x.grad)


def pass_cut(
    sender: Boundary, receiver: Boundary, x: Tensor, ids: Tensor, gradient: Tensor
) -> Passed:
    """Send a micro-batch through a cut boundary, bytes in between, and back."""
    s, b, dtype = x.shape[0], x.shape[1], x.dtype
    x = x.clone().requires_grad_()
    z = sender.encode(x, ids)
    assert tuple(z.shape) == sender.wire_shape(s, b)
    message = sender.pack(z.detach())
    assert message.dtype == torch.uint8
    assert message.numel() == sender.wire_bytes(s, b, dtype) == receiver.wire_bytes(s, b, dtype)
    arrived = receiver.unpack(message.clone(), s, b, dtype).requires_grad_()
    y = receiver.decode(arrived, ids)
    y.backward(gradient)
    assert arrived.grad is not None
    back = receiver.pack_gradient(arrived.grad)
    assert back.numel() == sender.wire_bytes(s, b, dtype, backward=True)
    z.backward(sender.unpack_gradient(back.clone(), s, b, dtype))
    assert x.grad is not None
    return Passed(y.detach(), x.grad)


def whole_and_halves(settings: BoundarySettings) -> tuple[Chain, Chain, Chain]:
    """Return a model's one boundary in place, and its sender's and its receiver's chunk."""
    chains = (Chain(settings, 1, 0, 1), Chain(settings, 1, 0, 0), Chain(settings, 1, 1, 1))
    randomise(*chains)
    return chains
