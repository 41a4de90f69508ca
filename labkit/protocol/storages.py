"""The memory of tensors on its way from one process to another: each storage once, and shared memory shared.

The problem. Pickle knows tensors one by one, and PyTorch gives each the whole storage that it lies in: views of one
buffer come apart, and a list of rows carries its matrix once per row. What does not work: to copy each view for itself
(nothing is shared any more), or torch.save for the whole (it takes no functions from cells).

The solution. A pickler that meets a storage gives it a number and takes a copy of it; the tensors in the pickle say
where in that storage they lie, as in a file of torch.save. The copies travel beside the pickle, as raw memory that is
read into the storage that the tensors will have. A storage in shared memory is not copied where both processes are on
this machine: the other maps it too, as with `torch.multiprocessing`.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
from torch.multiprocessing import get_sharing_strategy

from labkit.system import host

INLINE_BYTES = 1 << 12
"""Storages of at most this size travel within the pickle: of weights and counters there may be thousands."""


def empty(size: int) -> torch.UntypedStorage:
    """Return a storage of so many bytes, to be filled. Raises MemoryError where there are not as many."""
    try:
        return torch.UntypedStorage(size)
    except RuntimeError as error:
        raise MemoryError(str(error).splitlines()[0]) from None


def memory(storage: torch.UntypedStorage) -> memoryview:
    """Return the bytes of a storage on the CPU, to be read or written; valid as long as the storage is."""
    size = storage.nbytes()
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr()) if size else b"").cast("B")


def of_bytes(data: Any) -> torch.UntypedStorage:
    """Return a new storage with these bytes in it."""
    source = memoryview(data).cast("B")
    storage = empty(source.nbytes)
    if source.nbytes:
        memory(storage)[:] = source
    return storage


def snapshot(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage, on the CPU."""
    return of_bytes(memory(storage)) if storage.device.type == "cpu" else storage.cpu()


def location(storage: torch.UntypedStorage) -> str:
    """Return where a storage lies, as torch.save says it; "" for the CPU."""
    tag = str(torch.serialization.location_tag(storage))
    return "" if tag == "cpu" else tag


def placed(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """Return a storage with the same bytes where `location` says, as torch.load does."""
    found: torch.UntypedStorage = torch.serialization.default_restore_location(storage, location)
    return found


def typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """Return a storage as PyTorch's rebuilding functions take it."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


# Tensors of the plain kind, by a quicker way than PyTorch's own, which takes 40 µs for each


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether storage, place in it, and `requires_grad` are all that there is to say of a tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
        and not has_hooks(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def lies_in(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what `tensor_in` makes a plain tensor from."""
    at = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return tensor.untyped_storage(), tensor.dtype, *at, tensor.requires_grad


def tensor_in(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return the tensor that lies so in a storage."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


# Arrays of NumPy, which may lie in the same memory as a tensor


def reduce_array(array: Any) -> Any:
    """Return how an array is pickled, as a tensor in its memory; None if it is not of a tensor's kind."""
    if not (array.nbytes and array.flags.writeable):
        return None
    try:
        return torch.Tensor.numpy, (torch.from_numpy(array),)
    except (TypeError, ValueError):  # dates, objects; strides that a tensor cannot have
        return None


def same(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage: in a pickle, of another that is the same memory."""
    return storage


# Shared memory


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether other processes of this machine can have the very same memory."""
    is_there = storage.device.type == "cpu" and storage.nbytes() > 0 and storage.is_shared()
    return is_there and (host.opens_others_descriptors or get_sharing_strategy() == "file_system")


def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return what `shared` needs in the other process. The storage is to live until it has been called there."""
    if get_sharing_strategy() == "file_system":
        found: tuple[Any, ...] = storage._share_filename_cpu_()
        return found
    return os.getpid(), *storage._share_fd_cpu_()


def shared(*known_as: Any) -> torch.UntypedStorage:
    """Return the storage in the same memory. Raises OSError if it is gone."""
    if isinstance(known_as[0], bytes):
        found: torch.UntypedStorage = torch.UntypedStorage._new_shared_filename_cpu(*known_as)
        return found
    # The memory has no name in the file system; it is reached by the other process's descriptor of it. To have that
    # sent, as multiprocessing does, would take a socket and a thread in the notebook.
    pid, descriptor, size = known_as
    mine = host.open_descriptor(pid, descriptor)
    try:
        of_storages: Any = torch.UntypedStorage
        return of_storages._new_shared_fd_cpu(mine, size)
    finally:
        os.close(mine)
