"""What travels between notebook and ranks, calls and results, as `torch.save` writes it with cloudpickle's pickler.

Of tensors each storage goes once, so those that share memory still do. What was typed in cells goes by value, under its
name: where it arrives, `__main__` has it by that name too, and what pickles by name (`all_gather_object`, `torch.save`,
rpc) finds it there. A result names what came from the notebook, which is then the notebook's own.

Large values lie in memory that ranks map, with pages of their own for what they write (see `packed`). As after
`torch.load`, such storages cannot be resized.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import importlib
import inspect
import io
import os
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle
import torch
from cloudpickle import cloudpickle as by_value
from torch.multiprocessing import get_sharing_strategy

from labkit.protocol import modules
from labkit.protocol.packed import SMALL_BYTES, Memory, Packed, new_memory
from labkit.protocol.pages import help_hint
from labkit.system import host

MAIN = "__main__"

RECEIVED = "__labkit_received__"
"""In the `__main__` of a rank: what has come from the notebook, by name."""

_Cached: Any = type(functools.cache(lambda: None))

DEFINITIONS = {types.FunctionType, _Cached}
"""What `def` makes, with decorators or without."""


# Writing


class _Namespace(dict):
    """Stands for the globals of the notebook's functions."""

    def __reduce__(self) -> Any:
        return _namespace, ()


def _namespace() -> dict[str, Any]:
    """Return the globals of functions that this process has received."""
    here = vars(sys.modules[MAIN])
    return here if RECEIVED in here else {"__name__": MAIN}


