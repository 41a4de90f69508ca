"""Where ranks are: the user's line in what `faulthandler` wrote, and the outliers among the ranks."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from labkit.failures.grouping import alike, rank_list
from labkit.protocol.job import Cell
from labkit.protocol.modules import is_user_file
from labkit.protocol.source import line_of, place_of, text_of

COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
"""Where torch waits for other ranks …"""

FILES = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/")
"""… but here it may wait for a disk instead."""

BACKWARD = "/torch/autograd/graph.py"
"""Where torch computes a backward pass. DDP waits for other ranks there, too."""

WAITS_IN_NATIVE_CODE = re.compile(r"(?<!^os)\.(wait|barrier|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter)$")
"""Calls of a handle or of a process group: `work.wait()`. They wait for other ranks in native code, without frames.

Names that others have, too, are not in it: `functools.reduce`, `torch.gather`, `sock.send`.
"""

SYNCHRONIZES = ("item", "cpu", "tolist", "synchronize", "to", "nonzero")
"""Calls that wait for a GPU, if there is one, and so for the collective that it is in."""

SHOWN_FRAMES = 12
"""The most frames of the user's own that are shown of a rank, and of libraries."""


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str


def is_complete(text: str) -> bool:
    """Return whether a dump has arrived completely: the main thread's outermost frame comes last."""
    last = text.rstrip("\n").rpartition("\n")[2]
    return text.endswith("\n") and (last == "  ..." or last.endswith(" in <module>"))


def parse(text: str, thread: str = "main") -> list[Frame]:
    """Return the frames of one thread in a faulthandler dump, most recent first.

    Args:
        text: The dump: of all threads after a crash, or of the main thread alone, as an answer.
        thread: "main", or "current" for the one that crashed.
    """
    sections = re.split(r"^((?:Current )?[Tt]hread 0x[0-9a-f]+.*|Stack \(.*)$", text, flags=re.MULTILINE)
    titled = list(zip(sections[1::2], sections[2::2], strict=True))
    if thread == "current":
        titled = [section for section in titled if section[0].startswith("Current")] or titled
    stacks = [body.partition("\n\n")[0] for _, body in titled]
    if thread == "main":
        # There may be several dumps. One may be cut off, because the process was ended, or be another thread's: a
        # signal that arrives while the main thread writes its dump goes to another thread.
        stacks = [each for each in stacks if is_complete(f"{each.rstrip()}\n")] or [
            each for each in stacks if not each.rstrip().endswith(" in _bootstrap")
        ]
    if not stacks:
        return []
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', stacks[-1], re.MULTILINE)
    return [Frame(file, int(line), function) for file, line, function in found]


class RankStack:
    """The stack of one rank.

    Args:
        rank: The rank.
        frames: Its main thread's, most recent first.
        cells: The notebook's cells by file name.
        note: What is known if there are no frames: "has returned", "did not answer" …
        other_thread: Another thread's stack, if that waits for other ranks.
        device: Where the rank computes: "cpu", "cuda:0"; "" if that is not known.
        in_call: Whether it is in a collective, according to its recorder.
    """

    def __init__(
        self,
        rank: int,
        frames: list[Frame],
        cells: Mapping[str, Cell],
        note: str = "",
        other_thread: RankStack | None = None,
        device: str = "",
        in_call: bool = False,
    ) -> None:
        self.rank = rank
        self.frames = frames
        self.note = note
        self.other_thread = other_thread
        self._has_gpu, self._in_call = device.startswith("cuda"), in_call
        self._cells = cells
        self._mine = [index for index, frame in enumerate(frames) if is_user_file(frame.file, cells)]
        self._at = next((i for i in self._mine if frames[i].file in cells), next(iter(self._mine), None))

    @property
    def place(self) -> str:
        """The user's line: "Cell In[3], line 14"; "" if none is known."""
        return "" if self._at is None else self._name(self.frames[self._at])

    @functools.cached_property
    def call(self) -> str:
        """What is being called there: "dist.all_reduce"; "" if that is not known."""
        if self._at is None:
            return ""
        deeper = [frame.function for frame in self.frames[: self._at]]
        calls = _calls(text_of(self.frames[self._at].file, self._cells), self.frames[self._at].line)
        known = [call for call in calls if call.rpartition(".")[2] in deeper]
        return next(iter(known or calls or [name for name in reversed(deeper) if name != "wrapper"]), "")

    # The problem: what waits for other ranks, and what computes? On a CPU, `loss.item()` is native code that returns at
    # once, and a backward pass is mostly arithmetic; on a GPU, either may wait for a collective.
    #
    # What does not work: the name of the call. `functools.reduce` and `torch.gather` compute.
    #
    # What is done: the innermost frame is in torch's own code for collectives; or the user's line has called native
    # code that waits. A backward pass counts if the recorder has a call that has not ended, or there is a GPU.
    #
    # What still fails: where there is no recorder, DDP's own collectives on a CPU are not told from arithmetic.

    @property
    def is_blocked(self) -> bool:
        """Whether it is in a call that waits for other ranks."""
        if not self.frames:
            return False
        innermost, name = self.frames[0].file, self.call.rpartition(".")[2]
        if self.is_in_backward:
            return self._in_call or self._has_gpu
        if any(place in innermost for place in COLLECTIVES):
            return not any(place in innermost for place in FILES)
        if self._has_gpu and name in SYNCHRONIZES and (self._at == 0 or "/torch/cuda" in innermost):
            return True
        return self._at == 0 and WAITS_IN_NATIVE_CODE.search(self.call) is not None

    @property
    def is_in_backward(self) -> bool:
        """Whether it is in a backward pass: computing, or waiting in a collective of DDP's."""
        return bool(self.frames) and BACKWARD in self.frames[0].file

    @property
    def place_of_wait(self) -> str:
        """The user's line at which it waits for other ranks: "train.py, line 14 in another thread"."""
        return f"{self.other_thread.place} in another thread" if self.other_thread is not None else self.place

    @property
    def waits_for_ranks(self) -> bool:
        """Whether one of its threads is in a call that waits for other ranks."""
        return self.is_blocked or (self.other_thread is not None and self.other_thread.waits_for_ranks)

    @functools.cached_property
    def in_words(self) -> str:
        """ "waits in all_reduce at Cell In[3], line 14", "is in time.sleep at …"."""
        if not self.place:
            return self.note or "is outside the function"
        if not self.call:
            return f"is at {self.place}"
        if self.is_blocked:
            return f"waits in {self.call.rpartition('.')[2]} at {self.place}"
        other = f", and {self.other_thread.in_words} in another thread" if self.other_thread is not None else ""
        return f"is in {self.call} at {self.place}{other}"

    def __str__(self) -> str:
        return f"rank {self.rank} {self.in_words}\n{self.details}".rstrip()

    @functools.cached_property
    def details(self) -> str:
        """The stack, the user's own lines first."""
        lines = []
        for frame in [self.frames[index] for index in self._mine[:SHOWN_FRAMES]]:
            lines.append(f"  {self._name(frame)}, in {frame.function}")
            if source := line_of(frame.file, frame.line, self._cells):
                lines.append(f"    {source}")
        deeper = self.frames[: self._at] if self._at is not None else self.frames
        if deeper:
            lines.append("  inside that, most recent first:")
            lines += [f"    {Path(f.file).name}, line {f.line}, in {f.function}" for f in deeper[:SHOWN_FRAMES]]
        if self.other_thread is not None:
            lines += ["  in another thread:", self.other_thread.details]
        return "\n".join(lines)

    def _name(self, frame: Frame) -> str:
        return place_of(frame.file, frame.line, self._cells)


