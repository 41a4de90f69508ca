"""A comparison as a page to show, with what it was measured on, when, and how busily."""

from __future__ import annotations

import dataclasses
import html
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
    """Write a `labkit.Comparison` to a page. Return the path."""
    target = Path(path)
    if target.suffix != ".html":
        raise ValueError(f"a comparison is saved as .html, got {target.name!r}; its numbers are frame().to_csv()")
    if not comparison.runs:
        raise ValueError("there is nothing to save: no run has begun")
    title = title or f"{', '.join(comparison.titles[:-1])} and {comparison.titles[-1]}".removeprefix(" and ")
    target.write_bytes(_page(comparison, title, notes))
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