class Pickler(cloudpickle.Pickler):
    """Pickles by value what was typed in cells.

    Args:
        file: where the pickle goes.
        shares: whether the reader is on this machine, and maps memory that is shared.
        by_name: whether the reader has what it has sent, by its name in `__main__`.
    """

    _refuses = True
    """Whether what would arrive as something else is refused: hooks are left behind, modules may be others there."""

    def __init__(self, file: Any, shares: bool = False, by_name: bool = False) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.file = file
        self.met: dict[str, Any] = {}
        """What was typed in cells, by its name in `__main__`."""
        self.held: list[Any] = []
        self.has_unshared = False
        """Whether memory that is shared was copied all the same."""
        self._shares = shares
        main = vars(sys.modules[MAIN])
        self._known = main.get(RECEIVED, {}) if by_name else {}
        self.globals_ref[id(main)] = _Namespace()
        self._path: list[str] | None = None
        """Where a rank looks for modules."""
        self._not_found: dict[str, str] = {}
        """Why it would not find one, by name; "" for those that it finds."""
        self._memory: dict[int, type] = {}
        """Whose memory begins at an address."""
        self._of_arrays: dict[int, torch.Tensor] = {}
        """Tensors that stand for arrays, by their `id`."""

    def reducer_override(self, value: Any) -> Any:
        """Return how something is pickled that is of none of Python's own simple types."""
        kind = type(value)
        if issubclass(kind, type) or kind in DEFINITIONS:
            return self._reduce_definition(value)
        if isinstance(value, torch.Tensor):
            return self._reduce_tensor(value)
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            return self._reduce_array(value)
        if (
            kind is types.CodeType
        ):  # its file, too, which cloudpickle leaves out from 3.1.3 on: else no traceback has lines
            return code_of, (value.co_filename, *cloudpickle.Pickler.dispatch_table[kind](value))
        if kind is types.CellType:
            return _reduce_cell(value)
        if kind is functools.cached_property and "lock" in vars(value):  # before Python 3.12
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        if kind is Packed:
            self.held.append(value)
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(value)
        if (instead := _in_a_script(value)) is not None:
            return getattr, instead
        if (
            self._refuses
            and isinstance(value, torch.optim.Optimizer)
            and any(
                getattr(value, f"_optimizer_{name}_hooks", None)
                for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post")
            )
        ):
            raise TypeError(HAS_HOOKS)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler) and not hasattr(kind, "__setstate__"):
            reduced: Any = value.__reduce_ex__(2)
            return (*reduced[:3], None, None, _set_scheduler)
        return super().reducer_override(value)

    def _reduce_tensor(self, value: torch.Tensor) -> Any:
        if self._refuses and (value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)):
            raise TypeError(HAS_HOOKS)  # which PyTorch leaves out of a pickle: those of a parameter without a warning
        if type(value) is torch.Tensor and value.is_cpu and value.layout is torch.strided and value.numel():
            storage = value.untyped_storage()
            if id(value) not in self._of_arrays:
                self._note_memory(storage.data_ptr(), torch.Tensor)
            if _is_shared(storage):
                if self._shares:
                    self.held.append(storage)
                    at = value.storage_offset(), tuple(value.shape), value.stride()
                    return _shared, (_share(storage), value.dtype, *at, value.requires_grad)
                self.has_unshared = True
        return super().reducer_override(value)

    def _reduce_array(self, value: Any) -> Any:
        owner = value
        while type(owner.base) is type(value):
            owner = owner.base
        if value.size:
            self._note_memory(owner.__array_interface__["data"][0], type(value))
        if value.nbytes > SMALL_BYTES and value.flags.writeable:
            with contextlib.suppress(TypeError, ValueError):  # dates, objects; strides that a tensor cannot have
                tensor = torch.from_numpy(value)
                self._of_arrays[id(tensor)] = tensor
                return torch.Tensor.numpy, (tensor,)
        return super().reducer_override(value)

    def _note_memory(self, address: int, kind: type) -> None:
        if self._memory.setdefault(address, kind) is not kind and self._refuses:
            raise TypeError(
                "a tensor and an array in the same memory would come apart: make one of them in the function"
            )

    def _check_found(self, module: str, what: Any) -> None:
        """Raise TypeError for something that goes by the name of a module which a rank would not find."""
        top = module.partition(".")[0]
        if top not in self._not_found:
            self._path = modules.search_path() if self._path is None else self._path
            self._not_found[top] = modules.not_found_because(top, self._path)
        if (why := self._not_found[top]) and by_value._should_pickle_by_reference(what):
            raise TypeError(f"{why}: import it in the function, or put it into a file beside the notebook")

    def _reduce_definition(self, value: Any) -> Any:
        name, of = found_as(value), getattr(value, "__module__", None)
        if name and self._known.get(name) is value:
            return NotImplemented  # by its name
        if self._refuses and isinstance(of, str) and of in sys.modules:
            self._check_found(of, value)
        if name:
            self.met[name] = value
        if type(value) is _Cached and by_value._lookup_module_and_qualname(value, value.__qualname__) is None:
            return cached, (value.__wrapped__, value.cache_parameters())
        reduced = super().reducer_override(value)
        return _with_all_attributes(value, reduced) if isinstance(value, type) else reduced

    def _dynamic_function_reduce(self, func: Any) -> Any:
        # With the very cells of its closure, which other functions may share; cloudpickle gives each function its own.
        make, args, *rest = super()._dynamic_function_reduce(func)
        return (make, (*args[:-1], func.__closure__), *rest)

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if self._refuses and sys.modules.get(module.__name__) is module:
            self._check_found(module.__name__, module)
        # By name also those of a type of their own, such as `torch.backends.cudnn`.
        if type(module) is not types.ModuleType and sys.modules.get(module.__name__) is module:
            return importlib.import_module, (module.__name__,)
        return super().reducer_override(module)


class ResultPickler(Pickler):
    """Pickles what a rank returns: a DDP model without its wrapper, which belongs to a process group."""

    _refuses = False

    def reducer_override(self, value: Any) -> Any:
        """Return how something is pickled that is of none of Python's own simple types."""
        parallel = sys.modules.get("torch.nn.parallel")
        if parallel is not None and isinstance(value, parallel.DistributedDataParallel):
            return unwrapped, (value.module,)
        return super().reducer_override(value)


