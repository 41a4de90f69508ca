"""Who writes an argument or a function by a former name is told the one that it has now."""

from __future__ import annotations

import re

import pytest
from IPython.core.error import UsageError

import labkit
from labkit.protocol.former_names import FORMER
from labkit.session.magic import RanksMagics


def _function(worker):
    raise AssertionError("nothing is launched")


def _takes_anything(worker, **options):
    raise AssertionError("nothing is launched")


def _cell(**given):
    ((name, value),) = given.items()
    RanksMagics(None).run_cell(f"2 {name} {value}", "1")


def _modules_name(module):
    return lambda **given: getattr(module, *given)


CALLS = {
    "launch": lambda **given: labkit.launch(_function, **given),
    "compare": lambda **given: labkit.compare(a=_function, **given),
    "Session.run": lambda **given: labkit.Session.run(None, "1", **given),
    "Session.values": lambda **given: labkit.Session.values(None, "1", **given),
    "%%ranks": _cell,
    "Torchrun": labkit.Torchrun,
    "labkit.engines.standby": _modules_name(labkit.standby),
    "labkit.profiling": _modules_name(labkit.profiling),
    "labkit.scaling": _modules_name(labkit.scaling),
}


def test_each_place_with_former_names_is_tried():
    assert CALLS.keys() == FORMER.keys()


@pytest.mark.parametrize(
    ("where", "former", "now"), [(w, f, n) for w, names in FORMER.items() for f, n in names.items()]
)
def test_a_former_name_is_refused_with_the_new_one(where, former, now):
    with pytest.raises(
        (TypeError, AttributeError, UsageError), match=re.escape(f"{where} has no {former}: it is called")
    ):
        CALLS[where](**{former: 3})


@pytest.mark.parametrize("function", [_takes_anything, print])
def test_it_does_not_go_to_a_function_that_takes_anything(function):
    with pytest.raises(TypeError, match="launch has no timeout_s: it is called stall_s now"):
        labkit.launch(function, timeout_s=3)
    with pytest.raises(TypeError, match="compare has no name: it is called metric now"):
        labkit.compare(a=_takes_anything, name="accuracy")


def test_it_does_for_a_script_too(tmp_path):
    for run in (labkit.run_script, labkit.run_module):
        with pytest.raises(TypeError, match="launch has no timeout_s: it is called stall_s now"):
            run("train.py", timeout_s=3)


def test_of_a_function_that_has_such_a_parameter_itself_it_is_no_former_name():
    run = labkit.launch(lambda worker, timeout_s: timeout_s, timeout_s=3, on=labkit.Here(), live=False)
    assert run.results == [3]
    run = labkit.launch(lambda worker, **all: all, kwargs={"timeout_s": 4}, on=labkit.Here(), live=False)
    assert run.results == [{"timeout_s": 4}]


def test_a_name_that_never_was_is_refused_as_python_does():
    with pytest.raises(TypeError, match=re.escape("Torchrun() got an unexpected keyword argument 'node'")):
        labkit.Torchrun(node=2)
    with pytest.raises(TypeError, match=re.escape("Session.run() got an unexpected keyword argument 'stall'")):
        labkit.Session.run(None, "1", stall=2)


def test_what_torchrun_and_submitit_call_an_argument_of_slurm_is_refused_with_its_name():
    for name, now in {
        "nproc_per_node": "ranks_per_node",
        "tasks_per_node": "ranks_per_node",
        "nnodes": "nodes",
    }.items():
        with pytest.raises(TypeError, match=f"Slurm has no {name}: it is called {now} here"):
            labkit.Slurm(**{name: 2})
