"""What labkit says of each way to fail: kept as text files, compared whole."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

import labkit

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

CHANGES = [
    (re.escape(str(Path(labkit.__file__).parent)), "<project>/labkit"),  # which may be installed
    (re.escape(sysconfig.get_path("purelib")), "<packages>"),
    (re.escape(sysconfig.get_path("stdlib")), "<python>"),
    (re.escape(str(ROOT)), "<project>"),
    (r"\[?127\.0\.0\.1\]?:\d+", "<address>"),
    (r"0x[0-9a-f]+", "<address>"),
    (r"\bline \d+", "line <n>"),
    (r"\b\w+\.(cc|cpp|hpp|h):\d+", "<source>"),
    (r"\d+\.\d+ GiB", "<size>"),
    (r"[\d,]+ bytes of the [\d,]+", "<n> bytes of the <n>"),
    (r"pid\(?s?\)? \d+|pid\(s\) \d+", "pid <n>"),
]
"""What differs from run to run and machine to machine, and what stands for it."""

LIBRARY = re.compile(r'(?:^  File "<(?:packages|python)>.*\n(?:    .*\n)*)+', re.MULTILINE)
"""Lines of a traceback that are a library's: they change with its version …"""

DEEPER = re.compile(r"(?<=  inside that, most recent first:\n)(?:    .*\n)+")
"""… and so do its frames in a hang report, and the marks …"""

MARKS = re.compile(r"^ +[\^~]+\n|^ +\.\.\.<\d+ lines?>\.\.\.\n.*\n", re.MULTILINE)
"""… that Python puts below a line, and from 3.13 on the rest of a statement of several."""


def plain(text: str) -> str:
    """Return a message as it is on any machine."""
    for pattern, stand_in in CHANGES:
        text = re.sub(pattern, stand_in, text)
    text = MARKS.sub("", text + "\n")
    text = LIBRARY.sub("  <a library's lines>\n", text)
    return DEEPER.sub("    <a library's lines>\n", text).rstrip("\n") + "\n"


def said_in(error: labkit.WorkerFailed) -> str:
    """Return a failed run's message without what became of the other ranks, which differs from time to time."""
    text = f"{error.diagnosis.headline}\n\n{error.cause}"
    (named,) = {line for line in str(error).splitlines() if line.startswith("What to do: ")}
    return text if named in text else f"{text}\n\n{named}"


def assert_as_kept(name: str, text: str) -> None:
    """Compare a message with the one that is kept under this name; write it where LABKIT_WRITE_MESSAGES says so."""
    file = HERE / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.txt"
    said = plain(text)
    if os.environ.get("LABKIT_WRITE_MESSAGES"):
        file.write_text(said)
    assert file.exists(), f"{file.name} is missing; LABKIT_WRITE_MESSAGES=1 writes it"
    assert said == file.read_text()