HAS_HOOKS = "it has hooks, which do not travel: register them in the function"


def _set_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Give a learning-rate scheduler its state.

    It notes its optimizer's steps by attributes that are not pickled; without them it warns of a wrong order of calls.
    """
    vars(scheduler).update(state)
    optimizer = scheduler.optimizer
    optimizer.step, optimizer._opt_called = functools.partial(optimizer.step), True
    optimizer.step._wrapped_by_lr_sched = True


def _reduce_cell(cell: types.CellType) -> Any:
    """Return how a closure's cell is pickled: what is in it may be the function whose closure it is."""
    try:
        return types.CellType, (), (cell.cell_contents,), None, None, fill_cell
    except ValueError:  # it is empty
        return types.CellType, ()


def fill_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    """Put into a cell what is to be in it."""
    (cell.cell_contents,) = contents


def _with_all_attributes(kind: type, reduced: Any) -> Any:
    """Have a class keep its qualified name, and attributes that are the same object as its base's.

    cloudpickle leaves both out. Those attributes are one until somebody sets the base's.
    """
    if isinstance(reduced, tuple) and len(reduced) > 2:
        _check_keywords(kind)
        state, inherited = reduced[2][0], {id(value) for base in kind.__bases__ for value in vars(base).values()}
        state["__qualname__"] = kind.__qualname__
        if not issubclass(kind, enum.Enum):
            repeated = {name: value for name, value in vars(kind).items() if id(value) in inherited}
            state.update({name: value for name, value in repeated.items() if not name.startswith("__")})
    return reduced


def _check_keywords(kind: Any) -> None:
    """Raise TypeError for a class that cannot be made without keywords: `class Square(Layer, kind="square")`."""
    derive = super(kind, kind).__init_subclass__
    if isinstance(derive, types.MethodType):
        try:
            inspect.signature(derive).bind()
        except TypeError as error:
            what = f"the keywords of class {kind.__qualname__} do not travel ({error})"
            raise TypeError(f"{what}: put it into a file beside the notebook") from None


def unwrapped(model: Any) -> Any:
    """Return the model: in a pickle, of a wrapper that has stayed behind."""
    return model


def _in_a_script(value: Any) -> tuple[types.ModuleType, str] | None:
    """Return what a script has in place of an object of the notebook's process, as (module, name); None for others."""
    for name in ("stdout", "stderr"):
        if value is getattr(sys, name):  # def say(text, to=sys.stdout)
            return sys, name
    if type(value).__module__ == "IPython.core.autocall":  # `exit` and `quit`
        return builtins, "exit"
    return None


def found_as(value: Any) -> str:
    """Return the name under which a class or a function is found in `__main__`, or ""."""
    name = getattr(value, "__qualname__", "")
    if getattr(value, "__module__", None) != MAIN or "<" in name:
        return ""
    found: Any = sys.modules[MAIN]
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return name if found is value else ""


