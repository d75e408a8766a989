"""The threshold above which a share of the values lies, from a fit instead of a sort (SIDCo).

SIDCo (arXiv 2101.10761) fits a sparsity-inducing distribution to |x|, in stages. Here the
exponential: its (1 - d) quantile is mu ln(1/d) with mu the mean. One stage overestimates heavy
tails and underestimates light ones; so stage by stage the exceedances over the last threshold are
fitted again, each stage keeping a part of the rest:

    eta_0 = 0
    mu_j  = mean(|x| - eta_{j-1} : |x| > eta_{j-1})
    eta_j = eta_{j-1} + mu_j ln(1/d_j)

with d_1 ... d_M = d, all but the last equal to 1/4. Each stage is a masked mean: linear time.
"""

from __future__ import annotations

from math import log

import torch
from torch import Tensor

FIRST_SHARE = 0.25


def threshold(magnitudes: Tensor, share: float, stages: int = 2) -> Tensor:
    """Returns the estimated threshold above which ``share`` of the magnitudes lie: 0-dim FP32.

    Args:
        magnitudes: FP32 [n], non-negative; what is not finite does not take part.
        share: Wanted share d, in (0, 1].
        stages: Most stages M; fewer are used where d > (1/4)^(M-1). Two serve both a Gaussian and
            Student's t_3 best.
    """
    values = torch.where(magnitudes.isfinite(), magnitudes, 0.0).double()
    eta = values.new_zeros(())
    left = share
    for stage in range(stages):
        last = stage == stages - 1 or left >= FIRST_SHARE
        part = left if last else FIRST_SHARE
        above = values > eta
        mean = torch.where(above, values - eta, 0.0).sum() / above.sum().clamp_min(1)
        eta = eta + mean * log(1 / part)
        left /= part
        if last:
            break
    return eta.float()
