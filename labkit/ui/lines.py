"""A run where nobody watches: progress and what ranks print, line by line; in a notebook the chart comes at the end."""

from __future__ import annotations

import sys
import time

from labkit.monitor.record import RunRecord
from labkit.protocol.text import print_text
from labkit.ui import formatting, kernel, summary
from labkit.ui.watcher import Watcher

LINE_EVERY_S = 5.0
"""Time between progress lines; the first few come sooner."""


class Lines(Watcher):
    """Prints short progress lines and what the ranks print; leaves the final chart in a notebook."""

    def __init__(self, run: RunRecord, in_notebook: bool, wait: bool) -> None:
        super().__init__(run)
        self._handles = [kernel.reserve() for _ in range(2)] if in_notebook else []
        self._wait = wait

    def _show(self) -> None:
        start, next_line = time.monotonic(), 1.0
        notice = remark = ""
        while not self._run.over.wait(0.1):
            print_output(self._run)
            if self._run.notice != notice:
                notice = self._run.notice
                if notice:
                    print_text(f"{self._run.name}: {notice}")
            if not remark and (remark := formatting.remark(self._run)):
                print_text(f"{self._run.name}: {remark}")
            if time.monotonic() - start >= next_line and self._wait:
                print_text(summary.line(self._run))
                next_line = min(next_line * 2, next_line + LINE_EVERY_S)
        print_output(self._run)
        if self._handles:
            self._handles[0].update(summary.bundle(self._run), raw=True)
        else:
            new = [each for each in self._run.warnings if each not in notice]
            print_text("\n".join([summary.line(self._run), *new]))

    def _show_plainly(self, text: str) -> None:
        print_text(text)

    def _show_last(self) -> None:
        if self._handles and self._run.recorded.names:
            from labkit.ui import charts  # not above: it imports Plotly, which takes a second

            charts.of_run(self._run, title="").update_shown(self._handles[1])


def print_output(run: RunRecord) -> None:
    """Print the complete lines that ranks have printed since the last time, each with its rank."""
    for rank, lines in enumerate(run.take_new_output()):
        for text in lines:
            print_text(f"[rank {rank}] {text}", flush=False)
    sys.stdout.flush()
