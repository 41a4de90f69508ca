"""`course.pitfalls.Museum`: a wing of the museum in a notebook."""

from __future__ import annotations

import functools
import inspect
import linecache
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from course.exercises import progress
from course.exercises.predicting import predict
from course.exercises.traffic import Endless, time_limit
from course.pitfalls.base import KINDS, WINGS, Exhibit, brief, fault, find, table
from labkit.ui import kernel

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from labkit.ui.charts import Chart

LIMIT_S = 60.0
"""How long a form may take in the notebook's own process."""

RANKS_LIMIT_S = 20.0
"""How long a form's ranks may make no progress."""


class Outcome(NamedTuple):
    """What came of an exhibit in this notebook."""

    exhibit: Exhibit
    is_as_hung: bool
    """Whether the code was the exhibit's own, unchanged."""
    is_as_labelled: bool
    """Whether it showed its mistake, in the way in which the exhibit's file says; or was right, if it only looks wrong."""
    said: str | None
    """What was predicted."""


class Trial(NamedTuple):
    """What a form gave: a value, or its error as text."""

    found: Any
    is_error: bool


class Text:
    """Markdown where there is a notebook, plain text elsewhere."""

    def __init__(self, markdown: str, plain: str) -> None:
        self._markdown, self._plain = markdown, plain

    def __repr__(self) -> str:
        return self._plain

    def _repr_markdown_(self) -> str:
        return self._markdown


