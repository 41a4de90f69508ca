"""Errors by their text: the page of each message that people search for, recognised where a rank failed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

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


class Known(NamedTuple):
    """A message that people search for."""

    page: str
    """As `labkit.explain` takes it."""
    message: str
    """A regular expression for the error, from its type on."""
    causes: tuple[tuple[str, str], ...] = ()
    """What else its text may hold, and what that says of the cause; the first that is found."""


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

KNOWN = (
    Known("nccl_timeout", rf"{TORCH}{ABORTED_FOR}Watchdog caught collective operation timeout"),
    Known(
        "duplicate_gpu",
        rf"{NCCL}[\s\S]*(?:Duplicate GPU detected ?: rank|Multiple Ranks are using the same GPU)",
    ),
    Known(
        "gpu_out_of_memory",
        rf"{TORCH}(?:CUDA|HIP) (?:error: )?out of memory|{NCCL}[\s\S]*Cuda failure.*out of memory",
        (
            (
                r"Process (\d+) has ([\d.]+ \w+) memory in use",
                "Process {0} holds {1} on the same GPU. If it is one of run.pids, ranks share the GPU; if not, it is "
                "another program, or left over.",
            ),
            (
                r"([\d.]+ GiB) is reserved by PyTorch but unallocated",
                "{0} were reserved and not in use. If that is more than was asked for, it lay in pieces too small "
                "(fragmentation), and expandable_segments helps.",
            ),
        ),
    ),
    Known(
        "nccl_system_error",
        rf"{NCCL}.*unhandled system error",
        (
            (r"shared memory segment|/dev/shm", "NCCL found no room in /dev/shm."),
            (r"ibv_|locked memory|memlock", "InfiniBand could not lock memory: look at `ulimit -l`."),
            (
                r"no socket interface|[Cc]onnect\w* .*(?:failed|refused|timed out)|No route to host",
                "NCCL could not reach another rank over the network: look at NCCL_SOCKET_IFNAME and the firewall.",
            ),
        ),
    ),
    Known(
        "unused_parameters",
        rf"{TORCH}(?:Expected to have finished reduction in the prior iteration|Your training graph has changed)",
        (
            (r"static_graph", "static_graph=True promises the same parameters in each step; this step used others."),
            (r"find_unused_parameters=True` is enabled", "An output of `forward` did not take part in the loss."),
        ),
    ),
    Known("marked_ready_twice", rf"{TORCH}Expected to mark a variable ready only once"),
    Known(
        "shared_memory",
        rf"{TORCH}(?:DataLoader worker \(pid \d+\) is killed by signal: Bus error|unable to (?:allocate shared memory"
        r"|write to file </torch_))|ERROR: Unexpected bus error encountered in worker|"
        r"OSError: \[Errno 28\] .*(?:/dev/shm|/pymp-)",
    ),
    Known(
        "too_many_open_files",
        rf"OSError: \[Errno 24\]|{TORCH}(?:Too many open|received 0 items|unable to .*: Too many open files \(24\))",
        (
            (
                r"ancdata|Communication with the|shared memory object",
                "Each tensor that a DataLoader worker or another process sends keeps a file open.",
            ),
        ),
    ),
    Known(
        "address_in_use",
        rf"(?:OSError: .*|zmq\.error\.ZMQError: |{TORCH}(?:(?:The server socket has|\[enforce) fail.*)?)"
        "(?:EADDRINUSE|[Aa]ddress already in use)",
        ((r"port: (\d+)|:(\d+) \(errno", "Port {0} is taken: `ss -ltnp 'sport = :{0}'` names the process."),),
    ),
    Known(
        "main_guard",
        r"RuntimeError: \s*An attempt has been made to start a new process before the\s+current process has",
        (
            (
                "",
                "A child process of the rank imported the script, which then began to start processes again; "
                "run.output has its error.",
            ),
        ),
    ),
    Known(
        "device_side_assert",
        rf"{TORCH}CUDA error: device-side assert triggered",
        (
            (
                r"Assertion `([^`]*\b(?:t|cur_target)\b[^`]*n_classes)` failed",
                "The kernel's own words, `{0}`: a label is not below the number of classes, or negative.",
            ),
            (
                r"(?:Indexing|ScatterGather|IndexKernel).*Assertion `(.*)` failed",
                "The kernel's own words, `{0}`: an index is out of range; in an embedding, a token.",
            ),
            (
                r"Assertion `(.*)` failed",
                "The kernel's own words: `{0}`.",
            ),
        ),
    ),
    Known("no_backend_for_device", rf"{TORCH}No backend type associated with device type"),
    Known(
        "module_keys",
        rf"{LOADING}(?:{SAVED_WRAPPED}|{LOADED_WRAPPED})",
        (
            (SAVED_WRAPPED, "The keys of the file begin with `{0}.`: they were saved from a wrapped model."),
            (LOADED_WRAPPED, "The model is wrapped, so its keys begin with `{0}.`; those of the file do not."),
        ),
    ),
)

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

KERNELS_ASSERTION = re.compile(r"^.*block: \[.*thread: \[.*\] Assertion `.*` failed", re.MULTILINE)
"""What a CUDA kernel writes of an assertion, once for each thread."""

NCCLS_LOG = re.compile(r"ProcessGroupNCCL\.cpp:\d+\] (.*)")
TERMINATED = re.compile(r"^terminate called after throwing an instance of '(.*)'\n  what\(\):  ([\s\S]*)", re.MULTILINE)
PREFIXES = re.compile(r"(?:\[[^\]]*\] ?|(?:Process group|NCCL) watchdog thread terminated with exception: )*")
"""What is before an error in torch's log: the group, the rank, and who ended the process."""


class Recognised(NamedTuple):
    """A message that a rank failed with."""

    page: str = ""
    """As `labkit.explain` takes it; "" if the message is none that is known."""
    cause: str = ""
    """One sentence: what the message says of the cause; "" if it says nothing."""


def recognise(rank: RankFacts) -> Recognised:
    """Return the page of the message that a rank failed with, and what its text says of the cause."""
    for error in _errors(rank):
        for known in KNOWN:
            if re.match(known.message, error):
                text = "\n".join([error, *KERNELS_ASSERTION.findall(rank.output_end)])
                return Recognised(known.page, _cause(known, text))
    return Recognised()


def _cause(known: Known, text: str) -> str:
    for pattern, sentence in known.causes:
        if found := re.search(pattern, text):
            return sentence.format(*filter(None, found.groups()))
    return ""


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
