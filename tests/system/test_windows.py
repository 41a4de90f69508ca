"""What `labkit.system.windows` does by itself, tried on whatever system this is."""

from __future__ import annotations

import codecs
import faulthandler
import importlib.util
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import labkit
from labkit import system
from labkit.failures.exit_codes import in_words, is_exit
from labkit.failures.facts import NATIVE_SOURCE
from labkit.failures.stacks import is_complete, parse
from labkit.monitor.follower import CRASHED
from labkit.protocol import modules
from labkit.protocol.text import BLOCKS, writable
from labkit.system.windows import Windows


def write_and_end(output):
    host = Windows()
    host.redirect_output(output)
    print("by Python: é")
    os.write(2, b"by native code\n")
    sys.stdout.write("without an end of line\n")
    sys.stdout.flush()
    faulthandler.enable()
    os.abort()


@pytest.mark.spawns
def test_what_a_rank_prints_reaches_the_notebook_to_its_last_word():
    host = Windows()
    reader, writer = host.open_output()
    process = multiprocessing.get_context("spawn").Process(target=write_and_end, args=(writer,))
    process.start()
    found = b""
    while (ready := host.wait([reader, process.sentinel], 60)) != [process.sentinel]:
        assert ready, "nothing within a minute"
        found += host.read_output(reader, 16)
    process.join()
    reader.close()
    reader.close()
    assert not Path(reader.path).exists()
    said = found.decode().replace("\r\n", "\n")
    assert said.startswith("by Python: é\nby native code\nwithout an end of line\n")
    assert "Fatal Python error: Aborted" in said
    assert "in write_and_end" in said


ASKED = """
import threading
from labkit.system.base import main_stack

def works():
    thread = threading.Thread(target=lambda: print(main_stack(), end=""))
    thread.start()
    thread.join()

works()
"""


def test_what_has_come_of_output_is_read_in_blocks():
    host = Windows()
    reader, writer = host.open_output()
    with writer.open() as end:
        end.write(b"x" * 10)
    assert host.output_blocks(reader, 4) == [4, 4, 2]
    assert [host.read_output(reader, size) for size in (4, 4, 2)] == [b"xxxx", b"xxxx", b"xx"]
    assert not host.has_come(reader)
    assert host.wait([reader], 0.0) == []
    reader.close()


@pytest.mark.spawns
def test_a_threads_answer_reads_as_faulthandlers_does():
    """In a process that begins as a rank does."""
    said = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True).stdout
    assert is_complete(said)
    assert [frame.function for frame in parse(said)][-2:] == ["works", "<module>"]


@pytest.mark.parametrize(
    "target",
    [lambda: labkit.Slurm(), lambda: labkit.Torchrun(), lambda: labkit.Ray(), lambda: labkit.Here()],
    ids=["Slurm", "Torchrun", "Ray", "Here"],
)
def test_what_needs_posix_calls_is_refused_before_anything_starts(target, monkeypatch, tmp_path):
    if target.__code__.co_names[1] == "Ray":
        pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(tmp_path)
    real, windows = system.host, Windows()
    monkeypatch.setattr(system, "host", windows)
    on = target()
    with pytest.raises(OSError, match=r"^labkit\.\w+(\(\))? cannot be used on Windows: .*use WSL2"):
        labkit.launch(print, on=on, live=False)
    # Modules that were imported meanwhile have taken it for theirs.
    for module in [module for name, module in sys.modules.items() if name.startswith("labkit.")]:
        if vars(module).get("host") is windows:
            module.host = real
    assert list(tmp_path.iterdir()) == []


def test_exit_codes_of_windows_are_put_into_words(monkeypatch):
    monkeypatch.setattr("labkit.failures.exit_codes.host", Windows())
    assert in_words(0xC0000005) == "exit code 3221225477: access violation"
    assert in_words(3) == "exit code 3"


def test_curves_and_arrows_are_written_in_whatever_the_stream_carries():
    assert writable(f"loss {BLOCKS} 0.1 … 2 → é", "cp1252") == r"loss _.-~=+*# 0.1 … 2 \u2192 é"
    assert writable(BLOCKS, "utf-8") == BLOCKS


def test_a_crash_there_is_no_call_of_exit_and_its_stack_is_told_from_other_output(monkeypatch):
    monkeypatch.setattr("labkit.failures.exit_codes.host", Windows())
    assert [is_exit(code) for code in (3, -11, 0xC0000005)] == [True, False, False]
    said = "epoch 1\nWindows fatal exception: access violation\n\nCurrent thread 0x1 (most recent call first):\n"
    assert CRASHED.split(said, maxsplit=1) == ["epoch 1\n", said.partition("exception: ")[2]]


def test_a_path_is_given_to_pytorchs_store_as_its_code_page_has_it():
    def find(name):
        return codecs.lookup("cp1252") if name == "mbcs" else None

    codecs.register(find)
    try:
        assert Windows().native_path("C:\\Temp\\store") == "C:\\Temp\\store"
        assert Windows().native_path("C:\\Users\\José\\store") == "C:\\Users\\José\\store".encode("cp1252")
        with pytest.raises(OSError, match="no '日'.*Set TEMP to a folder"):
            Windows().native_path("C:\\Users\\日本\\store")
    finally:
        codecs.unregister(find)


def test_the_store_takes_a_path_as_bytes(tmp_path):
    store = dist.FileStore(os.fsencode(tmp_path / "store"), 1)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_where_torch_waits_is_found_with_that_systems_separators(monkeypatch):
    spec = importlib.util.find_spec("labkit.failures.stacks")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(os, "sep", "\\")
    spec.loader.exec_module(module)
    assert module.COLLECTIVES[0] == "\\torch\\distributed\\"
    assert not any("/" in place for place in module.COLLECTIVES + module.FILES)


@pytest.mark.parametrize("where", ["/home/x/gloo/pair.cc:81", r"..\third_party\gloo\pair.cc:81", r"C:\gloo\pair.cc:81"])
def test_where_a_library_was_built_stands_in_no_summary(where):
    assert NATIVE_SOURCE.sub("", f"RuntimeError: [{where}] Connection closed") == "RuntimeError: Connection closed"


def test_the_environments_own_folder_is_no_library():
    assert f"{sys.prefix}{os.sep}" not in modules.LIBRARIES
    assert any(folder.startswith(f"{sys.prefix}{os.sep}") for folder in modules.LIBRARIES)


class Gone:
    """A pipe as Windows has it once its writer has ended."""

    def poll(self):
        raise BrokenPipeError(109, "The pipe has been ended")

    def recv_bytes(self):
        raise EOFError


def test_the_end_of_a_pipe_is_an_end_there_too():
    assert Windows().has_come(Gone())
    assert Windows().read_output(Gone(), 1) == b""