@functools.lru_cache(maxsize=64)
def _calls(source: str, line: int) -> list[str]:
    """Return the calls on a line of source, outermost first, as they are written."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a cell with a %magic
        lines = source.splitlines()
        return re.findall(r"([\w.]+)\(", lines[line - 1]) if 0 < line <= len(lines) else []
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    calls.sort(key=lambda call: (call.lineno, call.col_offset - (call.end_col_offset or 0)))
    return [ast.unparse(call.func) for call in calls]


class Stacks(list[RankStack]):
    """The stacks of all ranks, by rank. A cell shows them with the outliers first."""

    missed = ""
    """The collective in which ranks missed each other, in one line; "" if they did not, or if it is not known."""

    @property
    def outliers(self) -> list[int]:
        """The ranks that differ from the others, which may be why the run makes no progress; empty if there are none.

        If some ranks may wait in a collective, these are the ranks that do not; or else the smallest group.
        """
        answering = [s for s in self if s.place or s.note]
        groups = alike(((s.is_blocked or s.is_in_backward, s.in_words), s.rank) for s in answering)
        busy = [rank for (waits, _), ranks in groups.items() if not waits for rank in ranks]
        if 0 < len(busy) < len(answering):
            return sorted(busy)
        sizes = sorted(len(ranks) for ranks in groups.values())
        if len(sizes) > 1 and sizes[0] < sizes[1]:
            return min(groups.values(), key=len)
        return []

    @property
    def in_words(self) -> str:
        """One sentence: "rank 1 is in time.sleep at Cell In[3], line 9; ranks 0 and 2 wait in all_reduce at …"."""
        groups = alike((stack.in_words, stack.rank) for stack in self._outliers_first())
        return "; ".join(f"{rank_list(ranks)} {plural(what, len(ranks))}" for what, ranks in groups.items())

    def _outliers_first(self) -> list[RankStack]:
        odd = self.outliers
        return sorted(self, key=lambda stack: stack.rank not in odd)

    def blocks(self) -> list[str]:
        """The stacks in full, outliers first; ranks with the same stack share a block."""
        groups = alike(((stack.in_words, stack.details), stack.rank) for stack in self._outliers_first())
        return [
            f"{rank_list(ranks)} {plural(what, len(ranks))}\n{details}".rstrip()
            for (what, details), ranks in groups.items()
        ]

    def __str__(self) -> str:
        return "\n\n".join(filter(None, [self.missed, self.in_words, *self.blocks()]))

    __repr__ = __str__


def plural(what: str, count: int) -> str:
    """Return what `count` ranks do, given what one does: "waits in …" becomes "wait in …"."""
    if count == 1:
        return what
    verb, _, rest = what.partition(" ")
    return f"{ {'waits': 'wait', 'is': 'are', 'has': 'have'}.get(verb, verb) } {rest}".rstrip()
