"""What a failure says of the reader's variables: in words, bounded, and never a second failure."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import labkit
from labkit.failures.frames import frames_of
from labkit.protocol.events import Failure
from labkit.protocol.job import Cell
from labkit.rank import describe as describing
from labkit.rank.describe import CHARACTERS, KIND, LEFT_OUT, describe, named, of_frames
from labkit.ui import summary

NAN, INF = float("nan"), float("inf")


class Raises:
    def __repr__(self):
        raise RuntimeError("a second failure")

    __str__ = __len__ = __bool__ = __hash__ = __repr__

    def __eq__(self, other):
        raise RuntimeError("a second failure")

    @property
    def __class__(self):
        raise RuntimeError("a second failure")

    def __getattribute__(self, name):
        raise RuntimeError("a second failure")


class NeverEnds:
    def __repr__(self):
        while True:
            pass

    __str__ = __len__ = __getattribute__ = __repr__


@dataclasses.dataclass
class Settings:
    lr: float
    api_key: str
    inner: object = None


Point = namedtuple("Point", "x y")


class Subclass(torch.Tensor):
    pass


VALUES = [
    (1e-3, "0.001"),
    ("x" * 5000, f"{'x' * 100!r}… (5,000 characters)"),
    ([1, "a", None], "[1, 'a', None]"),
    (list(range(100)), "[0, 1, 2, 3, 4, 5, 6, 7, … 100 in all]"),
    ({"a": 1, "b": [2]}, "{'a': 1, 'b': [2]}"),
    ([[[[[1]]]]], "[[[list of 1]]]"),
    (torch.tensor([1.0, NAN, -INF]), "float32 [3] on cpu: 1, nan, -inf"),
    (torch.tensor([[1, 2], [3, 4]]), "int64 [2, 2] on cpu: 1, 2, 3, 4"),
    (torch.arange(10.0), "float32 [10] on cpu, min 0, max 9, mean 4.5"),
    (torch.arange(10) + 50250, "int64 [10] on cpu, min 50250, max 50259, mean 5.025e+04"),
    (torch.arange(10) > 6, "bool [10] on cpu, min 0, max 1, mean 0.3"),
    (
        torch.cat([torch.arange(10.0), torch.tensor([NAN, NAN, INF])]),
        "float32 [13] on cpu, min 0, max 9, mean 4.5, 2 NaN, 1 Inf",
    ),
    (torch.full((9,), NAN, dtype=torch.bfloat16), "bfloat16 [9] on cpu, 9 NaN"),
    (torch.ones(3).as_subclass(Subclass), "Subclass float32 [3] on cpu"),
    (np.arange(10.0)[::-1], "array float64 [10], min 0, max 9, mean 4.5"),
    (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), "a Sequential"),
    (Settings(0.1, "abc"), f"Settings(lr=0.1, api_key={LEFT_OUT}, inner=None)"),
    (Point(1, torch.ones(2)), "Point(x=1, y=float32 [2] on cpu: 1, 1)"),
    (Raises(), "a Raises"),
    (NeverEnds(), "a NeverEnds"),
    ([NeverEnds(), {"a": Raises()}], "[a NeverEnds, {'a': a Raises}]"),
]


@pytest.mark.parametrize("index", range(len(VALUES)))  # of the values themselves pytest would ask what they cannot say
def test_a_value_is_said_in_a_few_words(index):
    value, words = VALUES[index]
    assert describe(value) == words


@pytest.mark.parametrize(
    ("name", "value", "is_shown"),
    [
        ("password", "abc", False),
        ("api_key", "abc", False),
        ("apiKey", "abc", False),
        ("client_secret", ["abc"], False),
        ("headers", {"auth_token": "abc"}, False),
        ("max_tokens", 5, True),
        ("token", 5, True),
        ("key", torch.tensor([1, 2]), True),
        ("monkey", "abc", True),
        ("tokenizer", "abc", True),
        ("step", 3, True),
    ],
)
def test_secrets_are_left_out_and_what_only_sounds_like_one_is_not(name, value, is_shown):
    said = named(name, value)
    hidden = LEFT_OUT in said or "…" in said
    assert hidden is not is_shown, said
    if not is_shown:
        assert "abc" not in said


def test_a_description_is_bounded_whatever_the_value():
    deep = Settings(0.1, "", {f"{'long name ' * 20}{i}": ["y" * 1000] * 1000 for i in range(1000)})
    assert len(named("deep", deep)) == CHARACTERS
    circle: list = []
    circle.append(circle)
    assert named("circle", circle) == "[[[list of 1]]]"


def frame_with(**values):
    """A frame with these variables, in this file."""
    code = "def f(values):\n" + "".join(f"    {name} = values[{name!r}]\n" for name in values)
    exec(compile(code + "    return sys._getframe()\n", __file__, "exec"), {"sys": sys}, made := {})
    return made["f"](values)


def test_of_a_frame_the_readers_own_variables_are_described_and_no_functions_or_modules():
    frame = frame_with(a=1, f=len, g=lambda: 0, module=sys, kind=int, b=Raises())
    (found,) = of_frames([frame], cells={})
    assert dict(found) == {
        "values": f"{{'a': 1, 'f': {describe(len)}, 'g': {describe(frame)[:2]}function, 'module': a "
        "module, 'kind': a type, 'b': a Raises}",
        "a": "1",
        "b": "a Raises",
    }


def test_what_takes_too_long_is_left_behind_and_the_frames_before_it_are_there(monkeypatch):
    monkeypatch.setattr(describing, "LIMIT_S", 0.05)
    done = threading.Event()
    describe_one = describing.describe

    def slow(value, depth=0):
        if value == "slow":
            done.wait()
        return describe_one(value, depth)

    monkeypatch.setattr(describing, "describe", slow)
    began_s = time.monotonic()
    found = of_frames([frame_with(a=1), frame_with(b="slow"), frame_with(c=2)], cells={})
    took_s = time.monotonic() - began_s
    done.set()
    assert dict(found[0])["a"] == "1"
    assert found[1:] == [(), ()]
    assert took_s < 5


def test_frames_of_libraries_have_no_variables():
    frame = frame_with(a=1)
    assert of_frames([frame], cells={__file__: Cell("Cell In[3]", "")}) != [()]
    made: dict = {}
    exec(compile("import sys\ndef f(a):\n    return sys._getframe()\n", threading.__file__, "exec"), made)
    assert of_frames([made["f"](1)], cells={}) == [()]


# What the notebook makes of it

CELL = "/tmp/ipykernel_77/1.py"
CELLS = {CELL: Cell("Cell In[3]", "def train(worker):\n    loss = net(x)\n    step(loss)\n")}
FAILURE = Failure(
    1,
    2.0,
    "running",
    "ValueError: <bad>",
    "Traceback",
    ((threading.__file__, 5, "run"), (CELL, 2, "net"), (CELL, 3, "train")),
)
SAID = ((), (("x", "float32 [9] on cpu, 9 NaN"),), (("loss", "<nan>"), ("step", "4")))
CAPTURED = {KIND: pickle.dumps(SAID)}


def test_frames_are_the_readers_most_recent_first_with_place_line_and_variables():
    frames = frames_of([None, FAILURE], 1, CELLS, [{}, CAPTURED])
    assert [(frame.rank, frame.title, frame.source) for frame in frames] == [
        (1, "Cell In[3], line 2, in net", "loss = net(x)"),
        (1, "Cell In[3], line 3, in train", "step(loss)"),
    ]
    assert frames[1].variables == {"loss": "<nan>", "step": "4"}
    assert str(frames) == (
        "rank 1: Cell In[3], line 2, in net\n    loss = net(x)\n    x = float32 [9] on cpu, 9 NaN\n"
        "rank 1: Cell In[3], line 3, in train\n    step(loss)\n    loss = <nan>\n    step = 4"
    )
    assert frames.in_short == "Variables of rank 1 at Cell In[3], line 2:\n  x = float32 [9] on cpu, 9 NaN"


def test_the_rank_that_failed_first_comes_first():
    frames = frames_of([FAILURE._replace(rank=0, time_s=1.0), FAILURE], 1, CELLS, [CAPTURED, CAPTURED])
    assert [frame.rank for frame in frames] == [1, 1, 0, 0]
    assert [frame.rank for frame in frames.of(0)] == [0, 0]


# With real ranks


def normalise(batch):
    scale = batch.std(0)
    if not (batch / scale).isfinite().all():
        raise ValueError("not finite")


def train(worker, password):
    bomb, never = Raises(), NeverEnds()
    batch = torch.ones(16, 4)
    normalise(batch if worker.rank else batch + torch.arange(16.0)[:, None])
    return bomb is never


@pytest.mark.spawns
def test_a_failure_of_a_real_rank_carries_its_variables(ranks):
    with pytest.raises(labkit.WorkerFailed) as failure:
        labkit.launch(train, "hunter2", on=ranks, live=False)
    error = failure.value
    assert [(frame.rank, frame.function) for frame in error.frames.of(1)] == [(1, "normalise"), (1, "train")]
    inner, outer = error.frames[:2]
    assert inner.variables["batch"] == "float32 [16, 4] on cpu, min 1, max 1, mean 1"
    assert inner.variables["scale"] == "float32 [4] on cpu: 0, 0, 0, 0"
    assert outer.variables["worker"] == "Worker(rank=1, world_size=2, device='cpu')"
    assert (outer.variables["bomb"], outer.variables["never"]) == ("a Raises", "a NeverEnds")
    assert outer.variables["password"] == LEFT_OUT
    assert "scale = float32 [4] on cpu: 0, 0, 0, 0" in str(error)
    assert "hunter2" not in str(error.frames) + str(error) + summary.as_html(error.run)
    page = summary.as_html(error.run)
    assert "<details><summary>variables when it failed</summary>" in page
    assert page.count("rank 1: ") >= 2
