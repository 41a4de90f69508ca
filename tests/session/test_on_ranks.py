"""What a rank has of the notebook: settings, modules, what it says of what it has not."""

from __future__ import annotations

import builtins
import decimal
import importlib
import io
import locale
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import types
import warnings
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import labkit.rank.on_ranks
from labkit.protocol import module_archives, modules
from labkit.protocol.definitions import Definitions
from labkit.protocol.job import Cell
from labkit.protocol.modules import Search
from labkit.rank import hints, isolation, settings
from labkit.rank import import_effects as imports
from tests.support.fake_engine import A_JOB
from tests.support.repository import ROOT

SESSION_RANKS = 1

# Settings


@pytest.fixture
def as_before():
    """Put back what a test changes of this process."""
    before = isolation.capture()
    yield
    isolation.restore(before)


def default_device():
    torch.set_default_device("meta")


CHANGES = {
    "default type": lambda: torch.set_default_dtype(torch.float64),
    "default device": default_device,
    "gradients": lambda: torch.set_grad_enabled(False),
    "anomaly detection": lambda: torch.set_anomaly_enabled(True),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "uninitialized memory": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "matrix product precision": lambda: torch.set_float32_matmul_precision("high"),
    "cudnn.enabled": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "cudnn.allow_tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "cuda.matmul.allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "flash attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "memory-efficient attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "plain attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "printed tensors": lambda: torch.set_printoptions(precision=2),
    "warning filters": lambda: warnings.simplefilter("ignore"),
    "recursion limit": lambda: sys.setrecursionlimit(2345),
    "switch interval": lambda: sys.setswitchinterval(0.125),
    "threads of backward passes": lambda: torch.autograd.set_multithreading_enabled(False),
    "file mode mask": lambda: os.umask(0o037),
    "sockets' time limit": lambda: socket.setdefaulttimeout(17),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "decimal numbers": lambda: setattr(decimal.getcontext(), "prec", 5),
    "NumPy's floating-point errors": lambda: numpy.seterr(all="raise"),
    "logging": lambda: logging.getLogger().setLevel(logging.INFO),
}


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", CHANGES)
def test_a_rank_takes_over_a_setting_of_the_notebook(name):
    fresh = isolation.capture()
    CHANGES[name]()
    of_notebook = settings.of_this_process()
    isolation.restore(fresh)
    assert settings.of_this_process()[name] != of_notebook[name], "as in a new process"
    settings.take_over(of_notebook)
    assert settings.of_this_process()[name] == of_notebook[name]


@pytest.mark.usefixtures("as_before")
def test_a_setting_that_this_pytorch_cannot_read_or_set_stays_as_it_is():
    there = settings.of_this_process()
    settings.take_over({"of a newer PyTorch": 1, "matrix product precision": "no such", "default type": torch.int8})
    assert settings.of_this_process() == there


@pytest.mark.usefixtures("as_before")
def test_what_a_job_lets_torch_load_make_goes_with_it_and_what_libraries_do_stays(monkeypatch):
    """A library does so once, as it is imported; its names are not sent, for that would have a rank import it."""
    fresh = isolation.capture()
    monkeypatch.setattr(Rich, "__module__", "__main__")
    torch.serialization.add_safe_globals([Rich, numpy.ndarray])
    assert settings.of_this_process()[settings.CLASSES] == [("__main__", "Rich")]
    isolation.restore(fresh)
    assert numpy.ndarray in torch.serialization.get_safe_globals()
    assert Rich not in torch.serialization.get_safe_globals()


@pytest.mark.usefixtures("as_before")
def test_a_category_of_warnings_that_the_rank_has_not_loaded_is_not_loaded():
    odd, plain = ("no_such_library", "Odd"), ("builtins", "Warning")
    settings.take_over({"warning filters": [("ignore", None, odd, None, 0), ("error", None, plain, None, 0)]})
    assert warnings.filters[:] == [("error", None, Warning, None, 0)]


class Rich(logging.Handler):
    pass


@pytest.mark.usefixtures("as_before")
def test_logging_that_was_set_up_in_the_notebook_writes_on_a_rank(tmp_path, capsys):
    fresh = isolation.capture()
    root, loss = logging.getLogger(), logging.getLogger("loss")
    root.handlers[:] = [logging.StreamHandler(sys.stdout), Rich(), logging.FileHandler(tmp_path / "log")]
    root.handlers[0].setFormatter(logging.Formatter("{levelname}: {message}", style="{"))
    root.setLevel(logging.INFO)
    loss.setLevel(logging.ERROR)
    of_notebook = settings.of_this_process()
    for handler in root.handlers:
        handler.close()
    isolation.restore(fresh)
    root.handlers.clear()
    settings.take_over(of_notebook)
    settings.take_over(of_notebook)  # a second launch
    logging.info("step 1")
    loss.warning("not to be seen")
    printed = capsys.readouterr()
    assert printed.out == "INFO: step 1\n"
    assert printed.err == "step 1\n", "of a handler that only the notebook has, as plain text"
    assert (tmp_path / "log").read_text() == "step 1\n"
    for handler in root.handlers:
        handler.close()


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
    modules.of_reader()


