"""The page for those who come from torchrun, mp.spawn or Accelerate: `python -m tests.tools.make_coming_from`.

Made of the twins (`tests/support/idioms.py`, `tests/support/whole_programs.py`), whose tests say that each row is so.
`tests/rank/test_idioms.py` fails where the page is not current.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.idioms import IDIOMS
from tests.support.twins import SCRIPTS, UNCHANGED, Twin
from tests.support.whole_programs import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "COMING_FROM.md"

COLUMNS = {
    "spawn": "mp.spawn",
    "torchrun": "torchrun",
    UNCHANGED: "`run_script`",
    "cell": "cell",
    "reserved": "on reserved ranks",
}

HEAD = Path(__file__).parent / "coming_from.md"

UNLISTED = {
    "ends with sys.exit(run())",
    "ends with a message",
    "sets its command line itself",
    "joins through a store of its own",
    "has imported init_process_group by its name",
    "chooses a port, and calls its ranks through it",
    "starts processes that form a world of their own",
    "makes of every error an exit",
}
"""Twins that are tested like the others, but that nobody would look up."""

LISTED = [twin for twin in IDIOMS if twin.name not in UNLISTED]


def mark(twin: Twin, way: str) -> str:
    """Return what a row says of a way."""
    tried = twin.scripts if way in SCRIPTS else twin.ways
    if way not in tried:
        return ""
    return "refused" if twin.refused and way in twin.cells else "✓"


def table(title: str, twins: list[Twin]) -> str:
    """Return twins as a table."""
    lines = [f"| {title} | {' | '.join(COLUMNS.values())} |", f"|---|{':-:|' * len(COLUMNS)}"]
    for twin in twins:
        lines.append(f"| [{twin.name}](#{anchor(twin.name)}) | {' | '.join(mark(twin, way) for way in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """Return how a heading is linked to, as GitHub has it."""
    kept = [character for character in heading.lower() if character.isalnum() or character in " -_"]
    return "".join(kept).replace(" ", "-")


def details(twin: Twin) -> str:
    """Return one twin with its source."""
    parts = [f"### {twin.name}\n"]
    if twin.refused:
        parts.append(f"Refused before anything starts: *{twin.refused}*.\n")
    if twin.note:
        parts.append(f"{twin.note}\n")
    parts.append(f"```python\n{twin.source.strip()}\n```\n")
    for name, text in twin.files.items():
        parts.append(f"`{name}`:\n\n```python\n{text.strip()}\n```\n")
    launched = "labkit.launch(main)" if twin.launched == "main" else f"labkit.launch({twin.launched})"
    parts.append(f"In the cell: `{launched}`\n")
    return "\n".join(parts)


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join(
        [
            "<!-- made by `python -m tests.tools.make_coming_from`; not to be changed by hand -->\n",
            HEAD.read_text(encoding="utf-8"),
            "## What a script may do\n",
            table("a script that …", LISTED),
            "An empty field: not tried. *Reserved ranks* run it twice, and the second time counts.\n",
            "## Whole programs\n",
            table("small, of the form of public ones", PROGRAMS),
            "## The sources\n",
            *(details(twin) for twin in (*LISTED, *PROGRAMS)),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
