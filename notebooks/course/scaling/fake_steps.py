"""What a step keeps and computes, without computing it: on tensors that have a shape and no memory.

PyTorch's `FakeTensorMode` runs every operator for the shapes only, and autograd saves what it would save; hooks count
that (https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from course.chain import layers
from labkit.comparison.program import Program, Recorder
from labkit.trace.profiling import activations, kept_now


@contextlib.contextmanager
def fake(dtype: torch.dtype) -> Iterator[None]:
    """Give tensors that are made inside no memory; those of real numbers have `dtype` unless another is said."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # What a module keeps outside of parameters and buffers, such as a table of positions, is real.
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_default_dtype(before)


def kept_now_bytes() -> int:
    """Return the bytes that `activations`, which must be counting, finds kept at the time."""
    return sum(max(sizes) for sizes in kept_now().values())


# A whole step of any module


class Counted(NamedTuple):
    """What one step of one process keeps and computes."""

    kept: int
    """The most bytes that autograd keeps, with the block that is being recomputed."""
    program: Program


def counted(
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Tensor] | None = None,
    dtype: torch.dtype | None = None,
    autocast: bool = False,
    recompute: bool = False,
) -> Counted:
    """Take a forward and a backward pass of a copy of the model without memory, and count.

    Args:
        model: on any device, the meta device included. It is left as it is.
        batch: a tensor, or a dict of them as the model's keywords, or a pair (inputs, targets); inputs may be a tuple.
        loss: of (outputs, targets); see `loss_of`.
        dtype: of all real numbers; by default as they are.
        autocast: whether products are of 16 bits (bfloat16).
        recompute: whether the layers of lists and sequences keep only what they were given.

    Raises ValueError for a model that cannot be run so: one, say, whose forward pass asks for a tensor's values.
    """
    with fake(dtype or torch.get_default_dtype()):
        copied, inputs = fake_copy(model, dtype), fake_batch(batch, dtype)
        owned = 0
        if recompute:
            owned = _most_of_a_block(copied, functools.partial(_forward, copied, inputs, loss, autocast))
            _recompute(copied)
        recorder = Recorder()
        try:
            with activations(copied) as found, recorder.recording():
                value = _forward(copied, inputs, loss, autocast)
                value.backward()
        except Exception as error:
            raise ValueError(
                f"a step of {type(model).__name__} cannot be counted without computing it: {type(error).__name__}: "
                f"{str(error).splitlines()[0][:200]}. Its forward pass must not depend on the values of tensors; check "
                "that the batch is what the model is called with, (inputs, targets), and give `loss`"
            ) from error
        return Counted(found["activations"] + owned, recorder.program())


def fake_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy whose parameters and buffers have no memory; what is tied stays tied. To be called in `fake`."""
    memo: dict[int, Any] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    try:
        return copy.deepcopy(model, memo).train(model.training)
    except Exception as error:
        raise ValueError(f"a copy of {type(model).__name__} cannot be made: {type(error).__name__}: {error}") from error


def fake_batch(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a batch of the same shapes and no memory. To be called in `fake`."""

    def made(tensor: Tensor) -> Tensor:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind)

    return map_tensors(batch, made)


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with its tensors changed: a tensor, or tuples, lists and dicts of them."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(each, change) for name, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(map_tensors(each, change) for each in batch)
    return batch


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def batch_size(batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of its first tensor."""
    sizes = [len(tensor) for tensor in tensors_of(batch) if tensor.dim()]
    if not sizes:
        raise ValueError("the batch has no tensor with a dimension for samples; give (inputs, targets)")
    return sizes[0]


def resized(batch: Any, samples: int) -> Any:
    """Return a batch of so many samples, of the same shapes otherwise, without memory."""
    before = batch_size(batch)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != before:
            return tensor
        return torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    return map_tensors(batch, change)


def tensors_bytes(batch: Any) -> int:
    """Return the bytes of a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def outputs_of(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Call a model with a batch; return its outputs and the targets."""
    if isinstance(batch, Mapping):
        return model(**batch), batch.get("labels")
    inputs, targets = batch if isinstance(batch, tuple) and len(batch) == 2 else (batch, None)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets


def loss_of(outputs: Any, targets: Any) -> Tensor:
    """Return the loss that is usual for outputs and targets like these.

    What the outputs call `loss`; cross-entropy of classes, one of them in every place or for every sample; the mean
    squared error of real numbers; without targets the mean of the outputs.
    """
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(own, Tensor):
        return own
    while not isinstance(outputs, Tensor):
        outputs = next(iter(outputs.values() if isinstance(outputs, Mapping) else outputs))
    outputs = outputs.float() if outputs.dtype.itemsize < 4 else outputs
    if not isinstance(targets, Tensor):
        return outputs.mean()
    if targets.is_floating_point():
        return mse_loss(outputs, targets.view_as(outputs) if targets.numel() == outputs.numel() else targets)
    if targets.dim() > 1 and outputs.shape[:-1] == targets.shape:  # classes come last
        return cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return cross_entropy(outputs, targets)


def _forward(model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs, targets = outputs_of(model, batch)
    return (loss or loss_of)(outputs, targets)


def kept_of_stage(
    stage: nn.Module, inputs: Tensor, targets: Any, loss: Callable[..., Tensor] | None, autocast: bool, recompute: bool
) -> tuple[int, Tensor, bool]:
    """Return what a stage of a pipeline keeps of a micro-batch, what it returns, and whether it keeps that, too.

    To be called in `fake`.

    Args:
        stage: some layers, without memory.
        inputs: what it gets, without memory; gradients go back to them if they want some.
        targets: of the last stage.
        loss: of (outputs, targets).
        autocast: whether products are of 16 bits.
        recompute: whether layers keep only what they were given.
    """

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs: Tensor = stage(inputs)
        return outputs if targets is None else (loss or loss_of)(outputs, targets)

    owned = 0
    if recompute:
        owned = _most_of_a_block(stage, forward)
        _recompute(stage)
    with activations(stage) as found:
        outputs = forward()
        is_kept = outputs.untyped_storage()._cdata in kept_now()
    return found["activations"] + owned, outputs, is_kept


def recomputed_blocks(model: nn.Module) -> list[nn.Module]:
    """Return what is recomputed: the layers that lie in lists and sequences and have parameters."""
    direct = {id(child) for child in model.children()}
    return [
        layer
        for _, layer in layers(model)
        if (id(layer) not in direct or isinstance(model, (nn.Sequential, nn.ModuleList)))
        and any(True for _ in layer.parameters())
    ]


def _recompute(model: nn.Module) -> None:
    from torch.utils.checkpoint import checkpoint

    for block in recomputed_blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _most_of_a_block(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Return the most bytes that a block keeps besides its input: what is there while it is recomputed.

    `checkpoint` has hooks of its own, which hide that from others.
    """
    before: list[int] = []
    most = 0

    def begin(*_: Any) -> None:
        before.append(kept_now_bytes())

    def end(*_: Any) -> None:
        nonlocal most
        most = max(most, kept_now_bytes() - before.pop())

    hooks: list[Any] = []
    for block in recomputed_blocks(model):
        hooks += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]
    try:
        with activations(model):
            value = forward()
            del value
    finally:
        for hook in hooks:
            hook.remove()
    return most