def imported_anew(name, search):
    """What a new process finds under a name, with the notebook's search."""
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    search.take_over()
    return importlib.import_module(name)


@pytest.mark.parametrize("entry", ["lib", "./lib", os.path.join("..", "a", "lib")])
def test_a_relative_entry_of_the_path_means_the_folder_in_which_the_notebook_found_a_module(folder, entry, monkeypatch):
    sys.path.insert(0, entry)
    assert importlib.import_module("settings_of_lib").name == "mine"
    monkeypatch.chdir(folder / "b")
    search = Search.here(True, modules.of_reader())
    assert all(map(os.path.isabs, search.path))
    assert imported_anew("settings_of_lib", search).name == "mine"


def test_a_module_that_was_found_in_an_earlier_working_folder_is_found_there(folder, monkeypatch):
    sys.path.insert(0, "")
    monkeypatch.chdir("lib")
    assert importlib.import_module("settings_of_lib").name == "mine"
    monkeypatch.chdir(folder / "b" / "lib")
    search = Search.here(True, modules.of_reader())
    assert search.files == {"settings_of_lib": str(folder / "a" / "lib" / "settings_of_lib.py")}
    assert imported_anew("settings_of_lib", search).name == "mine"


def test_a_module_that_was_loaded_from_a_path_is_found_by_its_name(folder):
    spec = importlib.util.spec_from_file_location("loaded", "lib/settings_of_lib.py")
    sys.modules["loaded"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["loaded"])
    search = Search.here(True, modules.of_reader())
    assert imported_anew("loaded", search).name == "mine"
    search._replace(files={}).take_over()
    sys.modules.pop("loaded")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("loaded")


def test_on_another_machine_the_notebooks_path_comes_after_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/there"])
    Search(["/here", "/there"], {}, is_for_here=False).take_over()
    assert sys.path == ["/there", "/here"]


CARRIED = """
import pickle, sys
from labkit.rank import carried_modules
carried_modules.have(pickle.load(open(sys.argv[1], "rb")))
import alone, my_package.inner
print(alone.NAME, my_package.inner.table(), my_package.__file__)
"""


