"""How calls and results travel: each storage once, definitions under their names, decorators' functions by value."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import types
import weakref

import numpy
import pytest
import torch
from cloudpickle import cloudpickle as by_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labkit.protocol import packing
from labkit.rank.notebook_main import in_place, new_main


def in_bytes(value, **options):
    """What arrives of a value by a message, or from another machine."""
    return packing.unpack(packing.pack(value, **options))


def in_memory(value, **options):
    """What arrives of a value that is mapped."""
    return packing.unpack(packing.pack([torch.zeros(1 << 15), value], packing.new_memory(), **options))[1]


# Tensors


def test_a_tensor_comes_without_its_gradient_and_its_history():
    weight = torch.ones(2, requires_grad=True)
    made = weight * 2
    made.sum().backward()
    weight, made = in_bytes((weight, made))
    assert weight.grad is None
    assert made.is_leaf
    assert made.requires_grad


def test_views_of_an_array_come_apart():
    array = numpy.zeros(3000)
    array, part = in_bytes((array, array[:10]))
    part[:] = 1
    assert array.sum() == 0


def test_what_is_sent_are_the_values_of_when_it_was_packed():
    weight = torch.ones(5000)
    packed = packing.pack(weight)
    weight.zero_()
    assert packing.unpack(packed).sum() == 5000


def test_what_was_mapped_is_each_process_own_and_stays_when_it_is_let_go_of():
    packed = packing.pack(torch.ones(50_000), packing.new_memory())
    assert packed.data == b""
    one, other = packing.unpack(packed), packing.unpack(packed)
    packed.clear()
    one.add_(1)
    assert (one.unique().tolist(), other.unique().tolist()) == ([2.0], [1.0])
    assert one.data_ptr() % 64 == 0


def test_memory_is_gone_once_nobody_has_it_open():
    memory = packing.new_memory()
    known_as = pickle.dumps(memory)
    opened = pickle.loads(known_as)
    name = os.readlink(opened.path)
    del memory
    assert os.readlink(opened.path) == name
    with pytest.raises(OSError, match="No such file"):
        pickle.loads(known_as)
    path = opened.path
    del opened
    assert not os.path.exists(path)


class Labelled(torch.Tensor):
    pass


def labelled():
    found = torch.arange(3000.0).as_subclass(Labelled)
    found.label = "cat"
    return found


def named():
    found = torch.arange(3000.0)
    found.origin = "of its own"
    return found


KINDS = {
    "bfloat16": lambda: torch.arange(3000, dtype=torch.bfloat16),
    "a conjugate view": lambda: torch.arange(3000.0).to(torch.complex64).mul(1j).conj(),
    "uint16": lambda: torch.arange(3000).to(torch.uint16),
    "transposed": lambda: torch.arange(3000.0).view(3, 1000).t(),
    "expanded": lambda: torch.arange(3.0).expand(1000, 3),
    "requires a gradient": lambda: torch.arange(3000.0, requires_grad=True),
    "a parameter": lambda: nn.Parameter(torch.arange(3000.0), requires_grad=False),
    "a buffer": lambda: nn.Buffer(torch.arange(3000.0)),
    "sparse": lambda: torch.eye(300).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3000.0), 0.5, 3, torch.quint8),
    "a subclass": labelled,
    "with an attribute": named,
}


def facts(tensor):
    """What is to be the same of a tensor that has arrived."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    kind = type(tensor), tensor.dtype, tensor.layout, tensor.shape, strides, tensor.requires_grad
    return *kind, tensor.is_conj(), tensor.is_neg(), vars(tensor)


def dense(tensor):
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


@pytest.mark.filterwarnings("ignore")  # of PyTorch: some of these kinds are in beta, or will go
@pytest.mark.parametrize("sent", [in_bytes, in_memory])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_tensor_of_any_kind_arrives_as_it_was(make, sent):
    tensor = make()
    arrived = sent(tensor)
    assert facts(arrived) == facts(tensor)
    assert torch.equal(dense(arrived), dense(tensor))


@given(
    size=st.integers(1, 3000),
    cuts=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 3)), max_size=6),
)
@settings(max_examples=25, deadline=None)
def test_any_views_of_a_tensor_are_views_of_what_arrives(size, cuts):
    base = torch.arange(float(size))
    views = [base[min(a, b) : max(a, b) : step] for a, b, step in cuts]
    arrived, *arrived_views = in_memory([base, *views])
    assert [view.tolist() for view in arrived_views] == [view.tolist() for view in views]
    base.neg_()
    arrived.neg_()
    assert [view.tolist() for view in arrived_views] == [view.tolist() for view in views]


@pytest.mark.parametrize("size", [10, 10_000])
@pytest.mark.parametrize("first", ["array", "tensor", "part"])
def test_an_array_and_a_tensor_in_the_same_memory_are_refused_in_a_call_and_come_apart_in_a_result(size, first):
    array = numpy.zeros(size)
    both = {"array": array, "tensor": torch.from_numpy(array)}
    if first == "part":
        both["array"] = array[2:]
    sent = {first: both.pop(first), **both} if first in both else both
    with pytest.raises(TypeError, match="a tensor and an array in the same memory would come apart"):
        packing.pack(sent)
    arrived = packing.unpack(packing.pack_result(sent))
    arrived["array"][1] = 7
    assert arrived["tensor"].sum() == 0


