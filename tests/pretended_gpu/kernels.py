"""Operators that PyTorch has for CUDA alone, or that take more there: those of `nn.SyncBatchNorm`, and one of NCCL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _flat(x: Tensor) -> Tensor:
    """Return (samples × places, channels)."""
    return x.transpose(0, 1).flatten(1).T


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation by channel."""
    flat = _flat(x)
    return flat.mean(0), (flat.var(0, correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    scales: Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return those of all ranks together, of (ranks, channels) each, and count them into the running ones."""
    shares = (counts / counts.sum())[:, None]
    mean = (means * shares).sum(0)
    var = ((scales**-2 - eps + means**2) * shares).sum(0) - mean**2
    if running_mean is not None:
        total = counts.sum()
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, (var + eps).rsqrt()


def batch_norm_elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the normalised values."""
    shape = _by_channel(x)
    found = (x - mean.view(shape)) * scale.view(shape)
    return found if weight is None else found * weight.view(shape) + bias.view(shape)


def batch_norm_backward_reduce(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Any, of_x: bool, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums, by channel, of the gradient and of its products with x − mean; the weight's and bias's."""
    total = _flat(gradient).sum(0)
    product = (_flat(gradient) * (_flat(x) - mean)).sum(0)
    return total, product, product * scale, total.clone()


def batch_norm_backward_elemt(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Any,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of x, by the sums of all ranks."""
    shape, count = _by_channel(x), counts.sum()
    along = (x - mean.view(shape)) * (product / count * scale**2).view(shape)
    factor = scale if weight is None else scale * weight
    return (gradient - (total / count).view(shape) - along) * factor.view(shape)


def _by_channel(x: Tensor) -> list[int]:
    """Return the shape in which values by channel are to be seen."""
    return [1, -1] + [1] * (x.dim() - 2)


def all_gather_of_any_shape(output: Tensor, tensor: Tensor, *options: Any) -> tuple[Tensor, Any]:
    """Gather as NCCL does, for which only the number of elements counts; gloo wants the shapes to fit, too."""
    _, work = torch.ops.c10d._allgather_base_.default(output.view(-1), tensor.reshape(-1), *options)
    return output, work


BATCH_NORM = (batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt)
KERNELS = {
    getattr(torch.ops.aten, function.__name__).default: function
    for function in (*BATCH_NORM, batch_norm_backward_reduce, batch_norm_backward_elemt)
} | {torch.ops.c10d._allgather_base_.default: all_gather_of_any_shape}
"""By operator."""
