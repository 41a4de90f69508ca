"""A comparison as a file to show: a page, a picture, or a table, with what it was measured on, when, and how busily."""

from __future__ import annotations

import dataclasses
import html
import io
import os
import statistics
import sys
import textwrap
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from labkit.comparison.reading import measured, others_cores
from labkit.protocol import VERSION
from labkit.system import host

BUSY = 0.15
"""From which part of a machine's cores that other programs use on it is said."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } .about { color: #555; margin-top: 0 }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 } .wide { overflow-x: auto }
th, td { padding: .3rem .6rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top }
td { font-variant-numeric: tabular-nums }
caption { caption-side: bottom; text-align: left; color: #555; padding: .5rem 0 }
.busy { border-left: 4px solid #d55e00; padding: .3rem .8rem; background: #fdf3ec }
dt { font-weight: 600 } dd { margin: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: 14px }
"""


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What a comparison was measured on, and when."""

    machine: str
    versions: str
    began: str

    @classmethod
    def now(cls) -> Circumstances:
        """Return those of this machine and this moment."""
        import psutil

        memory_gib = psutil.virtual_memory().total / 2**30
        machine = f"{host.processor()}, {host.cores()} cores, {memory_gib:,.0f} GiB"
        versions = f"Python {sys.version.split()[0]}, PyTorch {torch.__version__}, labkit {VERSION}"
        began = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        return cls(machine, f"{versions}, {host.release()}", began)


def save(comparison: Any, path: str | os.PathLike[str], title: str, notes: str) -> Path:
    """Write a `labkit.Comparison` to a file, as its ending says: ".html", ".png" or ".csv". Return the path."""
    target = Path(path)
    writers = {".html": _page, ".png": _picture, ".csv": _csv}
    if target.suffix not in writers:
        raise ValueError(f"a comparison is saved as {', '.join(writers)}, got {target.name!r}")
    if not comparison.runs:
        raise ValueError("there is nothing to save: no run has begun")
    title = title or f"{', '.join(comparison.titles[:-1])} and {comparison.titles[-1]}".removeprefix(" and ")
    target.write_bytes(writers[target.suffix](comparison, title, notes))
    return target


def facts(comparison: Any, notes: str = "") -> dict[str, str]:
    """Return the notes that go with the numbers, by heading."""
    about = comparison.circumstances
    gpus = {rank.load.device for run in comparison.runs.values() for rank in measured(run)} - {""}
    found = {"machine": "; ".join([about.machine, *sorted(gpus)]), "versions": about.versions, "began": about.began}
    if comparison.is_simulated:
        found["ideal devices"] = f"{comparison.devices.name}: {comparison.devices}. {comparison.devices.source}"
    found["settings"] = "; ".join(_settings(comparison))
    found["steps timed"] = ", ".join(f"{title} {count}" for title, count in _steps(comparison).items())
    found["load"] = "; ".join(_load(comparison)) or "not measured"
    for title, why in comparison.reasons.items():
        found[f"why {title} differs"] = why.reason or str(why)
    if notes:
        found["notes"] = notes
    return {heading: text for heading, text in found.items() if text}


def warnings(comparison: Any) -> list[str]:
    """Say which runs were timed while other programs used the machine's cores."""
    busy = {title: others_cores(run) for title, run in comparison.runs.items()}
    busy = {title: cores for title, cores in busy.items() if cores > BUSY * host.cores()}
    if not busy:
        return []
    cores_of = ", ".join(f"{cores:.1f} (during {title})" for title, cores in busy.items())
    return [f"Times on this machine's clock are too long: other programs used {cores_of} of {host.cores()} cores."]


def _settings(comparison: Any) -> list[str]:
    ranks = {title: run.world_size for title, run in comparison.runs.items()}
    said = [f"ranks: {', '.join(f'{title} {count}' for title, count in ranks.items())}"]
    parameters = getattr(comparison.launching, "parameters", {})
    return said + [f"{name}={textwrap.shorten(repr(value), 60)}" for name, value in parameters.items()]


def _steps(comparison: Any) -> dict[str, int]:
    counts = {title: [len(rank.steps_s) for rank in measured(run)] for title, run in comparison.runs.items()}
    return {title: max(of_ranks) for title, of_ranks in counts.items() if of_ranks}


