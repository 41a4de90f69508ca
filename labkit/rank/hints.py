"""What may have made a rank fail: what the notebook has and the rank has not, or another device than the rank's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from labkit.protocol.job import Job
from labkit.rank.notebook_main import left_behind

NOT_FOUND = re.compile(
    r"not? (been )?(found|registered|recogni|support|exist|such)|n't (exist|found|support)|un(known|recogni|registered"
    r"|supported)|has no attribute|not defined|NotFound|KeyError|LookupError|AttributeError",
    re.IGNORECASE,
)
"""How it is said that something is missing which an import may have registered or patched."""

OTHER_DEVICE = re.compile(
    "Expected all tensors to be on the same device|Found no NVIDIA driver|Torch not compiled with CUDA enabled"
    "|No CUDA GPUs are available"
)
"""How PyTorch says that a tensor lies, or is asked for, where the others are not."""

SHOW_OR_TABULATE = {"IPython", "ipywidgets", "matplotlib", "pandas", "plotly", "seaborn", "tqdm"}
"""Modules that change nothing elsewhere when they are imported."""

MOST = 8
"""Names in a hint."""


def add(error: BaseException, job: Job) -> None:
    """Add to an exception what may be its cause. Raises nothing."""
    try:
        for text in _hints(error, job):
            error.add_note(f"labkit: {text}")
    except Exception:  # an exception of a kind that takes no notes
        return


def _hints(error: BaseException, job: Job) -> Iterable[str]:
    name = str(getattr(error, "name", None))
    kind = job.definitions.left_behind.get(name) if isinstance(error, NameError) and job.definitions else None
    if kind is not None:
        yield left_behind(name, kind)
    elif OTHER_DEVICE.search(str(error)):
        yield "a rank computes on worker.device, a GPU or the CPU: move model and batches there, by .to(worker.device)"
    elif NOT_FOUND.search(f"{type(error).__name__}: {error}") and (missing := _missing(job)):
        more = f" and {len(missing) - MOST} more" if len(missing) > MOST else ""
        yield (
            f"the notebook has imported {', '.join(missing[:MOST])}{more}, and this rank has not. What a module "
            "registers or patches as it is imported is so in that process only: if the function needs it, import it "
            "in the function"
        )


def _missing(job: Job) -> list[str]:
    """Return the modules that the notebook's cells import and this rank has not imported."""
    return [
        name
        for name in job.imported
        if name not in sys.modules
        and name.partition(".")[0] not in {"labkit", *SHOW_OR_TABULATE, *sys.stdlib_module_names}
    ]
