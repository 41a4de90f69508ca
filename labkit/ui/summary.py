"""What a run comes to: one line, a few lines of text, and HTML that needs no style sheet, no script and no network."""

from __future__ import annotations

import html
import math

from labkit.failures.facts import Diagnosis
from labkit.monitor.history import SAMPLES, Progress
from labkit.monitor.record import RunRecord
from labkit.ui.formatting import TAIL_LINES, WRAPPED, phase, rate, remark
from labkit.ui.tables import STATE_COLORS

MARKED = f"border-left:4px solid {STATE_COLORS['failed']};padding-left:8px;margin:2px 0"
"""Style of what has gone wrong: the colour beside the text, which keeps the page's own. No colour that one knows for
that of a failure has enough contrast in a light theme and in a dark one."""

SAVED_CHARACTERS = 40_000
"""Of all ranks' output together, in a saved notebook."""


def line(run: RunRecord) -> str:
    """Return where a run stands, in one line."""
    progress = [run.progress(rank)[0] for rank in range(run.world_size)]
    parts = [f"{run.name}: {phase(run)}", f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"]
    steps = [p.last_step for p in progress if p.last_step is not None]
    if steps:
        parts.append(f"step {min(steps)}")
    for name in list(run.recorded.names)[:3]:
        values = [p.last[name] for p in progress if name in p.last]
        if values and name != SAMPLES:
            parts.append(f"{name} {sum(values) / len(values):.4g}")
    parts += [_per_s(progress), f"{run.elapsed_s:.1f} s"]
    return " · ".join(part for part in parts if part)


def _per_s(progress: list[Progress]) -> str:
    """Return how fast the run goes, over all ranks."""
    samples = sum(p.samples_per_s for p in progress)
    if not math.isnan(samples):
        return f"{samples:,.0f} samples/s"
    steps = [p.steps_per_s for p in progress if not math.isnan(p.steps_per_s)]
    return f"{rate(min(steps))} steps/s" if steps else ""


def as_text(run: RunRecord) -> str:
    """Return where a run stands or how it ended, as a few lines of text."""
    headline = run.error.diagnosis.headline if run.error is not None else ""
    return "\n".join(filter(None, (line(run), run.placement, remark(run), *run.warnings, headline)))


def as_html(run: RunRecord) -> str:
    """Return where a run stands or how it ended, as HTML."""
    parts = [f"<b>{html.escape(line(run))}</b>"]
    if run.placement:
        parts.append(f"<div>{html.escape(run.placement)}</div>")
    for said in filter(None, (remark(run), *run.warnings)):
        parts.append(f'<div style="{MARKED}">{html.escape(said)}</div>')
    if run.error is not None:
        diagnosis = run.error.diagnosis
        parts.append(f'<div style="{MARKED}"><b>{html.escape(diagnosis.headline)}</b></div>')
        parts.append(f'<pre style="{WRAPPED}">{html.escape(diagnosis.cause)}</pre>')
        if run.error.frames:
            variables = f'<pre style="{WRAPPED}">{html.escape(str(run.error.frames))}</pre>'
            parts.append(f"<details><summary>variables when it failed</summary>{variables}</details>")
        if diagnosis.others:
            items = "".join(f"<li>{html.escape(each)}</li>" for each in diagnosis.others)
            parts.append(
                f"<details><summary>{_others_title(diagnosis, run.world_size - 1)}</summary><ul>{items}</ul></details>"
            )
        parts.append(f"<div>{html.escape(diagnosis.what_to_do, quote=False)}</div>")
    output = {rank: text for rank, text in enumerate(run.output) if text}
    shown = [rank for rank in run.recorded.listed(run.states) if rank in output]
    if others := len(output) - len(shown):
        parts.append(f"<div>output of {others:,} more ranks: run.output</div>")
    for rank in shown:
        tail = "\n".join(output[rank].splitlines()[-TAIL_LINES:])[-SAVED_CHARACTERS // len(shown) :]
        parts.append(f"<details><summary>output of rank {rank}</summary><pre>{html.escape(tail)}</pre></details>")
    return "\n".join(parts)


def bundle(run: RunRecord) -> dict[str, str]:
    """Return the summary by MIME type, as a notebook shows it."""
    return {"text/html": as_html(run), "text/plain": as_text(run)}


def _others_title(diagnosis: Diagnosis, count: int) -> str:
    if diagnosis.rank is None:
        return "what became of the ranks"
    return "what became of the other rank" if count == 1 else f"what became of the other {count} ranks"
