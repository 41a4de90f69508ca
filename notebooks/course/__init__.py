"""The course: what its lessons import, and nothing that labkit needs.

    exercises     what learners write, tried on ranks kept for it (`check`), one a module; and `predict`
    answers       what learners wrote and was right, for the rest of the lesson (`mine`)
    transformer   a small GPT, and ways to train it in parallel, one a module
    data_parallel the four steps of `nn.DataParallel` on the CPU
    datasets, models          the data and the networks
    reference, steps, replay  training in one process, the loop of the lessons on sharding, pipelines on ideal devices
    pictures, scaling_plots, explore, tables      what lessons draw
    changes       a training function without dropout, BatchNorm or low precision
    formulas, facts               what several lessons use
    pitfalls      what the cells of the lessons on pitfalls share
    batch_scripts, launch_environments      what batch scripts start, and what launchers tell a process
    overview      how far the user is, and scripts that lessons show
    hangs         runs that are meant to hang, of the lessons on deadlocks

A folder beside the notebooks: a lesson finds it because a notebook's kernel starts in the notebook's own folder. Ranks
find it as they find any module of the user's. It is imported on ranks too, so its parts are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.protocol.lazy import lazy_names

if TYPE_CHECKING:  # `as` tells type checkers that a name is public
    from course import data_parallel as data_parallel
    from course import datasets as datasets
    from course import exercises as exercises
    from course import formulas as formulas
    from course import hangs as hangs
    from course import models as models
    from course import pictures as pictures
    from course import pitfalls as pitfalls
    from course import reference as reference
    from course import replay as replay
    from course import steps as steps
    from course import transformer as transformer
    from course.answers import mine as mine
    from course.changes import without as without
    from course.exercises import tally as tally
    from course.exercises.checking import check as check
    from course.exercises.predicting import predict as predict
    from course.overview import diff as diff
    from course.overview import progress as progress
    from course.overview import script as script
    from course.overview import strip as strip
    from course.overview import written as written
    from course.tables import sortable as sortable

_HOMES = {
    "check": "exercises.checking",
    "diff": "overview",
    "mine": "answers",
    "predict": "exercises.predicting",
    "progress": "overview",
    "script": "overview",
    "sortable": "tables",
    "strip": "overview",
    "tally": "exercises",
    "without": "changes",
    "written": "overview",
}
"""The module of each public name …"""

_MODULES = {
    name: name
    for name in (
        "data_parallel",
        "datasets",
        "exercises",
        "formulas",
        "hangs",
        "models",
        "pictures",
        "pitfalls",
        "reference",
        "replay",
        "steps",
        "transformer",
    )
}
"""… and the public modules."""

__all__ = sorted([*_HOMES, *_MODULES])

__getattr__ = lazy_names(__name__, _HOMES, _MODULES)


def __dir__() -> list[str]:
    return __all__
