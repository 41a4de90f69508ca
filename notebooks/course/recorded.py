"""What was measured on GPUs, for machines that have none: a file of figures, each with how it came about."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

COMMAND = "python -m tests.benchmarks.gpus"
"""The program that fills the file. It needs a GPU for each of two ranks."""

MEANS = ("hardware", "versions", "command", "recorded")
"""What every measurement says of how it came about."""


class Recorded:
    """The measurements in a file; shows itself as a table each, or says that there are none yet.

    Raises ValueError for a file that is not of this kind, with what it lacks.
    """

    def __init__(self, file: Path | str = "recorded/compare.json") -> None:
        self._file = Path(file)
        text = self._file.read_text(encoding="utf-8") if self._file.exists() else '{"measurements": []}'
        self.measurements: list[dict[str, Any]] = json.loads(text).get("measurements", [])
        """Each with its "hardware", "versions", "command" and "recorded" (a date), and "rows": by title, figures by
        name."""
        for index, each in enumerate(self.measurements):
            if lacking := [key for key in (*MEANS, "rows") if key not in each]:
                raise ValueError(f"{self._file}: measurement {index} lacks {', '.join(lacking)}; {COMMAND} writes all")

    def __repr__(self) -> str:
        if not self.measurements:
            return f"figures from GPUs: none recorded yet; on a machine that has them, run {COMMAND}"
        return "\n\n".join(f"{self._means(each)}\n{self._frame(each).to_string()}" for each in self.measurements)

    def _repr_html_(self) -> str:
        if not self.measurements:
            return f"<div>{html.escape(repr(self))}</div>"
        return "".join(
            f"<div>{html.escape(self._means(each))}</div>"
            f'<div style="overflow-x:auto">{self._frame(each).to_html(border=0)}</div>'
            for each in self.measurements
        )

    def _means(self, each: dict[str, Any]) -> str:
        return "Measured on GPUs: " + " · ".join(str(each[key]) for key in MEANS)

    def _frame(self, each: dict[str, Any]) -> Any:
        import pandas as pd

        return pd.DataFrame.from_dict(each["rows"], orient="index").round(4)


def add(file: Path, measurement: dict[str, Any]) -> None:
    """Add a measurement to a file, in place of an older one on the same hardware by the same command."""
    kept = [
        each
        for each in Recorded(file).measurements
        if (each["hardware"], each["command"]) != (measurement["hardware"], measurement["command"])
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"measurements": [*kept, measurement]}, indent=1) + "\n", encoding="utf-8")
