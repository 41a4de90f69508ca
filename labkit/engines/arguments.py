"""The arguments of `labkit.launch` and its like, checked before any process exists.

What is wrong is refused with a message: what was found, what was expected, and the page that says what to do.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist

from labkit.engines.base import Target
from labkit.protocol.packing import name_of
from labkit.protocol.pages import help_hint
from labkit.rank.worker import takes_worker


class _DefaultSeed(int):
    """Tells the seed that nobody gave from a 0 that somebody gave."""


DEFAULT_SEED = _DefaultSeed(0)


class LaunchArgs(NamedTuple):
    """The arguments of one `labkit.launch`."""

    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    world_size: Any = 0
    live: bool | None = None
    wait: bool = True
    trace: Any = None
    backend: Any = None
    stall_s: Any = None
    pg_timeout_s: Any = None
    seed: Any = DEFAULT_SEED
    name: Any = None
    on: Any = None
    watch: Any = None
    device: Any = None
    bundles: tuple[str, ...] = ()
    """Which of `args=` and `kwargs=` were given."""


OWN = LaunchArgs._fields[3:-1]
"""What `labkit.launch` keeps for itself, besides `args` and `kwargs`."""


@contextlib.contextmanager
def naming(page: str) -> Iterator[None]:
    """Have a TypeError or ValueError that is raised in here name its page, unless it does already."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "labkit.explain(" not in str(error):
            error.args = (f"{error}\n{help_hint(page)}",)
        raise


@naming("bad_argument")
def check(asked: LaunchArgs, gpus: int | None) -> None:
    """Raise TypeError or ValueError for what `labkit.launch` cannot do; `gpus` are this machine's, None for others."""
    by_default = {"seed": DEFAULT_SEED, "wait": True}
    given = [name for name in OWN if getattr(asked, name) is not by_default.get(name)]
    check_call(asked.function, asked.args, asked.kwargs, [*given, *asked.bundles])
    if asked.on is None:
        world_size = check_world_size(asked.world_size, gpus or 0)
    else:
        world_size = ranks_on(asked.on, asked.world_size).world_size
    check_backend(asked.backend, world_size, gpus)
    check_device(asked.device, asked.backend, gpus)
    check_seconds("stall_s", asked.stall_s)
    check_seconds("pg_timeout_s", asked.pg_timeout_s)
    check_options(asked.seed, asked.watch)


def check_call(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Collection[str]) -> None:
    """Check that `fn(worker, *args, **kwargs)`, or the same without the worker, is a call that fn accepts.

    `own` are the arguments that `labkit.launch` was given and keeps for itself.
    """
    if not callable(fn):
        raise TypeError(f"launch() takes a function to call on every rank, got a {type(fn).__name__}: {fn!r:.80}")
    title = name_of(fn)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some built-in functions do not say
        return
    check_first_parameter(title, signature)
    taken = [name for name in own if name in signature.parameters and name not in kwargs]
    if taken and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        name = taken[0]
        raise ValueError(
            f"{title} has a parameter called {name!r}, but launch() keeps {name}=… for itself and does not pass it on. "
            f"Rename it in {title}, or pass it in kwargs={{{name!r}: …}}"
        )
    try:
        signature.bind(*([object()] if takes_worker(fn, args, kwargs) else []), *args, **kwargs)
    except TypeError as error:
        given = ", ".join(["worker", *(f"{a!r:.30}" for a in args), *(f"{k}=…" for k in kwargs)])
        raise TypeError(
            f"{title}{signature} cannot be called as {title}({given}): {error}. "
            "Its first parameter is the worker; launch() passes on all arguments that are not its own "
            f"({', '.join(OWN)})"
        ) from None


def parameters_of(fn: Any) -> Mapping[str, inspect.Parameter]:
    """Return a function's parameters by name; none for a built-in function that does not say."""
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}


NUMBERS = {"rank", "_rank", "global_rank", "local_rank", "node_rank", "rank_id", "proc_id", "process_id"}
NUMBERS |= {"gpu", "gpu_id", "local_gpu", "cuda_id", "device_id", "device_index", "index", "idx", "i"}
"""Names of the first parameter of a function that was written for `mp.spawn`: a number."""


def check_first_parameter(title: str, signature: inspect.Signature) -> None:
    """Refuse a function that takes the rank first: it would get the worker, and `rank == 0` would never hold."""
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return
    is_plain = first.annotation is inspect.Parameter.empty
    is_number = first.annotation in (int, "int")
    if is_number and first.name not in NUMBERS and first.default is not first.empty:
        return  # main(epochs: int = 2), called as it is
    if is_number or (is_plain and first.name in NUMBERS):
        raise TypeError(
            f"{title}{signature} takes a number first, {first.name!r}, but launch() passes the worker: the first "
            "parameter is the worker; write worker.rank for the rank. To leave the function as it is, wrap it: "
            f"labkit.launch(lambda worker, *args: {title}(worker.rank, *args), …)"
        )


def ranks_on(on: Any, world_size: Any) -> Target:
    """Return where to launch, which is the first ranks of a session if fewer are wanted than it has."""
    if not isinstance(on, Target):
        raise TypeError(f"on is labkit.Slurm(…), labkit.Ray(…) or a Session, got {on!r:.80}")
    return on if world_size is None else on.first(check_world_size(world_size, 0))


def check_world_size(world_size: Any, gpus: int) -> int:
    """Return the number of ranks, by default one per GPU, or 2. Raises TypeError or ValueError for what is none."""
    if world_size is None:
        return gpus or 2
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size is a whole number of ranks, got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    return world_size


def check_backend(backend: Any, world_size: int, gpus: int | None) -> None:
    """Raise ValueError for a backend that this PyTorch does not have, or not for so many ranks."""
    for part in [] if backend is None else str(backend).lower().split(","):  # "gloo", or "cpu:gloo,cuda:nccl"
        library = part.rpartition(":")[2]
        if not dist.is_backend_available(library):
            raise ValueError(f"unknown backend {backend!r} in this PyTorch; use 'gloo'")
        if library == "nccl" and gpus is not None and gpus < world_size:
            raise ValueError(
                f"backend {backend!r} needs a GPU of its own for each of the {world_size} ranks; "
                f"found {gpus}. Use backend='gloo'"
            )


def check_device(device: Any, backend: str | None, gpus: int | None) -> None:
    """Raise TypeError or ValueError for a device on which ranks cannot compute."""
    if device not in (None, "cpu", "cuda"):
        raise ValueError(
            f"device is 'cpu', 'cuda' (a GPU, shared if there are fewer than ranks) or None, got {device!r:.60}. "
            "Which GPU a rank has is worker.device"
        )
    if device == "cuda" and gpus == 0:
        raise ValueError("device='cuda' needs a GPU, and this machine has none that can be used")
    if device == "cpu" and backend is not None and "nccl" in backend.lower():
        raise ValueError(f"device='cpu', but backend {backend!r} takes CUDA tensors; use 'gloo'")


def check_seconds(name: str, value: Any) -> None:
    """Raise ValueError for what is neither a number of seconds nor None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ValueError(f"{name} is a number of seconds greater than 0, or None; got {value!r}")


def check_options(seed: Any, watch: Any) -> None:
    """Raise TypeError or ValueError for any of these that is of no use."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed is a whole number or None, got {seed!r}")
    if watch not in ("nan", None):
        raise ValueError(f"watch is 'nan', which ends the run at the first NaN or Inf, or None; got {watch!r:.60}")
