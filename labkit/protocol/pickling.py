"""The one pickler for what travels between notebook and ranks: jobs, results, and what ranks send their own processes.

By value goes what was typed in cells, under its name: where it arrives, `__main__` has it by that name too, and what
pickles by name (`all_gather_object`, `torch.save`, rpc) finds it there. A result names what came from the notebook,
which is then the notebook's own. Of tensors each storage goes once (`storages`), so those that share memory still do.
"""

from __future__ import annotations

import builtins
import enum
import functools
import getpass
import importlib
import io
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import cloudpickle
import torch
from cloudpickle import cloudpickle as by_value

from labkit.protocol import modules, storages
from labkit.protocol.framing import MARK, framed, unframed
from labkit.protocol.pages import help_hint

MAIN = "__main__"


class Message:
    """A pickle and, beside it, the storages of its tensors, each once. Read it with `loads`."""

    def __init__(self, head: bytes, storages: list[torch.UntypedStorage], held: Any = None) -> None:
        self.head = head
        self.storages = storages
        self._held = held
        """What must live until it has been read: shared memory."""

    @classmethod
    def of_buffers(cls, head: bytes, *buffers: Any) -> Message:
        """Return the message with these storages, or others with the same bytes."""
        return cls(head, [b if isinstance(b, torch.UntypedStorage) else storages.of_bytes(b) for b in buffers])

    def __reduce__(self) -> Any:
        # Out of band where the pickler has a place for that, as with `channels.send`.
        buffers = (pickle.PickleBuffer(storages.memory(storage)) for storage in self.storages)
        return Message.of_buffers, (self.head, *buffers)

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return len(self.head) + sum(storage.nbytes() for storage in self.storages)

    def clear(self) -> None:
        """Drop what is in it, which has arrived: who keeps the job need not keep a copy of its data."""
        self.head, self.storages, self._held = b"", [], None

    def parts(self) -> list[Any]:
        """Return the buffers that make it up in one piece, one after the other; one without storages is its pickle."""
        return framed(self.head, list(map(storages.memory, self.storages))) if self.storages else [self.head]

    def to_bytes(self) -> bytes:
        """Return it in one piece."""
        return b"".join(self.parts())

    @classmethod
    def of_bytes(cls, data: bytes) -> Message:
        """Return what `to_bytes` gave."""
        return cls.of_file(io.BytesIO(data)) if data.startswith(MARK) else cls(data, [])

    @classmethod
    def of_file(cls, file: io.BufferedIOBase) -> Message:
        """Return what `to_bytes` gave, read from a file. Each storage is read to where it stays.

        Raises:
            EOFError: the file ends too early.
        """
        begin = file.read(len(MARK))
        file.seek(0)
        if begin != MARK:
            return cls(file.read(), [])
        parts = unframed()
        try:
            while True:
                room = next(parts)
                while room:
                    if not (count := file.readinto(room)):
                        raise EOFError("the file ends within a message")
                    room = room[count:]
        except StopIteration as whole:
            head, found = whole.value
            return cls(bytes(head), found)


class Main(Protocol):
    """The `__main__` for which something is unpickled."""

    namespace: dict[str, Any]
    """The global namespace of its functions."""

    def known(self, name: str) -> Any:
        """Return what was received under this name before, or None."""

    def receive(self, name: str, value: Any) -> None:
        """Take in a definition that was found under this name in the notebook."""


# Sending


_Cached: Any = type(functools.cache(lambda: None))

DEFINITIONS = {types.FunctionType, _Cached}
"""What `def` makes, with decorators or without."""


class _Namespace(dict):
    """Stands for the globals of the notebook's functions."""

    def __reduce__(self) -> Any:
        return _namespace, ()


