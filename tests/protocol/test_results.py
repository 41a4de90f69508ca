"""What ranks return that the notebook cannot load: it says why, and loads it later."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from labkit.protocol.events import Exit, Result
from labkit.protocol.packing import pack
from labkit.ui import summary
from labkit.ui.lines import Lines
from tests.conftest import shared_session
from tests.ui.test_view import started


def of_a_gone_module(monkeypatch):
    """A result whose class is in a module that was there for the rank, and is not here."""
    module = types.ModuleType("only_on_the_ranks")
    module.__file__ = "only_on_the_ranks.py"  # without a file it would come along
    kept = type("Kept", (), {"__module__": module.__name__})
    module.Kept = kept
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blob = pack([kept(), torch.ones(3)])
    monkeypatch.delitem(sys.modules, module.__name__)
    return blob, module


def returned(*blobs):
    """A run whose ranks have returned these, and ended well."""
    run = started(len(blobs), steps=3)
    for rank, blob in enumerate(blobs):
        run._follower.take(Result(rank, blob))
        run._follower.take(Exit(rank, 0))
    run._follower.settle()
    return run


def test_a_run_whose_result_cannot_be_loaded_is_finished_says_why_and_loads_it_later(monkeypatch, capsys):
    blob, module = of_a_gone_module(monkeypatch)
    run = returned(pack("well"), blob)
    assert (run.status, run.error, run.returned, run.states) == ("finished", None, [True] * 2, ["finished"] * 2)
    whole, unloaded = run.results
    assert whole == "well"
    assert isinstance(unloaded, ModuleNotFoundError)
    line = (
        "rank 1's result could not be loaded here: ModuleNotFoundError: No module named 'only_on_the_ranks'. Once the "
        "cause is fixed, run.results[1].load() returns it"
    )
    assert run.warnings == [line]
    assert line in summary.as_text(run)
    assert line in summary.as_html(run).replace("&#x27;", "'")
    Lines(run, in_notebook=False, wait=True).run()
    assert line in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError):
        unloaded.load()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found, tensor = unloaded.load()
    assert type(found) is module.Kept
    assert torch.equal(tensor, torch.ones(3))


def exits_the_notebook():
    raise SystemExit("a script, imported")


class Exits:
    def __reduce__(self):
        return exits_the_notebook, ()


def test_a_result_whose_module_ends_the_process_when_imported_ends_nothing():
    run = returned(pack(Exits()))
    assert run.status == "finished"
    assert isinstance(run.results[0], SystemExit)


@pytest.mark.spawns
def test_a_class_that_only_the_ranks_have_names_its_rank_in_values():
    with shared_session(2) as ranks:
        ranks.run(
            "import sys, types; sys.modules['mine'] = types.ModuleType('mine'); "
            "sys.modules['mine'].__file__ = 'mine.py'"
        )
        ranks.run("class Kept: pass\nKept.__module__ = 'mine'; sys.modules['mine'].Kept = Kept")
        with pytest.raises(ModuleNotFoundError) as raised:
            ranks.values("Kept()")
        assert raised.value.__notes__ == ["raised as rank 0's value was loaded in the notebook"]