# Shared memory


def test_shared_memory_is_the_same_memory_on_this_machine_and_is_copied_for_another():
    net = nn.Linear(100, 100).share_memory()
    here, elsewhere = in_bytes(net, shares=True), in_bytes(net)
    with torch.no_grad():
        here.weight.fill_(5)
    assert net.weight.unique().tolist() == [5.0]
    assert here.weight.is_shared()
    assert (elsewhere.weight != 5).all()
    files = len(os.listdir("/dev/fd"))
    in_bytes(net, shares=True)
    assert len(os.listdir("/dev/fd")) == files, "none is left open"


# What is typed in cells

CELL = """
import dataclasses
import enum
import functools
from typing import Optional

import torch
from torch import nn

SCALE = 3
table = torch.zeros(5)
settings = {"width": 4}


@dataclasses.dataclass
class Config:
    width: int = 4


class Color(enum.Enum):
    RED = 1


class Base:
    class Inner:
        pass


class Net(Base):
    def scaled(self, x: "Optional[Config]") -> "Color":
        return x * SCALE


def mentions(config: "Config", color: "Optional[Color]"):
    return 1


def uses_data():
    return table.sum(), settings


def looks_up(name):
    return globals()[name]


@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)


@functools.singledispatch
def size_of(x):
    return 0


@size_of.register
def _size_of_a_list(x: list):
    return sum(map(size_of, x))


@size_of.register
def _size_of_a_number(x: int):
    return SCALE


class Lazy:
    @functools.cached_property
    def value(self):
        return 5


@torch.compile(backend="eager", fullgraph=True)
def compiled(x):
    return x * SCALE


@torch.no_grad()
def without_gradient(x):
    return x * SCALE
"""


@pytest.fixture
def notebook():
    """A notebook's `__main__`, which has run a cell."""
    main = types.ModuleType("__main__")
    with in_place(main):
        exec(compile(CELL, "<cell>", "exec", dont_inherit=True), vars(main))
        yield main


@contextlib.contextmanager
def another_process():
    """Where cloudpickle does not know the classes that this process has sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_value, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
        patch.setattr(by_value, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", weakref.WeakKeyDictionary())
        yield


@pytest.fixture
def as_rank(notebook):
    """Have what arrives of a value on a rank, in whose `__main__` one then is."""

    @contextlib.contextmanager
    def begin(value):
        packed = packing.pack(value)
        with another_process(), in_place(new_main()):
            yield packing.unpack(packed)

    return begin


def by_name(value):
    """Send a value as what pickles by name does: `all_gather_object`, `torch.save`, rpc."""
    return pickle.loads(pickle.dumps(value))


def test_a_class_of_a_cell_can_be_pickled_by_name_on_a_rank(notebook, as_rank):
    with as_rank((notebook.Config(5), notebook.Color.RED, notebook.Net, notebook.mentions)) as arrived:
        config, color, net, function = arrived
        assert type(config) is not notebook.Config
        assert by_name(config) == config
        assert by_name(color) is color
        assert by_name(net) is net
        assert by_name(function) is function
        assert by_name(net.Inner) is net.Inner
        assert isinstance(by_name(net()), sys.modules["__main__"].Base)


def test_a_tensor_of_another_device_goes_to_that_of_who_receives_it(monkeypatch):
    there = torch.arange(3000.0)
    address = there.untyped_storage().data_ptr()
    tag = torch.serialization.location_tag
    monkeypatch.setattr(torch.serialization, "location_tag", lambda s: "cuda:1" if s.data_ptr() == address else tag(s))
    packed = packing.pack([there, there[5:]])
    monkeypatch.undo()
    whole, part = packing.unpack(packed, torch.device("cpu"))
    assert torch.equal(whole, there)
    part += 1
    assert whole[-1] == 3000, "two views of one storage"
    assert packing.unpack(packed, "meta")[0].device.type == "meta"


def test_functions_with_decorators_that_pickle_by_name_travel(notebook, as_rank):
    with as_rank((notebook.fib, notebook.Lazy, notebook.without_gradient)) as arrived:
        fib, lazy, without_gradient = arrived
        assert fib(50) == 12586269025
        assert fib.cache_info().hits > 0
        assert by_name(fib) is fib
        assert lazy().value == 5
        assert without_gradient(torch.ones(1, requires_grad=True)).requires_grad is False


NOT_CARRIED = """
import functools
import sys
import types

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

