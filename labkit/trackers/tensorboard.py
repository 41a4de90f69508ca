"""A run's curves as TensorBoard's event files."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from labkit.trackers.base import LibraryTracker

NO_FILE_NAME = re.compile(r"[^\w.-]+")


class TensorBoard(LibraryTracker):
    """Event files in a folder; `tensorboard --logdir runs` shows them. Arguments are under HParams.

    Args:
        folder: where to; by default a new one for each run, "runs/2026-11-22_15-04-05_train".
        by_rank: a curve of every rank in place of their mean.
    """

    library, package = "tensorboard", "tensorboard"

    def __init__(self, folder: str | os.PathLike[str] | None = None, by_rank: bool = False) -> None:
        super().__init__(by_rank)
        self.folder = None if folder is None else Path(folder)
        """Where the run's files are; by default known once it has begun."""
        self._writer: Any = None

    def begin(self, name: str, parameters: dict[str, Any]) -> None:
        """Make the folder and its first file."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        if self.folder is None:
            self.folder = Path("runs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{NO_FILE_NAME.sub('_', name)}"
        self._writer = SummaryWriter(str(self.folder))
        shown = {key: "None" if value is None else value for key, value in parameters.items()}
        for summary in hparams(shown, {}):
            self._writer._get_file_writer().add_summary(summary)

    def log(self, step: int, values: dict[str, float], time_s: float | None = None) -> None:
        """Write a scalar per curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time_s)

    def flush(self) -> None:
        """Have TensorBoard see what was written; it would by itself after two minutes."""
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.folder)!r})" if self.folder is not None else "TensorBoard"