@pytest.mark.spawns
def test_a_rank_without_the_notebooks_files_has_its_modules_all_the_same(folder):
    """Also a module of a package that the notebook itself has not imported, and the data beside it."""
    files = {
        "alone.py": "NAME = 'alone'",
        "my_package/__init__.py": "",
        "my_package/inner.py": "from importlib import resources\n"
        "def table():\n    return (resources.files('my_package') / 'data/table.csv').read_text()",
        "my_package/data/table.csv": "1,2",
        "my_package/.git/large": "",
    }
    for name, text in files.items():
        (folder / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "b" / name).write_text(text)
    sys.path.insert(0, str(folder / "b"))
    for name in ("alone", "my_package"):
        importlib.import_module(name)
    archives = {
        name: archive
        for name, archive in module_archives.pack(modules.of_reader()).items()
        if name in ("alone", "my_package")
    }
    with zipfile.ZipFile(io.BytesIO(archives["my_package"])) as archive:
        assert sorted(archive.namelist()) == sorted(
            name for name in files if name.startswith("my_package/") and ".g" not in name
        )
    (folder / "sent").write_bytes(pickle.dumps(archives))
    shutil.rmtree(folder / "b")
    done = subprocess.run(
        [sys.executable, "-c", CARRIED, str(folder / "sent")],
        cwd=folder / "a",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("alone 1,2 "), done.stderr
    assert not Path(done.stdout.split()[-1]).exists(), "it has gone with the process"


def test_of_a_package_that_is_too_large_the_sources_travel_or_nothing(folder, monkeypatch):
    (folder / "a" / "lib" / "heavy").mkdir()
    (folder / "a" / "lib" / "heavy" / "__init__.py").write_text("X = 1\n")
    (folder / "a" / "lib" / "heavy" / "weights").write_bytes(bytes(100))
    sys.path.insert(0, str(folder / "a" / "lib"))
    importlib.import_module("heavy")
    monkeypatch.setattr(module_archives, "MOST_BYTES", 50)
    with zipfile.ZipFile(io.BytesIO(module_archives.pack(modules.of_reader())["heavy"])) as archive:
        assert archive.namelist() == ["heavy/__init__.py"]
    monkeypatch.setattr(module_archives, "MOST_BYTES", 5)
    assert "heavy" not in module_archives.pack(modules.of_reader())


def test_a_package_is_packed_again_only_once_it_has_changed(folder, monkeypatch):
    inner = folder / "a" / "lib" / "often" / "inner.py"
    inner.parent.mkdir()
    (inner.parent / "__init__.py").touch()
    inner.write_text("X = 1\n")
    sys.path.insert(0, str(folder / "a" / "lib"))
    importlib.import_module("often")
    packed = []
    zip_ = module_archives._zip
    monkeypatch.setattr(module_archives, "_zip", lambda files: packed.append([*files.values()]) or zip_(files))
    first, second = (module_archives.pack(modules.of_reader())["often"] for _ in range(2))
    assert first is second
    inner.write_text("X = 12\n")
    assert module_archives.pack(modules.of_reader())["often"] != first
    inner.unlink()
    module_archives.pack(modules.of_reader())
    assert [len(files) for files in packed if files[0].startswith("often/")] == [2, 2, 1]


WITH_A_NEWER = """
import io, sys, zipfile
from labkit.rank import carried_modules
def archive(text):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        zipped.writestr("of_cells.py", text)
    return made.getvalue()
carried_modules.have({"of_cells": archive("X = 1")})
carried_modules.have({"of_cells": archive("X = 22")})
path = list(sys.path)
sys.path.pop()  # as what a cell does to its path is undone
carried_modules.have({})
assert sys.path == path
import of_cells
print(of_cells.X)
"""


@pytest.mark.spawns
def test_reserved_ranks_keep_what_came_and_take_what_is_newer():
    command = [sys.executable, "-c", WITH_A_NEWER]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "22\n", done.stderr


def test_what_is_sent_of_modules_names_none_of_a_library():
    assert "tests.session.test_on_ranks" in modules.of_reader()
    assert not {"torch", "os", "labkit", "labkit.launcher"} & modules.of_reader().keys()


def test_a_file_that_was_edited_is_named_until_it_is_reloaded(folder):
    sys.path.insert(0, "lib")
    found = importlib.import_module("settings_of_lib")
    file = folder / "a" / "lib" / "settings_of_lib.py"
    assert modules.edited(modules.of_reader()) == []
    file.write_text("name = 'edited'\n")
    assert modules.edited(modules.of_reader()) == [str(file)]
    assert modules.edited(modules.of_reader()) == [], "once is enough"
    importlib.reload(found)
    assert modules.edited(modules.of_reader()) == []
    file.write_text("name = 'edited again'\n")
    assert modules.edited(modules.of_reader()) == [str(file)]


def test_a_file_that_was_edited_before_anybody_looked_is_named(folder, monkeypatch):
    sys.path.insert(0, "lib")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    importlib.import_module("settings_of_lib")
    file = folder / "a" / "lib" / "settings_of_lib.py"
    file.write_text("name = 'edited'\n")
    assert modules.edited(modules.of_reader()) == [str(file)], "Python has kept when it compiled which"


# On reserved ranks


@pytest.fixture
def watched():
    """Imports of this process are watched, as those of a reserved rank are."""
    import importlib._bootstrap as bootstrap

    load = bootstrap._load_unlocked
    imports.watch(isolation._SETTINGS)
    yield
    bootstrap._load_unlocked = load
    imports._changes.clear()


EFFECTS = """
import builtins
import decimal
import locale
import logging
import os
import sys
import warnings

import torch

logging.getLogger("of_effects").addHandler(logging.StreamHandler())
logging.getLogger("of_effects").setLevel(logging.INFO)
os.environ["LABKIT_OF_EFFECTS"] = "1"
sys.path.append("/of/effects")
warnings.filterwarnings("ignore", "of effects")
torch.set_default_dtype(torch.float64)
builtins.of_effects = print
"""


def effects():
    return (
        len(logging.getLogger("of_effects").handlers),
        logging.getLogger("of_effects").level,
        os.environ.get("LABKIT_OF_EFFECTS"),
        "/of/effects" in sys.path,
        any(text is not None and text.pattern == "of effects" for _, text, *_ in warnings.filters),
        torch.get_default_dtype(),
        hasattr(builtins, "of_effects"),
    )


@pytest.mark.usefixtures("as_before", "watched")
def test_what_a_module_changes_when_it_is_imported_stays_for_the_jobs_after_it(folder, monkeypatch):
    (folder / "a" / "with_effects.py").write_text(EFFECTS)
    monkeypatch.syspath_prepend(folder / "a")
    fresh, before = isolation.capture(), effects()
    with isolation.isolated(fresh):
        import with_effects  # noqa: F401

        during = effects()
    assert effects() == before
    with isolation.isolated(fresh):  # the next job, which finds it imported
        assert effects() == before
        imports.do_again(isolation._SETTINGS)
        assert effects() == during
        imports.do_again(isolation._SETTINGS)
        assert effects() == during
    sys.modules.pop("with_effects")


@pytest.mark.usefixtures("as_before", "watched")
def test_what_a_function_changes_does_not_stay():
    fresh = isolation.capture()
    with isolation.isolated(fresh):
        exec(EFFECTS)
        assert effects() != (0, 0, None, False, False, torch.float32, False)
    with isolation.isolated(fresh):
        imports.do_again(isolation._SETTINGS)
        assert effects() == (0, 0, None, False, False, torch.float32, False)


@pytest.mark.usefixtures("watched")
def test_a_module_that_was_edited_is_imported_anew_with_those_that_use_it(folder, monkeypatch):
    lib = folder / "a" / "lib"
    (lib / "uses_it.py").write_text("from settings_of_lib import name\n")
    (lib / "does_not.py").write_text("made = object()\n")
    (lib / "settings_of_lib.py").write_text("class Box:\n    size = 1\n\n\nname = Box\n")
    monkeypatch.syspath_prepend(lib)
    import does_not
    import uses_it

    imports.forget_edited()
    assert sys.modules["uses_it"] is uses_it
    (lib / "settings_of_lib.py").write_text("class Box:\n    size = 2\n\n\nname = Box\n")  # within a second, as long
    imports.forget_edited()
    assert importlib.import_module("uses_it").name.size == 2
    assert importlib.import_module("does_not") is does_not
    for name in ("uses_it", "does_not"):
        sys.modules.pop(name)


# What is said


def a_job(cells=(), left_behind=()):
    return A_JOB._replace(imported=modules.imported(cells), definitions=Definitions({}, dict(left_behind)))


CELLS = [
    "%matplotlib inline\nimport gymnasium_robotics\nimport os, matplotlib.pyplot as plt",
    "!ls\nfrom a.b import *",
    "(",
]


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'Sequential' object has no attribute 'to_distributed'"),
        KeyError("FetchReach-v2"),
        RuntimeError("Unknown model (of_mine)"),
        type("NameNotFound", (Exception,), {})("Environment `Fetch` doesn't exist."),
    ],
)
def test_a_failure_names_what_the_notebook_has_imported_and_the_rank_has_not(error):
    hints.add(error, a_job(CELLS))
    (note,) = error.__notes__
    assert note.startswith("labkit: the notebook has imported gymnasium_robotics, a.b, and this rank has not")