class Pickler(cloudpickle.Pickler):
    """Pickles by value what was typed in cells, and each storage once.

    Args:
        shares: whether the reader is on this machine, and maps memory that is shared.
        copies: whether tensors may change before the message is sent, which then has their values of now.
        is_known: whether the reader has a definition itself, by its name in `__main__`.
        file: where the pickle goes.
    """

    _refuses = True
    """Whether what would arrive as something else is refused: hooks are left behind, modules may be others there."""

    def __init__(
        self,
        shares: bool = False,
        copies: bool = True,
        is_known: Callable[[str, Any], bool] = lambda name, value: False,
        file: io.BytesIO | None = None,
    ) -> None:
        self._file = file or io.BytesIO()
        super().__init__(self._file, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self.held: list[Any] = []
        self._path: list[str] | None = None
        """Where a rank looks for modules."""
        self._not_found: dict[str, str] = {}
        """Why it would not find one, by name; "" for those that it finds."""
        self._own: set[int] = set()
        """Storages that nobody else has."""
        self._at: dict[tuple[int, int], torch.UntypedStorage] = {}
        """Storages that have been pickled, by address and size."""
        self.has_unshared = False
        """Whether memory that is shared was copied all the same."""
        self._shares, self._copies, self._is_known = shares, copies, is_known
        self.globals_ref[id(vars(sys.modules[MAIN]))] = _Namespace()

    def message(self) -> Message:
        """Return what has been pickled."""
        return Message(self._file.getvalue(), self.storages, self.held)

    def reducer_override(self, value: Any) -> Any:
        """Return how something is pickled that is of none of Python's own simple types."""
        kind = type(value)
        if kind is torch.Tensor and storages.is_plain(value):
            return storages.tensor_in, storages.lies_in(value)
        if self._refuses:
            self._check_hooks(value)
        if issubclass(kind, torch.UntypedStorage):
            return self._reduce_storage(value)
        if kind is torch.TypedStorage:
            return storages.typed, (value._untyped_storage, value.dtype)
        if issubclass(kind, type) or kind in DEFINITIONS:
            return self._reduce_definition(value)
        if (
            kind is types.CodeType
        ):  # its file, too, which cloudpickle leaves out from 3.1.3 on: else no traceback has lines
            return code_of, (value.co_filename, *cloudpickle.Pickler.dispatch_table[kind](value))
        if kind is types.CellType:
            return _reduce_cell(value)
        if kind is functools.cached_property and "lock" in vars(value):  # before Python 3.12
            return functools.cached_property, (value.func,), {"attrname": value.attrname}
        if kind.__module__ == "numpy" and kind.__name__ == "ndarray" and (reduced := storages.reduce_array(value)):
            return reduced
        if kind is Message:
            self.held.append(value)
            self._own |= {id(storage) for storage in value.storages}
            return Message, (value.head, value.storages)
        if issubclass(kind, types.ModuleType):
            return self._reduce_module(value)
        if (instead := _in_a_script(value)) is not None:
            return getattr, instead
        return super().reducer_override(value)

    def _check_hooks(self, value: Any) -> None:
        """Raise TypeError for hooks, which PyTorch leaves out of a pickle: those of a parameter without a warning."""
        if isinstance(value, torch.Tensor) and storages.has_hooks(value):
            raise TypeError("it has hooks, which do not travel: register them in the function")
        if isinstance(value, torch.optim.Optimizer) and any(
            getattr(value, f"_optimizer_{name}_hooks", None)
            for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post")
        ):
            raise TypeError("it has hooks, which do not travel: register them in the function")

    def _check_found(self, module: str, what: Any) -> None:
        """Raise TypeError for something that goes by the name of a module which a rank would not find."""
        top = module.partition(".")[0]
        if top not in self._not_found:
            self._path = modules.search_path() if self._path is None else self._path
            self._not_found[top] = modules.not_found_because(top, self._path)
        if (why := self._not_found[top]) and by_value._should_pickle_by_reference(what):
            raise TypeError(f"{why}: import it in the function, or put it into a file beside the notebook")

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storages.is_shared(storage):
            if self._shares:
                self.held.append(storage)
                return storages.shared, storages.share(storage)
            self.has_unshared = True
        if storage.device.type == "meta":
            return functools.partial(torch.UntypedStorage, device="meta"), (storage.nbytes(),)
        if where := storages.location(storage):
            return storages.placed, (storages.snapshot(storage), where)
        known = self._at.setdefault((storage.data_ptr(), storage.nbytes()), storage)
        if known is not storage and storage.nbytes():
            return storages.same, (known,)
        if storage.nbytes() <= storages.INLINE_BYTES:
            return storages.of_bytes, (bytes(storages.memory(storage)),)
        copies = self._copies and id(storage) not in self._own
        self.storages.append(storages.snapshot(storage) if copies else storage)
        return _storage, (len(self.storages) - 1,)

    def _reduce_definition(self, value: Any) -> Any:
        name, of = found_as(value), getattr(value, "__module__", None)
        if name and self._is_known(name, value):
            return _of_main, (name,)
        if self._refuses and isinstance(of, str) and of in sys.modules:
            self._check_found(of, value)
        if type(value) is _Cached and not _is_by_name(value):
            others = {k: given for k, given in vars(value).items() if k not in ("__wrapped__", "cache_parameters")}
            reduced: Any = cached, (value.__wrapped__, value.cache_parameters()), others, None, None, set_attributes
        else:
            reduced = super().reducer_override(value)
            if isinstance(value, type):
                reduced = _with_repeated_attributes(value, reduced)
        if name and isinstance(reduced, tuple):
            make, args, *rest = reduced
            return (_received, (name, make, *args), *rest)
        return reduced

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
    """Pickles what the notebook can load: tensors of the CPU, for it may have no GPU; a DDP model without its wrapper.

    The wrapper belongs to a process group, and the notebook is in none; nor are the hooks that strategies set.
    """

    _refuses = False

    def reducer_override(self, value: Any) -> Any:
        """Return how something is pickled that is of none of Python's own simple types."""
        parallel = sys.modules.get("torch.nn.parallel")
        if parallel is not None and isinstance(value, parallel.DistributedDataParallel):
            return unwrapped, (value.module,)
        return super().reducer_override(value)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        host = to_host(storage)
        return super()._reduce_storage(storage) if host is storage else (storages.same, (host,))


def _reduce_cell(cell: types.CellType) -> Any:
    """Return how a closure's cell is pickled: what is in it may be the function whose closure it is."""
    try:
        return types.CellType, (), (cell.cell_contents,), None, None, fill_cell
    except ValueError:  # it is empty
        return types.CellType, ()


def fill_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    """Put into a cell what is to be in it."""
    (cell.cell_contents,) = contents


def _is_by_name(value: Any) -> bool:
    """Whether a function is found by its name in a module that others can import."""
    return by_value._lookup_module_and_qualname(value, getattr(value, "__qualname__", None)) is not None


def _with_repeated_attributes(kind: type, reduced: Any) -> Any:
    """Have a class keep attributes that are the same object as its base's, which cloudpickle leaves out.

    They are one until somebody sets the base's.
    """
    if isinstance(reduced, tuple) and len(reduced) > 2 and not issubclass(kind, enum.Enum):
        state, inherited = reduced[2][0], {id(value) for base in kind.__bases__ for value in vars(base).values()}
        repeated = {name: value for name, value in vars(kind).items() if id(value) in inherited}
        state.update({name: value for name, value in repeated.items() if not name.startswith("__")})
    return reduced


def to_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage, or a copy on the CPU of one that only a process with its device could load."""
    return storages.snapshot(storage) if storages.location(storage) not in ("", "meta") else storage


def unwrapped(model: Any) -> Any:
    """Return the model: in a pickle, of a wrapper that has stayed behind."""
    return model


def _in_a_script(value: Any) -> tuple[types.ModuleType, str] | None:
    """Return what a script has in the place of something of the notebook's process: (module, name)."""
    for name in ("stdout", "stderr"):
        if value is getattr(sys, name):  # def say(text, to=sys.stdout)
            return sys, name
    if type(value).__module__ == "IPython.core.autocall":  # `exit` and `quit`
        return builtins, "exit"
    is_kernels = isinstance(value, types.MethodType) and type(value.__self__).__module__.startswith("ipykernel.")
    if is_kernels and value.__name__ == "getpass":
        return getpass, "getpass"  # a cell that imports it by its name gets the kernel's
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


def dump(value: Any, kind: type[Pickler] = Pickler, **options: Any) -> Message:
    """Pickle something, with a pickler of these options. Raises what the value raises that cannot be pickled."""
    pickler = kind(**options)
    pickler.dump(value)
    return pickler.message()


def dumps(value: Any, **options: Any) -> bytes:
    """Pickle something in one piece, which holds all of its tensors' bytes."""
    return dump(value, copies=False, **options).to_bytes()


# Receiving


def _storage(index: int) -> torch.UntypedStorage:
    """Stand for `_Reading.storage` in a pickle; so do those below for the methods of their names."""
    raise NotImplementedError


def _namespace() -> dict[str, Any]:
    raise NotImplementedError


def _received(name: str, make: Callable[..., Any], *args: Any) -> Any:
    raise NotImplementedError


def _of_main(name: str) -> Any:
    raise NotImplementedError


class _Reading:
    """What one message needs while it is unpickled."""

    def __init__(self, message: Message, main: Main | None, device: torch.device | None) -> None:
        self._storages, self._main = message.storages, main
        self._device = device
        self._own_namespace: dict[str, Any] = {"__name__": MAIN, "__builtins__": builtins}
        self._left_alone: set[int] = set()

    def storage(self, index: int) -> torch.UntypedStorage:
        """Return a storage that has come beside the pickle."""
        return self._storages[index]

    def namespace(self) -> dict[str, Any]:
        """Return the global namespace for functions of the notebook."""
        return self._own_namespace if self._main is None else self._main.namespace

    def received(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        """Return a definition that has a name in the notebook: made now, if that has not come before."""
        if self._main is None:
            return make(*args)
        value = self._main.known(name)
        if value is None:
            value = make(*args)
            if isinstance(value, type):
                value.__qualname__ = name  # which cloudpickle leaves out
            self._main.receive(name, value)
        return value

    def of_main(self, name: str) -> Any:
        """Return what is called so in the notebook."""
        top, *inside = name.split(".")
        main = vars(sys.modules[MAIN]) if self._main is None else self._main.namespace
        try:
            return functools.reduce(getattr, inside, main[top])
        except (AttributeError, KeyError):
            raise AttributeError(f"module '__main__' has no attribute {name!r}") from None

    # In the notebook's own process cloudpickle finds the class that was sent, and would write into it what comes back.

    def make_class(self, make: Callable[..., Any], *args: Any) -> Any:
        """Return the class that was sent, if this process has it; else make it."""
        *_, tracker_id, _ = args
        sent = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
        if sent is None or self._main is not None:
            return make(*args)
        self._left_alone.add(id(sent))
        return sent

    def fill_class(self, value: Any, state: Any) -> Any:
        """Give a class that was made its attributes."""
        return value if id(value) in self._left_alone else by_value._class_setstate(value, state)

    def placed(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        """Return a storage that was on a GPU, on the device of who receives it, where that is known."""
        location = location if self._device is None else str(self._device)
        return storage if location == "cpu" else storages.placed(storage, location)

    def named(self, module: str, name: str) -> Any:
        """Return what stands for a name in the pickle, or None if it means what it says."""
        if (module, name) == (storages.__name__, "placed"):
            return self.placed
        if module == __name__ and name.startswith("_"):
            return getattr(self, name[1:])
        if module == by_value.__name__:
            if name in ("_make_skeleton_class", "_make_skeleton_enum"):
                return functools.partial(self.make_class, getattr(by_value, name))
            if name == "_class_setstate":
                return self.fill_class
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, head: bytes, reading: _Reading) -> None:
        super().__init__(io.BytesIO(head))
        self._reading = reading

    def find_class(self, module: str, name: str) -> Any:
        if (found := self._reading.named(module, name)) is not None:
            return found
        try:
            return super().find_class(module, name)
        except AttributeError as error:
            if module != MAIN:
                raise
            raise AttributeError(
                f"{error}: it travels by its name, which this process does not have. Make it in the function, or in a "
                "module"
            ) from None


def loads(
    message: Message | bytes,
    main: Main | None = None,
    device: torch.device | None = None,
) -> Any:
    """Unpickle what `dump` or `dumps` has pickled.

    Args:
        message: what was pickled.
        main: where the definitions that it brings are kept; None: nowhere.
        device: where those go that were on another device than the CPU.

    Raises what unpickling raises.
    """
    if not isinstance(message, Message):
        message = Message.of_bytes(message)
    return _Unpickler(message.head, _Reading(message, main, device)).load()


def code_of(file: str, make: Callable[..., types.CodeType], args: Any) -> types.CodeType:
    """Return the code that `make` makes, with the name of its file."""
    return make(*args).replace(co_filename=file)


def cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """Return a function with a cache of its own."""
    return functools.lru_cache(**parameters)(function)


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Give a function its attributes."""
    for name, given in attributes.items():
        setattr(value, name, given)


# What a launch sends, and what comes back


def name_of(fn: Callable[..., Any]) -> str:
    """Return the name by which the reader knows a function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], shares: bool = False) -> Message:
    """Pack a call for ranks, with which memory is shared or not. Raises ValueError that names what cannot be sent."""
    try:
        pickler = Pickler(shares=shares)
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        from labkit.protocol import unpicklable  # not above: a rank packs no calls

        why = unpicklable.explain(name_of(fn), fn, args, kwargs, dumps) or error
        raise ValueError(f"{name_of(fn)} cannot be sent to the ranks: {why}\n{help_hint('cannot_be_sent')}") from error
    if pickler.has_unshared:
        warnings.warn(
            f"{name_of(fn)} uses tensors in shared memory, but these ranks are not processes of this notebook's: each "
            "gets a copy, and what it writes there is not seen here. Return the tensors, or launch without on=",
            stacklevel=3,
        )
    return pickler.message()


def pack_result(result: Any, what: str = "the function returned", **options: Any) -> Message:
    """Pack what is to reach the notebook, with the options of a `Pickler`. Raises ValueError if it cannot be."""
    try:
        return dump(result, ResultPickler, **options)
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
