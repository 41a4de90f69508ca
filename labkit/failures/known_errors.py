"""Errors by their text: the page of each message that people search for, recognised where a rank failed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from labkit.failures.evidence import ABORTED
from labkit.failures.facts import NATIVE_SOURCE, RankFacts
from labkit.protocol.events import Failure

# The problem: the same words stand in the log of a healthy program, in an error that was handled, and in a message of
# the user's own.
#
# What does not work: searching a rank's output or its traceback for the words.
#
# What is done: only what ended the rank is read: the exception that it reported and those named as its direct causes
# (not one that was being handled meanwhile), from the exception's type on. If a child process of the rank died, the
# exception says nothing more, and the last error in the rank's output is the child's. A rank without a report is read
# only if it was aborted, and then only what NCCL's log or C++'s `terminate` wrote.
#
# What still fails: an error that was handled and printed just before a child died for another reason; a traceback that
# the user's own message quotes counts as its cause, for that is how a DataLoader and `mp.spawn` report theirs.


TORCH = r"(?:RuntimeError|torch\.[\w.]+|c10::\w+|std::\w+|ProcessGroupNCCL): "
"""The types of what torch raises, in Python or in C++, and its own log of NCCL."""

NCCL = rf"{TORCH}(?:.* raised the following async exception: )?NCCL error"
ABORTED_FOR = r"(?:\[[^\]]*\] ?|NCCL communicator was aborted on rank \d+\. +Original reason for failure was: )*"

LOADING = r"RuntimeError: Error\(s\) in loading state_dict for .*:\s*"
MISSING, UNEXPECTED = r'Missing key\(s\) in state_dict: "', r'Unexpected key\(s\) in state_dict: "'
WRAPPER = r"(module|_orig_mod|_fsdp_wrapped_module)\."
SAVED_WRAPPED = rf"{MISSING}(?!{WRAPPER}).*\s*{UNEXPECTED}{WRAPPER}"
LOADED_WRAPPED = rf"{MISSING}{WRAPPER}.*\s*{UNEXPECTED}(?!{WRAPPER})"
"""A module's keys and a file's, of which one side alone has a wrapper's prefix."""

KNOWN = {
    "nccl_timeout": rf"{TORCH}{ABORTED_FOR}Watchdog caught collective operation timeout",
    "duplicate_gpu": rf"{NCCL}[\s\S]*(?:Duplicate GPU detected ?: rank|Multiple Ranks are using the same GPU)",
    "gpu_out_of_memory": (rf"{TORCH}(?:CUDA|HIP) (?:error: )?out of memory|{NCCL}[\s\S]*Cuda failure.*out of memory"),
    "nccl_system_error": rf"{NCCL}.*unhandled system error",
    "unused_parameters": (
        rf"{TORCH}(?:Expected to have finished reduction in the prior iteration|Your training graph has changed)"
    ),
    "marked_ready_twice": rf"{TORCH}Expected to mark a variable ready only once",
    "shared_memory": (
        rf"{TORCH}(?:DataLoader worker \(pid \d+\) is killed by signal: Bus error|unable to (?:allocate shared memory"
        r"|write to file </torch_))|ERROR: Unexpected bus error encountered in worker|"
        r"OSError: \[Errno 28\] .*(?:/dev/shm|/pymp-)"
    ),
    "too_many_open_files": (
        rf"OSError: \[Errno 24\]|{TORCH}(?:Too many open|received 0 items|unable to .*: Too many open files \(24\))"
    ),
    "address_in_use": (
        rf"(?:OSError: .*|zmq\.error\.ZMQError: |{TORCH}(?:(?:The server socket has|\[enforce) fail.*)?)"
        "(?:EADDRINUSE|[Aa]ddress already in use)"
    ),
    "main_guard": r"RuntimeError: \s*An attempt has been made to start a new process before the\s+current process has",
    "device_side_assert": rf"{TORCH}CUDA error: device-side assert triggered",
    "no_backend_for_device": rf"{TORCH}No backend type associated with device type",
    "module_keys": rf"{LOADING}(?:{SAVED_WRAPPED}|{LOADED_WRAPPED})",
    "gpu": rf"{TORCH}(?:CUDA error: |CUDA driver|(?:The|Found no) NVIDIA driver|No CUDA GPUs|cuDNN error)",  # any other
}
"""By page, as `labkit.explain` takes it: a regular expression for the error, from its type on."""

HEADER = "Traceback (most recent call last):\n"

HANDLED = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
"""Between an exception and another one, of which it need not be the cause."""

FRAMES = re.compile(r"(?:[ \t].*\n|\n)*")
"""The indented lines of a traceback, before its exception."""

CHILD_DIED = re.compile(
    r"RuntimeError: DataLoader worker \(pid.*exited unexpectedly|"
    r"torch\.multiprocessing\.spawn\.ProcessExitedException: |"
    r"concurrent\.futures\.process\.BrokenProcessPool: "
)
"""How it is reported that a child process of the rank has died."""

BUS_ERROR = re.compile(r"^ERROR: Unexpected bus error encountered in worker.*", re.MULTILINE)
"""What a DataLoader's process writes as it dies."""

ADDED = re.compile(r" \(then sys\.exit\(| \(in \S+ at ")
"""What is added to an exception's first line in the summary of a failure."""

NCCLS_LOG = re.compile(r"ProcessGroupNCCL\.cpp:\d+\] (.*)")
TERMINATED = re.compile(r"^terminate called after throwing an instance of '(.*)'\n  what\(\):  ([\s\S]*)", re.MULTILINE)
PREFIXES = re.compile(r"(?:\[[^\]]*\] ?|(?:Process group|NCCL) watchdog thread terminated with exception: )*")
"""What is before an error in torch's log: the group, the rank, and who ended the process."""


def recognise(rank: RankFacts) -> str:
    """Return the page of the message that a rank failed with; "" if that is none that is known."""
    errors = _errors(rank)
    return next((page for error in errors for page, known in KNOWN.items() if re.match(known, error)), "")


def _errors(rank: RankFacts) -> Iterator[str]:
    """Yield what ended a rank, from its type on: its exception and that one's causes, or what native code wrote."""
    if rank.failure is not None:
        errors = _reported(rank.failure)
        yield from errors
        if any(CHILD_DIED.match(error) for error in errors):
            yield from _in_tracebacks(rank.output_end)[:1]
            yield from BUS_ERROR.findall(rank.output_end)
    elif rank.exit_code in ABORTED:
        if thrown := TERMINATED.search(rank.output_end):
            yield f"{thrown[1]}: {PREFIXES.sub('', thrown[2], count=1)}"
        for line in NCCLS_LOG.findall(rank.output_end):
            yield f"ProcessGroupNCCL: {PREFIXES.sub('', line, count=1)}"


def _reported(failure: Failure) -> list[str]:
    """Return the exception that a rank reported, and its direct causes."""
    summary = ADDED.split(failure.summary)[0]
    parts = failure.traceback.split(HANDLED)
    # An exit that was made of an exception comes after it.
    part = next((part for part in reversed(parts) if summary in part), "")
    return [NATIVE_SOURCE.sub("", error) for error in [*_in_tracebacks(part), summary]]


def _in_tracebacks(text: str) -> list[str]:
    """Return the exceptions of all tracebacks in a text, the last one first, each with what follows it."""
    _, *traces = text.split(HEADER)
    return [FRAMES.sub("", trace, count=1) for trace in reversed(traces)]