def test_a_tensor_on_another_device_is_explained():
    """As PyTorch itself raises it, on a machine without a GPU, too."""
    if torch.cuda.is_available():
        with pytest.raises(RuntimeError) as raised:
            torch.ones(1) + torch.ones(2, device="cuda")
    else:
        with pytest.raises((RuntimeError, AssertionError)) as raised:
            torch.ones(1).cuda()
    hints.add(raised.value, a_job())
    assert "by .to(worker.device)" in raised.value.__notes__[0]


def test_other_failures_say_nothing_of_imports():
    for error, cells in ((ValueError("bad batch"), CELLS), (KeyError("x"), ["import os, torch, labkit"])):
        hints.add(error, a_job(cells))
        assert not hasattr(error, "__notes__")


def test_a_name_of_data_that_stayed_in_the_notebook_is_explained():
    error = NameError("name 'table' is not defined", name="table")
    hints.add(error, a_job(left_behind={"table": "Tensor"}.items()))
    assert error.__notes__[0].startswith("labkit: table is a Tensor in the notebook")


def test_shared_memory_that_cannot_be_shared_is_said(monkeypatch):
    from labkit.protocol import pickling

    net = nn.Linear(10, 10).share_memory()
    with pytest.warns(UserWarning, match="print uses tensors in shared memory, but these ranks"):
        pickling.pack_call(print, (net,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickling.pack_call(print, (net,), {}, shares=True)
        pickling.pack_call(print, (nn.Linear(10, 10),), {})


# On real ranks


@pytest.mark.spawns
def test_reserved_ranks_have_a_module_as_it_was_edited(ranks, folder, monkeypatch):
    file = folder / "a" / "edited_module.py"
    file.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(folder / "a")

    def value(worker):
        import edited_module

        return edited_module.VALUE

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


@pytest.mark.spawns
def test_what_the_notebook_has_imported_for_its_effect_is_named_where_a_rank_fails_for_it(ranks, monkeypatch):
    from labkit.ui import kernel

    cells = {"<cell>": Cell("Cell In[1]", "import registers_things")}
    monkeypatch.setattr(kernel, "cells", lambda pickled=None: cells if pickled is None else {})

    def asks(worker):
        raise KeyError("thing")

    with pytest.raises(labkit.WorkerFailed, match="the notebook has imported registers_things, and this rank has not"):
        labkit.launch(asks, on=ranks, live=False)