class Museum:
    """A wing of the museum: runs its exhibits, has what their code asks for by name, and keeps what came of them.

    Its ranks are reserved (`labkit.Session`) and stay until `close()`, or the end of the notebook.

    Args:
        wing: one of `WINGS`.
        world_size: number of ranks, 2 at least: one rank makes no mistakes with others.
        seed: of the ranks and of whatever is drawn.
        dataset: as `course.datasets.load` has it; the exhibits take 1200 images for training, 300 for testing.
        data_root: where its files are.
        predictions: a choice by exhibit, {"group_0": "c"}, for a run without a person.

    Raises ValueError for a wing, exhibit or choice that is none.
    """

    def __init__(
        self,
        wing: str,
        world_size: int = 2,
        seed: int = 0,
        dataset: str = "digits",
        data_root: str | Path | None = None,
        predictions: Mapping[str, str] | None = None,
    ) -> None:
        if wing not in WINGS:
            raise ValueError(f"there is no wing {wing!r}; there are {', '.join(WINGS)}")
        if world_size < 2:
            raise ValueError(
                f"world_size must be at least 2, got {world_size}: one rank makes no mistakes with others"
            )
        self.exhibits = {name: exhibit for name, exhibit in table().items() if exhibit.wing == wing}
        """Those of this wing, by name."""
        if unknown := set(predictions or {}) - set(self.exhibits):
            raise ValueError(
                f"the wing {wing!r} has no {', '.join(sorted(unknown))}; it has {', '.join(self.exhibits)}"
            )
        self.wing, self.world_size, self.seed = wing, world_size, seed
        self.predictions = {
            name: predict(exhibit.question, *exhibit.choices)
            for name, exhibit in self.exhibits.items()
        }
        for name, choice in (predictions or {}).items():
            self._say(self.exhibits[name], choice)
        self.outcomes: dict[str, Outcome] = {}
        """By name, of the exhibits that were run."""
        self.mended: set[str] = set()
        """Names of the exhibits that the reader has mended."""
        self._data = dataset, data_root
        self.folders: list[Path] = []
        """Where exhibits have written; `close` deletes them."""
        self._session: Any = None
        if any(
            "on_ranks" in inspect.signature(exhibit.form).parameters
            for exhibit in self.exhibits.values()
        ):
            self._reserve()  # now: the ranks start while the reader reads

    def _say(self, exhibit: Exhibit, prediction: str) -> None:
        if choice := exhibit.chosen(prediction):
            self.predictions[exhibit.name].say(choice)

    # What exhibits ask for by name

    def on_ranks(self, function: Callable[..., Any]) -> list[Any]:
        """Call function(worker) on every rank, and return what it returns, by rank. Raises labkit.WorkerFailed."""
        session = self._reserve()
        send = {"function": function}
        session.run(
            "answer = function(worker)", send=send, stall_s=RANKS_LIMIT_S, title=function.__name__
        )
        answers: list[Any] = session.values("answer")
        return answers

    def _reserve(self) -> Any:
        from labkit.session.session import Session

        if self._session is None:
            self._session = Session(
                self.world_size, seed=self.seed, device="cpu", is_of_a_cell=False
            )
        return self._session

    @functools.cached_property
    def _sets(self) -> Any:
        from course import datasets

        return datasets.load(*self._data)

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        from torch.utils.data import DataLoader

        images, labels = next(iter(DataLoader(self._sets.train, 1200)))
        test_images, test_labels = next(iter(DataLoader(self._sets.test, 300)))
        return {
            "images": images,
            "labels": labels,
            "test_images": test_images,
            "test_labels": test_labels,
        }

    def _network(self) -> nn.Module:
        from course import models

        torch.manual_seed(self.seed)
        return models.linear(self._tensors["images"][0].numel())

    def given(self, name: str) -> Any:
        """Return what an exhibit's function asks for by this name. Raises TypeError for a name that means nothing."""
        if name in ("world_size", "seed", "on_ranks"):
            return getattr(self, name)
        if name == "folder":  # a new one: a form that runs again finds nothing of the first time
            self.folders.append(Path(tempfile.mkdtemp(prefix="labkit-")))
            return self.folders[-1]
        if name in ("images", "labels", "test_images", "test_labels"):
            return self._tensors[name]
        if name == "train_set":
            return self._sets.train
        if name == "network":
            return self._network()
        raise TypeError(
            f"an exhibit's function asks for {name!r}; there are world_size, seed, folder, on_ranks, images, labels, "
            "test_images, test_labels, train_set and network"
        )

    def _call(self, function: Callable[..., Any], *first: Any) -> Any:
        names = list(inspect.signature(function).parameters)[len(first) :]
        return function(*first, *map(self.given, names))

    def _try(self, form: Callable[..., Any]) -> Trial:
        """Call a form; stop it if it does not end, and end the process group that it has left."""
        try:
            with time_limit(LIMIT_S, LIMIT_S):
                return Trial(self._call(form), False)
        except Endless as endless:
            return Trial(f"Stopped: {form.__name__} {endless}", True)
        except (Exception, SystemExit) as error:
            return Trial(f"{type(error).__name__}: {error}", True)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _fault(self, exhibit: Exhibit, trial: Trial) -> str:
        """Return what is wrong with what a form gave; "" if a right form gives that."""
        return brief_error(trial.found) if trial.is_error else self._differs(exhibit.expects, trial)

    def _differs(self, expected: Any, trial: Trial) -> str:
        if inspect.isfunction(expected):
            expected = self._call(expected)
        return fault(expected, trial.found, self.world_size)

    # What the notebook's cells call

    def reveal(self, form: Callable[..., Any], prediction: str = "") -> None:
        """Run a form, say what came of it and whether that was predicted, and show the right form.

        Args:
            form: the function, named as its exhibit; the exhibit's own, or changed.
            prediction: a letter of the card's, or the choice in its words; "" for none.

        Raises ValueError for an exhibit or prediction that is none, AssertionError if the right form fails.
        """
        exhibit = self._exhibit(form.__name__)
        self._say(exhibit, prediction)
        if self._skips(exhibit):
            return
        trial = self._try(form)
        wrong = self._fault(exhibit, trial)
        if trial.is_error:
            _tell("The form raises", brief_error(trial.found))
        else:
            _tell("The form gives", brief(trial.found))
        shows = not wrong if exhibit.is_sound else bool(wrong) and self._shows(exhibit, trial)
        as_hung = is_as_hung(form, exhibit)
        asked = self.predictions[exhibit.name]
        if shows:
            kernel.display(asked.reveal(exhibit.answer))
            self._show_right(exhibit)
        elif as_hung:
            _say(f"The exhibit did not show what its label says; expected: {exhibit.answer}.")
        else:
            self._tell_mended(exhibit, trial, wrong)
        self.outcomes[exhibit.name] = Outcome(exhibit, as_hung, shows, asked.said)

    def mend(self, form: Callable[..., Any]) -> None:
        """Run a form that the reader has changed, and say that it is mended, or what is still wrong.

        It is mended if it gives what a right form gives. Raises ValueError if the wing has no exhibit of its name.
        """
        exhibit = self._exhibit(form.__name__)
        if self._skips(exhibit):
            return
        trial = self._try(form)
        wrong = self._fault(exhibit, trial)
        if not exhibit.is_sound and is_as_hung(form, exhibit):
            wrong = f"the code is unchanged; {wrong}" if wrong else "the code is unchanged"
        self._tell_mended(exhibit, trial, wrong)
        self.outcomes.setdefault(exhibit.name, Outcome(exhibit, False, False, None))

    def _tell_mended(self, exhibit: Exhibit, trial: Trial, wrong: str) -> None:
        if wrong:
            _say(f"{'No longer right' if exhibit.is_sound else 'Not mended yet'}: {wrong}.")
        elif exhibit.is_sound:
            _say("It is right, and was: there is nothing to mend.")
        else:
            self.mended.add(exhibit.name)
            _tell("Mended. It gives", brief(trial.found))

    def _skips(self, exhibit: Exhibit) -> bool:
        if exhibit.missing:
            _say(f"Skipped: needs {exhibit.missing}.")
        return bool(exhibit.missing)

    def _shows(self, exhibit: Exhibit, trial: Trial) -> bool:
        """Return whether a form shows its exhibit's mistake."""
        if trial.is_error and exhibit.kind not in ("error", "hang"):
            return False
        return not self._differs(exhibit.gives, trial)

    def _show_right(self, exhibit: Exhibit) -> None:
        """Run and show the right form; where the form only looks wrong, say why it is right."""
        assert exhibit.right_form is not None
        source, why = exhibit.right_source, exhibit.why
        if exhibit.is_sound:
            _say(why)
            return
        gives = Trial(self._call(exhibit.right_form), False)
        wrong = self._fault(exhibit, gives)
        assert not wrong, f"the right form of {exhibit.name}: {wrong}"
        _tell("The right form gives", brief(gives.found))
        kernel.display(Text(f"```python\n{source}\n```\n{why}", f"{source}\n\n{why}"))

    def _exhibit(self, name: str) -> Exhibit:
        if name not in self.exhibits:
            elsewhere = f"; it is in {WINGS[find(name).wing]}" if name in table() else ""
            raise ValueError(
                f"this wing has no exhibit {name!r}{elsewhere}; it has {', '.join(self.exhibits)}"
            )
        return self.exhibits[name]

    # What was seen

    @property
    def to_show(self) -> list[str]:
        """Names of the exhibits that this machine can run."""
        return [name for name, exhibit in self.exhibits.items() if not exhibit.missing]

    @property
    def not_as_labelled(self) -> list[str]:
        """Titles of the exhibits that ran unchanged, and did not do what their labels say."""
        return [
            outcome.exhibit.title
            for outcome in self.outcomes.values()
            if outcome.is_as_hung and not outcome.is_as_labelled
        ]

    def score(self) -> str:
        """Return how many of this wing's predictions were right, and how many mistakes were mended."""
        answered = {asked.question: asked.right for asked in self.predictions.values()}
        told = score(answered, self.exhibits)
        return f"{told}; {len(self.mended)} mended"

    def table(self) -> pd.DataFrame:
        """Return a row for each exhibit: how it shows itself, what became of the prediction, and whether it is mended."""
        import pandas as pd

        predicted = {None: "", True: "right", False: "surprised?"}
        rows = [
            {
                "exhibit": exhibit.title,
                "shows itself by": f"skipped: needs {exhibit.missing}"
                if exhibit.missing
                else exhibit.kind,
                "your prediction": predicted[self.predictions[name].right],
                "mended": "yes" if name in self.mended else "",
            }
            for name, exhibit in self.exhibits.items()
        ]
        return pd.DataFrame(rows).set_index("exhibit")

    def scoreboard(self) -> Chart:
        """Draw how the exhibits that were run have shown themselves, and which were foreseen."""
        from labkit import charts

        shown = [outcome for outcome in self.outcomes.values() if outcome.is_as_labelled]
        rows = {
            kind: {"predicted": 0, "predicted otherwise": 0, "no prediction": 0} for kind in KINDS
        }
        for outcome in shown:
            foreseen = "no prediction" if outcome.said is None else "predicted"
            right = outcome.said in (None, outcome.exhibit.answer)
            rows[outcome.exhibit.kind][foreseen if right else "predicted otherwise"] += 1
        return charts.stacked(rows, "exhibits", f"how {len(shown)} exhibits showed themselves")

    def close(self) -> None:
        """End the ranks, and delete what exhibits wrote. An exhibit that runs later starts new ranks."""
        if self._session is not None:
            self._session.close()
            self._session = None
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def is_as_hung(form: Callable[..., Any], exhibit: Exhibit) -> bool:
    """Return whether a form is the exhibit's own: its cell holds the exhibit's code, unchanged."""
    code = getattr(form, "__code__", None)
    cell = "".join(linecache.getlines(code.co_filename)) if code else ""
    return form is exhibit.form or exhibit.cell in cell


