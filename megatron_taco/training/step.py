"""The forward step and the loss that Megatron's loop calls for each micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers
from torch import Tensor

Batch = dict[str, Tensor]

_FIRST_STAGE = {"tokens": torch.int64, "position_ids": torch.int64}
_LAST_STAGE = {"labels": torch.int64, "loss_mask": torch.float32}


def get_batch(data_iterator: Iterator[Batch] | None, model: Any) -> Batch | None:
    """One micro-batch on this rank's device, the same on all ranks of a tensor-parallel group.

    Only the group's first rank reads the data set; the others get its tensors by broadcast, into
    shapes that they know, so that the host never waits for the device.

    Returns:
        What this rank's pipeline stage needs of ``tokens`` and ``position_ids`` (first stage),
        ``labels`` (last stage), each int64 [b, s], and ``loss_mask`` (last stage), FP32 [b, s]; or
        None on a stage that needs nothing.
    """
    needed: dict[str, torch.dtype] = {}
    if get_attr_wrapped_model(model, "pre_process"):
        needed |= _FIRST_STAGE
    if get_attr_wrapped_model(model, "post_process"):
        needed |= _LAST_STAGE
    if not needed:
        return None
    args = get_args()
    size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    item = next(data_iterator) if data_iterator is not None else None
    batch = {}
    for name, dtype in needed.items():
        if item is None:
            tensor = torch.empty(
                (size, args.seq_length), dtype=dtype, device=torch.cuda.current_device()
            )
        else:
            tensor = item[name].to(dtype).cuda(non_blocking=True)
        if mpu.get_tensor_model_parallel_world_size() > 1:
            dist.broadcast(
                tensor,
                mpu.get_tensor_model_parallel_src_rank(),
                group=mpu.get_tensor_model_parallel_group(),
            )
        batch[name] = tensor
    return batch


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the unmasked tokens' losses, their number, and both for the log.

    Args:
        loss_mask: FP32 [b, s], 1 where a token counts.
        output: loss of each token, [b, s].

    Returns:
        The summed loss (0-dim FP32), the number of tokens (0-dim int32), and
        ``{"lm loss": FP32 [sum, tokens]}``.
    """
    losses = output.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        validate = partial(
            get_rerun_state_machine().validate_result, result=loss, tolerance=0.0, fatal=True
        )
        for name, test in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            validate(rejection_func=test, message=f"found {name} in the loss of this rank")
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[Tensor, Any]:
    """Run one micro-batch through this rank's model chunk; Megatron calls it."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, model)
    timers("batch-generator").stop()
    batch = batch or {}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        None,
        labels=batch.get("labels"),
        loss_mask=batch.get("loss_mask"),
    )
    mask: Any = batch.get("loss_mask")  # None where Megatron computes no loss
    return output, partial(loss_func, mask)