def _load(comparison: Any) -> list[str]:
    found = {title: others_cores(run) for title, run in comparison.runs.items()}
    known = [cores for cores in found.values() if cores == cores]
    if not known:
        return []
    return [f"other programs used {statistics.fmean(known):.1f} of {host.cores()} cores on average"]


# A page


def _page(comparison: Any, title: str, notes: str) -> bytes:
    import plotly.io

    pictures = []
    for index, chart in enumerate(comparison.pictures()):
        options: dict[str, Any] = {"full_html": False, "include_plotlyjs": index == 0, "config": {"displaylogo": False}}
        pictures.append(f"<figure>{plotly.io.to_html(chart, **options)}</figure>")
    about = "".join(f"<dt>{html.escape(a)}</dt><dd>{html.escape(b)}</dd>" for a, b in facts(comparison, notes).items())
    busy = "".join(f'<p class="busy">{html.escape(each)}</p>' for each in warnings(comparison))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{STYLE}</style>
<h1>{html.escape(title)}</h1><p class="about">{html.escape(comparison.circumstances.began)}, {
        html.escape(comparison.circumstances.machine)
    }</p>
{busy}<div class="wide">{comparison.table().to_html()}</div>
{"".join(pictures)}
<dl>{about}</dl></html>
""".encode()


# A picture


LINE_IN, CHARACTER_IN, WIDTH_IN = 0.14, 0.062, 7.6
"""Inches of a line, of a character, and of the picture, which is as wide as those of charts."""


def _picture(comparison: Any, title: str, notes: str) -> bytes:
    """Stack title, table and charts, and what they were measured on."""
    from PIL import Image

    from labkit.ui import pictures

    lines = [*warnings(comparison), *(f"{name}: {text}" for name, text in facts(comparison, notes).items())]
    wrapped = [part for line in lines for part in textwrap.wrap(line, 118)]
    texts = comparison.texts()
    pngs = [
        _drawn([[textwrap.shorten(title, 80)]], 0.26, size=12, weight="bold"),
        _drawn([["", *map(str, texts)], *([str(name), *row] for name, row in texts.iterrows())], LINE_IN, rules=True),
        *(pictures.picture(chart) for chart in comparison.pictures()),
        _drawn([[line] for line in wrapped], LINE_IN, color="#444444"),
    ]
    parts = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
    whole = Image.new("RGB", (max(part.width for part in parts), sum(part.height for part in parts)), "white")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height
    found = io.BytesIO()
    whole.save(found, "PNG", optimize=True)
    return found.getvalue()


def _drawn(rows: list[list[str]], line_in: float, rules: bool = False, size: float = 6.5, **look: Any) -> bytes:
    """Return a PNG of some rows of texts, in columns as wide as what stands in them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = [[textwrap.wrap(text, 15) or [""] if rules else [text] for text in row] for row in rows]
    widths = [max(len(line) for row in cells for line in row[column]) + 1.5 for column in range(len(cells[0]))]
    factor = min(CHARACTER_IN, 0.97 * WIDTH_IN / sum(widths)) if rules else 0.0
    heights = [line_in * max(map(len, row)) + 0.06 * rules for row in cells]
    height = sum(heights) + 0.16
    page = Figure(figsize=(WIDTH_IN, height), dpi=100, facecolor="white")
    size = min(size, size * factor / CHARACTER_IN * 1.05) if rules else size
    top = height - 0.08
    for row, row_in in zip(cells, heights, strict=True):
        left = 0.1
        for parts, width in zip(row, widths, strict=True):
            page.text(left / WIDTH_IN, top / height, "\n".join(parts), fontsize=size, va="top", **look)
            left += factor * width
        top -= row_in
        if rules:
            page.add_artist(_rule(top / height))
    found = io.BytesIO()
    FigureCanvasAgg(page).print_png(found)
    return found.getvalue()


def _rule(y: float) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([0.01, 0.99], [y + 0.01, y + 0.01], color="#cccccc", linewidth=0.5)


# A table


def _csv(comparison: Any, title: str, notes: str) -> bytes:
    """Return all numbers; above them, in lines that begin with "#", what they were measured on."""
    about = {"title": title, **facts(comparison, notes)}
    lines = [f"# {heading}: {' '.join(text.split())}\n" for heading, text in about.items()]
    lines += [f"# warning: {each}\n" for each in warnings(comparison)]
    return ("".join(lines) + comparison.frame().to_csv(index_label="way")).encode()
