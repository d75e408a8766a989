"""PowerSGD: low-rank approximation by one step of power iteration (arXiv 1905.13727).

For the gradient of a weight, as a matrix M_i [n, m] on rank i, with the residual E_i:

    M_i <- M_i + E_i
    P   <- mean_i(M_i Q)              [n, r], one all-reduce
    P   <- orthonormal basis of P     (QR)
    Q   <- mean_i(M_i^T P)            [m, r], one all-reduce; kept for the next step (warm start)
    M^  =  P Q^T                      the mean's projection on the columns of P
    E_i <- M_i - M^

On the wire: r (n + m) FP32 values of a matrix, in two messages for all matrices together; vectors
and matrices for which that is not less than n m go exactly with the first. State: E_i (local), Q
(shared). Q starts Gaussian, the same on all ranks. Bit-equal replicas need ranks on equal hardware:
each does the same products and the same QR.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_taco.compressors.counter_random import key_of
from megatron_taco.gradients.messages import flatten, write_back
from megatron_taco.gradients.method import GradientMethod, keep_finite


class PowerSGD(GradientMethod):
    """See this module's docstring."""

    name = "powersgd"

    def __init__(
        self,
        group: ProcessGroup,
        *,
        rank: int = 4,
        error_feedback: bool = True,
        warm_start: bool = True,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        """Starts without memory.

        Args:
            group: The data-parallel group.
            rank: Columns r of P and Q.
            error_feedback: Keep E; without it what is not sent is lost.
            warm_start: Keep Q; without it every step starts from a Gaussian.
            seed: Of the first Q.
            start_step: First step that is compressed; torch's own hook waits for 1000 steps.

        Raises:
            ValueError: ``rank`` is below 1, or ``start_step`` is negative.
        """
        super().__init__(group, start_step=start_step)
        if rank < 1:
            raise ValueError(f"powersgd: rank is {rank}, allowed is 1 or more")
        self.rank = rank
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.seed = seed

    def _is_low_rank(self, tensor: Tensor) -> bool:
        if tensor.dim() < 2:
            return False
        n, m = tensor.shape[0], tensor.numel() // max(tensor.shape[0], 1)
        return self.rank * (n + m) < n * m

    def _new_basis(self, name: str, matrix: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(key_of(self.seed, self.name, name) >> 1)
        return torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix.device)

    def _reduce(self, tensors: Mapping[str, Tensor], step: int) -> None:
        matrices, bases = {}, {}
        exact = {name: t for name, t in tensors.items() if not self._is_low_rank(t)}
        for name, tensor in tensors.items():
            if name in exact:
                continue
            matrix = tensor.detach().float().reshape(tensor.shape[0], -1)
            if self.error_feedback:
                matrix = self._with_residual(name, matrix)
            matrices[name] = matrix
            kept = self._shared.get(name) if self.warm_start else None
            bases[name] = kept if kept is not None else self._new_basis(name, matrix)

        columns = {name: matrix @ bases[name] for name, matrix in matrices.items()}
        together = {**columns, **{name: t.float() for name, t in exact.items()}}
        write_back(self._channel.mean_(flatten(together.values())), together)
        for name, tensor in exact.items():
            tensor.copy_(together[name])
        left = {name: torch.linalg.qr(column).Q for name, column in columns.items()}
        right = {name: matrices[name].t() @ left[name] for name in matrices}
        write_back(self._channel.mean_(flatten(right.values())), right)
        for name, matrix in matrices.items():
            estimate = left[name] @ right[name].t()
            if self.error_feedback:
                self._keep_residual(name, matrix - estimate)
            if self.warm_start:
                self._shared[name] = keep_finite(right[name], bases[name])
            tensors[name].copy_(estimate.view(tensors[name].shape))