_checksums = threading.Lock()


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Have `torch.save` compute none: it takes longer than to write, and what is mapped is not checked."""
    with _checksums:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


def save(value: Any, memory: Memory | None, kind: type[Pickler] = Pickler, **options: Any) -> tuple[Packed, Pickler]:
    """Pack a value with a pickler of these options, into memory if there is some; return the pickler, too.

    Raises what the value raises that cannot be pickled.
    """
    picklers, sent = list[Pickler](), [value]

    class WithOptions(kind):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, protocol: int | None = None) -> None:
            super().__init__(file, **options)
            picklers.append(self)
            sent.append(self.met)

    module: Any = types.SimpleNamespace(__name__=__name__, Pickler=WithOptions)
    with io.BytesIO() if memory is None else open(memory.path, "w+b") as file:
        with _without_checksums():
            torch.save(sent, file, pickle_module=module)
        (pickler,) = picklers
        if isinstance(file, io.BytesIO):
            return Packed(file.getvalue(), None, pickler.held), pickler
        if file.tell() <= SMALL_BYTES:
            file.seek(0)
            return Packed(file.read(), None, pickler.held), pickler
    return Packed(b"", memory, pickler.held), pickler


def pack(value: Any, memory: Memory | None = None, **options: Any) -> Packed:
    """Pack a value with a `Pickler` of these options. Raises what the value raises that cannot be pickled."""
    return save(value, memory, **options)[0]


# Reading


class _Unpickler(pickle.Unpickler):
    main: dict[str, Any] | None = None
    """The global variables of a rank; None in the notebook."""

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self._globals = {"__name__": MAIN, "__builtins__": builtins} if self.main is None else self.main
        self._left_alone: set[int] = set()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _namespace.__name__):
            return lambda: self._globals
        if module == by_value.__name__ and self.main is None:
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(self._make_class, getattr(by_value, name))
            if name == "_class_setstate":
                return self._fill_class
        return super().find_class(module, name)

    # In the notebook's own process cloudpickle finds the class that was sent, and would write into it what comes back.

    def _make_class(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return the class that was sent, if this process has it; else make it."""
        *_, tracker_id, _ = args
        sent = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
        if sent is None:
            return make(*args)
        self._left_alone.add(id(sent))
        return sent

    def _fill_class(self, value: Any, state: Any) -> Any:
        """Give a class that was made its attributes."""
        return value if id(value) in self._left_alone else by_value._class_setstate(value, state)


def unpack(packed: Packed, device: torch.device | str | None = None, main: dict[str, Any] | None = None) -> Any:
    """Return the value that was packed. On a rank, `packed` is emptied.

    Args:
        packed: what has come.
        device: where tensors go that were on another device than the CPU; None: to one of the same name.
        main: the `__main__` that gets what was typed in cells; by default this process's own, if it is a rank.

    Raises what unpickling raises.
    """
    here = vars(sys.modules[MAIN])
    if main is None and RECEIVED in here:
        main = here
    if len(packed.data) > SMALL_BYTES and (memory := new_memory()) is not None:  # to be mapped, and not copied
        with open(memory.path, "wb") as file:
            file.write(packed.data)
        packed.data, packed.memory = b"", memory

    def place(storage: Any, location: str) -> Any:
        stays = device is None or location in ("cpu", "meta")
        return torch.serialization.default_restore_location(storage, location if stays else str(device))

    unpickler = type("Unpickler", (_Unpickler,), {"main": main})
    value, met = torch.load(
        io.BytesIO(packed.data) if packed.memory is None else packed.memory.path,
        map_location=place,
        pickle_module=types.SimpleNamespace(__name__=__name__, Unpickler=unpickler),
        weights_only=False,
        mmap=packed.memory is not None,
    )
    if main is not None:
        packed.clear()
        take_in(main, met)
    return value


def take_in(main: dict[str, Any], met: Mapping[str, Any]) -> None:
    """Have the `__main__` of a rank, or of a process that it has started, get what was typed in cells, by name."""
    main[RECEIVED].update(met)
    main.update({name: value for name, value in met.items() if "." not in name})


def code_of(file: str, make: Callable[..., types.CodeType], args: Any) -> types.CodeType:
    """Return the code that `make` makes, with the name of its file."""
    return make(*args).replace(co_filename=file)


def cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return a function with a cache of its own."""
    return functools.lru_cache(**parameters)(function)


# Tensors in shared memory


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether other processes of this machine can have the very same memory."""
    return storage.is_shared() and (host.opens_others_descriptors or get_sharing_strategy() == "file_system")


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Return the arguments of `_shared` in the other process. Keep the storage alive until that has been called."""
    if get_sharing_strategy() == "file_system":
        found: tuple[Any, ...] = storage._share_filename_cpu_()
        return found
    return os.getpid(), *storage._share_fd_cpu_()


def _shared(known_as: Any, dtype: torch.dtype, offset: int, shape: Any, stride: Any, requires_grad: bool) -> Any:
    """Return the tensor in the same memory. Raises OSError if it is gone."""
    storages: Any = torch.UntypedStorage
    if isinstance(known_as[0], bytes):
        storage = storages._new_shared_filename_cpu(*known_as)
    else:
        # The memory has no name in the file system; it is reached by the other process's descriptor of it. To have that
        # sent, as multiprocessing does, would take a socket and a thread in the notebook.
        pid, descriptor, size = known_as
        mine = host.open_descriptor(pid, descriptor)
        try:
            storage = storages._new_shared_fd_cpu(mine, size)
        finally:
            os.close(mine)
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    return tensor.requires_grad_() if requires_grad else tensor


# What a launch sends, and what comes back


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name by which the user knows a function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shares: bool = False) -> Packed:
    """Pack a call for ranks, with which memory is shared or not. Raises ValueError that names what cannot be sent."""
    try:
        packed, pickler = save((fn, args, kwargs), new_memory() if shares else None, shares=shares)
    except Exception as error:
        why = _why_not_sent(fn, args, kwargs, error)
        raise ValueError(f"{name_of(fn)} cannot be sent to the ranks: {why}\n{help_hint('cannot_be_sent')}") from error
    if pickler.has_unshared:
        warnings.warn(
            f"{name_of(fn)} uses tensors in shared memory, but these ranks are not processes of this notebook's: each "
            "gets a copy, and what it writes there is not seen here. Return the tensors, or launch without on=",
            stacklevel=3,
        )
    packed.head = pickler.file.getvalue()
    return packed


def _why_not_sent(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
    """Return which value of a call cannot be packed, why, and what to do."""
    given = {f"argument {index + 1} (after the worker)": value for index, value in enumerate(args)}
    given |= {f"argument {name}=…": value for name, value in kwargs.items()}
    where, value, why = _culprit({**given, name_of(fn): fn}, set()) or (name_of(fn), fn, error)
    what = f"{where} is a {type(value).__name__}, which cannot be pickled ({why})"
    if type(value).__module__.startswith("multiprocessing."):
        return f"{what}. Return values from the function instead: run.results has each rank's"
    return f"{what}. Make it inside the function instead, or pass what it is made from"


def _culprit(values: Mapping[str, Any], seen: set[int]) -> tuple[str, Any, Exception] | None:
    """Return the first of some values that cannot be packed, or what it uses: where it is, itself, and why."""
    for where, value in values.items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            pack(value)
        except Exception as error:
            return _culprit(_used_by(value), seen) or (where, value, error)
    return None


def _used_by(value: Any) -> dict[str, Any]:
    """Return the variables that a function uses, each by the words that name it in an error."""
    function = inspect.unwrap(getattr(value, "func", value))
    if inspect.ismethod(function):
        return {f"self, a {type(function.__self__).__name__},": function.__self__}
    if not inspect.isfunction(function):
        return {}
    names = inspect.getclosurevars(function)
    return {f"{k!r}, which {function.__name__} uses,": part for k, part in {**names.globals, **names.nonlocals}.items()}


def pack_result(result: Any, what: str = "the function returned", memory: Memory | None = None) -> Packed:
    """Pack what is to reach the notebook, into memory if there is some. Raises ValueError if it cannot be."""
    try:
        return pack(result, memory, kind=ResultPickler, by_name=True)
    except Exception as error:
        instead = "plain values, tensors or a state_dict"
        if "ProcessGroup" in str(error):  # of a sharded model
            instead = (
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
            )
        raise ValueError(
            f"{what} a {type(result).__name__} that cannot be sent to the notebook ({error}). "
            f"Return {instead} instead\n{help_hint('cannot_be_sent')}"
        ) from error
