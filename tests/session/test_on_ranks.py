"""What a rank has of the notebook: settings, modules, what it says of what it has not."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
import warnings

import numpy
import pytest
import torch
from torch import nn

import labkit.rank.on_ranks
from labkit.protocol import modules, packing
from labkit.rank import settings

SESSION_RANKS = 1

# Settings


@pytest.fixture
def as_before():
    """Put back what a test changes of this process."""
    before, levels = settings.of_this_process(), {name: one.level for name, one in loggers().items()}
    handlers = logging.root.handlers[:]
    yield
    settings.apply(before)
    logging.root.handlers[:] = handlers
    for name, one in loggers().items():
        one.setLevel(levels.get(name, logging.NOTSET))


def loggers():
    named = logging.root.manager.loggerDict.items()
    return {"": logging.root, **{name: one for name, one in named if isinstance(one, logging.Logger)}}


CHANGES = {
    "default type": lambda: torch.set_default_dtype(torch.float64),
    "anomaly detection": lambda: torch.set_anomaly_enabled(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "matrix product precision": lambda: torch.set_float32_matmul_precision("high"),
    "cudnn.enabled": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "cuda.matmul.allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "printed tensors": lambda: torch.set_printoptions(precision=2),
    "warning filters": lambda: warnings.simplefilter("ignore"),
    "printed arrays": lambda: numpy.set_printoptions(precision=2),
    "logging levels": lambda: logging.getLogger("quiet").setLevel(logging.ERROR),
}


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", CHANGES)
def test_a_rank_takes_over_a_setting_of_the_notebook(name):
    fresh = settings.of_this_process()
    CHANGES[name]()
    of_notebook = settings.of_this_process()
    settings.apply(fresh)
    logging.getLogger("quiet").setLevel(logging.NOTSET)
    assert settings.of_this_process()[name] != of_notebook[name], "as in a new process"
    settings.apply(of_notebook)
    assert settings.of_this_process()[name] == of_notebook[name]


@pytest.mark.usefixtures("as_before")
def test_a_setting_that_this_pytorch_cannot_read_or_set_stays_as_it_is():
    there = settings.of_this_process()
    settings.apply({"of a newer PyTorch": 1, "matrix product precision": "no such", "default type": torch.int8})
    assert settings.of_this_process() == there


@pytest.mark.usefixtures("as_before")
def test_a_category_of_warnings_that_the_rank_has_not_loaded_is_not_loaded():
    odd, plain = ("no_such_library", "Odd"), ("builtins", "Warning")
    settings.apply({"warning filters": [("ignore", None, odd, None, 0), ("error", None, plain, None, 0)]})
    assert warnings.filters[:] == [("error", None, Warning, None, 0)]


@pytest.mark.usefixtures("as_before")
def test_levels_of_loggers_are_the_notebooks_and_lines_go_to_stderr(capsys):
    logging.root.handlers[:] = []
    settings.apply({"logging levels": {"": logging.INFO, "loss": logging.ERROR}})
    logging.info("step 1")
    logging.getLogger("loss").warning("not to be seen")
    assert capsys.readouterr().err == "INFO:root:step 1\n"


def test_every_setting_is_tried():
    assert CHANGES.keys() == settings.ALL.keys()
    assert len(settings.ALL) == 13


# Modules


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two folders of modules, `lib` in both."""
    for name, where in (("mine", "a"), ("another", "b")):
        (tmp_path / where / "lib").mkdir(parents=True)
        (tmp_path / where / "lib" / "settings_of_lib.py").write_text(f"name = {name!r}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path_importer_cache", {})
    monkeypatch.chdir(tmp_path / "a")
    yield tmp_path
    for name in ("settings_of_lib", "loaded", "alone", "my_package", "heavy"):
        sys.modules.pop(name, None)


def imported_anew(name, path):
    """What a new process finds under a name, with the notebook's path."""
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    sys.path[:] = path
    return importlib.import_module(name)


@pytest.mark.parametrize("entry", ["lib", "./lib", os.path.join("..", "a", "lib")])
def test_a_relative_entry_of_the_path_means_the_folder_in_which_the_notebook_found_a_module(folder, entry, monkeypatch):
    sys.path.insert(0, entry)
    assert importlib.import_module("settings_of_lib").name == "mine"
    monkeypatch.chdir(folder / "b")
    path = modules.search_path()
    assert all(map(os.path.isabs, path))
    assert modules.not_found_because("settings_of_lib", path) == ""
    assert imported_anew("settings_of_lib", path).name == "mine"


def test_a_module_that_was_found_in_an_earlier_working_folder_is_found_there_or_refused(folder, monkeypatch):
    sys.path.insert(0, "")
    monkeypatch.chdir("lib")
    mine = importlib.import_module("settings_of_lib")
    monkeypatch.chdir(folder)
    assert imported_anew("settings_of_lib", modules.search_path()).name == "mine"
    sys.modules["settings_of_lib"] = mine
    sys.path[:] = ["", *sys.path[:-1]]
    monkeypatch.chdir(folder / "b" / "lib")
    with pytest.raises(ValueError, match="'settings_of_lib' was loaded from .*, and a rank would import .*"):
        packing.pack_call(lambda worker: mine.name, (), {})


def test_a_module_that_was_loaded_from_a_path_is_found_by_its_files_name_or_refused(folder):
    for name in ("settings_of_lib", "loaded"):
        spec = importlib.util.spec_from_file_location(name, "lib/settings_of_lib.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    found, loaded = sys.modules["settings_of_lib"], sys.modules["loaded"]
    packing.pack_call(lambda worker: found.name, (), {})
    with pytest.raises(ValueError, match="'loaded' was loaded from .*, and a rank would not find it along sys.path"):
        packing.pack_call(lambda worker: loaded.name, (), {})


# What is said


def test_shared_memory_that_cannot_be_shared_is_said(monkeypatch):
    net = nn.Linear(10, 10).share_memory()
    with pytest.warns(UserWarning, match="print uses tensors in shared memory, but these ranks"):
        packing.pack_call(print, (net,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packing.pack_call(print, (net,), {}, shares=True)
        packing.pack_call(print, (nn.Linear(10, 10),), {})


# On real ranks


@pytest.mark.spawns
def test_reserved_ranks_have_a_module_as_it_was_edited_and_so_has_what_imports_it(ranks, folder, monkeypatch):
    file = folder / "a" / "edited_module.py"
    file.write_text("VALUE = 1\n")
    (folder / "a" / "uses_it.py").write_text("from edited_module import VALUE\n")
    monkeypatch.syspath_prepend(folder / "a")

    def value(worker):
        import uses_it

        return uses_it.VALUE

    assert labkit.launch(value, on=ranks, live=False).results == [1]
    file.write_text("VALUE = 200\n")
    assert labkit.launch(value, on=ranks, live=False).results == [200]


@pytest.mark.spawns
def test_a_class_that_was_typed_again_is_the_new_one_on_reserved_ranks(ranks):
    main = types.ModuleType("__main__")
    from labkit.rank.notebook_main import in_place

    with in_place(main):
        for size in (1, 2):
            exec(f"class Box:\n    size = {size}\ndef make(worker):\n    return Box()", vars(main))
            (box,) = labkit.launch(main.make, on=ranks, live=False).results
            assert type(box) is main.Box
            assert box.size == size