parametrized = weight_norm(nn.Linear(2, 2))
hooked = nn.Linear(2, 2)
hooked.weight.register_hook(lambda gradient: gradient)
followed = nn.Parameter(torch.ones(2))
followed.register_post_accumulate_grad_hook(lambda weight: None)
optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
optimizer.register_step_post_hook(lambda *_: None)
by_hand = types.ModuleType("made_by_hand")
exec("def size():\\n    return 3", vars(by_hand))
sys.modules["made_by_hand"] = by_hand
size = by_hand.size
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("size_of", r"cannot pickle 'weakref"),
        ("compiled", "cannot pickle 'DynamoTLS'"),
        ("parametrized", "Serialization of parametrized modules is only supported through state_dict"),
        ("hooked", "it has hooks, which do not travel: register them in the function"),
        ("followed", "it has hooks, which do not travel: register them in the function"),
        ("optimizer", "it has hooks, which do not travel: register them in the function"),
        ("by_hand", "module 'made_by_hand' was made by hand, and a rank cannot import it"),
        ("size", "module 'made_by_hand' was made by hand, and a rank cannot import it"),
    ],
)
def test_what_would_arrive_as_something_else_is_refused_by_its_name(notebook, name, said):
    exec(compile(NOT_CARRIED, "<cell>", "exec", dont_inherit=True), vars(notebook))
    exec(f"def train(worker):\n    return {name}", vars(notebook))
    try:
        with pytest.raises(ValueError, match=f"train cannot be sent to the ranks: .*'{name}', .*{said}"):
            packing.pack_call(notebook.train, (), {})
    finally:
        del sys.modules["made_by_hand"]


def test_a_result_may_have_hooks_and_leaves_them_behind():
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: gradient * 10)
    returned = packing.unpack(packing.pack_result(weight))
    returned.sum().backward()
    assert returned.grad.tolist() == [1.0, 1.0]


def test_an_attribute_that_is_its_bases_own_stays_the_classs_when_the_bases_changes(notebook, as_rank):
    """cloudpickle leaves out what is the same object: a counter would then be the base's."""
    exec("class Counts:\n    count = 0\nclass CountsToo(Counts):\n    count = 0", vars(notebook))
    with as_rank((notebook.Counts, notebook.CountsToo)) as (counts, counts_too):
        counts.count += 1
        assert counts_too.count == 0


def test_closures_share_what_they_share_in_the_notebook(notebook, as_rank):
    exec(
        "def make():\n    count = 0\n    def add():\n        nonlocal count\n        count += 1\n"
        "    return add, lambda: count\nadd, now = make()",
        vars(notebook),
    )
    with as_rank((notebook.add, notebook.now)) as (add, now):
        add()
        assert now() == 1
    assert notebook.now() == 0


def test_a_result_is_of_the_notebooks_own_class(notebook, as_rank):
    before = dict(vars(notebook.Net))
    with as_rank((notebook.Net, notebook.Config, notebook.mentions)) as (net, config, function):
        result = packing.pack_result([net(), config(7), net, function])
    net, config, kind, function = packing.unpack(result)
    assert isinstance(net, notebook.Net)
    assert config == notebook.Config(7)
    assert kind is notebook.Net
    assert function is notebook.mentions
    assert dict(vars(notebook.Net)) == before


def test_a_result_is_of_the_class_that_the_notebook_has_now(notebook, as_rank):
    with as_rank(notebook.Config) as config:
        result = packing.pack_result(config(7))
    exec(compile(CELL, "<cell>", "exec", dont_inherit=True), vars(notebook))
    assert isinstance(packing.unpack(result), notebook.Config)


def test_a_result_of_a_class_that_the_rank_has_made_is_by_value(as_rank):
    with as_rank(len):
        kind = type("Made", (), {"__module__": "__main__", "value": 5})
        result = packing.pack_result(kind())
    assert packing.unpack(result).value == 5


def test_functions_share_the_globals_of_the_ranks_main(notebook, as_rank):
    with as_rank((notebook.uses_data, notebook.looks_up)) as (uses_data, look_up):
        main = sys.modules["__main__"]
        assert uses_data.__globals__ is look_up.__globals__ is vars(main)
        main.table += 1
        assert uses_data()[0] == 5


@pytest.mark.filterwarnings("error")
def test_a_scheduler_that_was_made_in_the_notebook_sees_its_optimizers_steps():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sent_optimizer, sent = in_bytes((optimizer, scheduler))
    assert sent.optimizer is sent_optimizer
    sent_optimizer.step()
    sent.step()
    assert sent.get_last_lr() == pytest.approx([0.01])
    assert scheduler.get_last_lr() == [0.1], "the notebook's own is left as it is"


def test_a_class_that_needs_keywords_to_be_made_is_refused_by_name(notebook):
    exec(
        "class Layer:\n    def __init_subclass__(cls, kind): cls.kind = kind\n"
        "class Square(Layer, kind='square'): pass\ndef fit(worker): return Square.kind",
        vars(notebook),
    )
    said = r"'Square', which fit uses, .*keywords of class Square do not travel \(missing a required argument: 'kind'\)"
    with pytest.raises(ValueError, match=said):
        packing.pack_call(notebook.fit, (), {})