def score(
    answered: Mapping[str, bool | None] | None = None, exhibits: Mapping[str, Exhibit] | None = None
) -> str:
    """Return how many predictions were right, of mistakes and of code that only looks wrong.

    Args:
        answered: whether each was right, by question; by default all that were ever made in these notebooks.
        exhibits: those that count; by default the whole museum.
    """
    answered = progress.load()["predictions"] if answered is None else answered
    exhibits = table() if exhibits is None else exhibits

    def of(is_sound: bool) -> tuple[int, int]:
        made = [
            right
            for each in exhibits.values()
            if each.is_sound == is_sound and (right := answered.get(each.question)) is not None
        ]
        return sum(made), len(made)

    (mistakes, made), (sound, made_sound) = of(False), of(True)
    if not made + made_sound:
        return f"no predictions made, of {len(exhibits)}"
    return (
        f"{mistakes + sound} of {made + made_sound} predictions right, of {len(exhibits)} exhibits: {mistakes} of "
        f"{made} about mistakes, {sound} of {made_sound} about code that only looks wrong"
    )


def brief_error(text: str) -> str:
    """Return an error's first line, cut where it is long."""
    first = text.splitlines()[0].replace("`", "'")
    return first if len(first) <= 240 else f"{first[:239]}…"


def _say(text: str) -> None:
    kernel.display(Text(text, text))


def _tell(what: str, value: str) -> None:
    """Show a value of an exhibit."""
    kernel.display(Text(f"**{what}** `{value}`", f"{what}: {value}"))
