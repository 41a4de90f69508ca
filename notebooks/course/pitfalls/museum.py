"""`course.pitfalls.Museum`: a wing of the museum in a notebook."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from course.exercises.predicting import Prediction, predict
from course.pitfalls.base import KINDS, WINGS, Exhibit, find, table
from labkit.ui import kernel

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from labkit.ui.charts import Chart

TIMEOUT_S = 60.0
"""How long an exhibit's ranks may make no progress."""


class Outcome(NamedTuple):
    """What came of an exhibit in this notebook."""

    exhibit: Exhibit
    symptom: bool
    """Whether the broken form showed the mistake, in the way in which the exhibit's file says that it does."""
    said: str | None
    """What was predicted."""
    right: Any
    """What the right form gave."""


class Text:
    """Markdown where there is a notebook, plain text elsewhere."""

    def __init__(self, markdown: str, plain: str) -> None:
        self._markdown, self._plain = markdown, plain

    def __repr__(self) -> str:
        return self._plain

    def _repr_markdown_(self) -> str:
        return self._markdown


class Museum:
    """A wing of the museum: shows its exhibits, has what their code asks for by name, and keeps what came of them.

    Its ranks are reserved (`labkit.Session`) and stay until `close()`.

    Args:
        wing: one of `WINGS`.
        world_size: number of ranks, 2 at least: one rank makes no mistakes with others.
        seed: of the ranks and of whatever is drawn.
        dataset: as `course.datasets.load` has it; the exhibits take 1200 images for training, 300 for testing.
        data_root: where its files are.
        predictions: a choice by exhibit, {"group_0": "an error"}, for a run without a person.

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
        self.predictions = {name: self._asked(exhibit) for name, exhibit in self.exhibits.items()}
        for name, choice in (predictions or {}).items():
            self.predictions[name].say(choice)
        self.outcomes: dict[str, Outcome] = {}
        """By name, of the exhibits that were run."""
        self._data = dataset, data_root
        self._scratch = tempfile.TemporaryDirectory(prefix="labkit-")
        self.folder = Path(self._scratch.name)
        """For what exhibits write; gone with `close`."""
        self._session: Any = None
        if any(
            "on_ranks" in inspect.signature(exhibit.form).parameters
            for exhibit in self.exhibits.values()
        ):
            self._reserve()  # now: the ranks start while the reader reads

    @staticmethod
    def _asked(exhibit: Exhibit) -> Prediction:
        return predict(f"{exhibit.title}: what comes of it?", *exhibit.choices)

    # What exhibits ask for by name

    def on_ranks(self, function: Callable[..., Any]) -> list[Any]:
        """Call function(worker) on every rank, and return what it returns, by rank. Raises labkit.WorkerFailed."""
        session = self._reserve()
        send = {"function": function}
        session.run(
            "answer = function(worker)", send=send, stall_s=TIMEOUT_S, title=function.__name__
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
        if name in ("world_size", "seed", "folder", "on_ranks"):
            return getattr(self, name)
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

    # What the notebook's cells call

    def card(self, name: str) -> None:
        """Show an exhibit: what is done, and what might come of it. Raises ValueError if the wing has none such."""
        exhibit = self._exhibit(name)
        kernel.display(
            Text(f"### {exhibit.title}\n\n{exhibit.story}", f"{exhibit.title}\n\n{exhibit.story}")
        )
        if exhibit.missing:
            kernel.display(
                Text(f"*Skipped: needs {exhibit.missing}.*", f"skipped: needs {exhibit.missing}")
            )
            return
        if self.predictions[name].answer is not None:  # the card is shown again: ask again
            self.predictions[name] = self._asked(exhibit)
        kernel.display(self.predictions[name])

    def reveal(self, broken: Callable[..., Any]) -> None:
        """Run a broken form, say what came of it and whether it was predicted; then run the right form, and show it."""
        exhibit = self._exhibit(broken.__name__)
        if exhibit.missing:
            kernel.display(
                Text(f"*Skipped: needs {exhibit.missing}.*", f"skipped: needs {exhibit.missing}")
            )
            return
        prediction, raised = self.predictions[exhibit.name], ""
        try:
            seen = self._call(broken)
        except Exception as error:
            seen = raised = f"{type(error).__name__}: {error}"
        _tell(
            "The broken form raises" if raised else "The broken form gives",
            raised.splitlines()[0] if raised else seen,
        )
        assert exhibit.has_symptom is not None
        # What it gave may be of another type than the symptom looks for, where the reader has changed the form.
        as_expected = exhibit.kind in ("error", "hang") if raised else True
        symptom = as_expected and self._shows(exhibit, seen)
        if symptom:
            kernel.display(prediction.reveal(exhibit.answer))
        else:
            text = f"The mistake does not show; expected: {exhibit.answer}. Was the form changed?"
            kernel.display(Text(text, text))
        gives = self._show_right(exhibit)
        self.outcomes[exhibit.name] = Outcome(exhibit, symptom, prediction.said, gives)

    def _shows(self, exhibit: Exhibit, seen: Any) -> bool:
        assert exhibit.has_symptom is not None
        try:
            return bool(self._call(exhibit.has_symptom, seen))
        except (TypeError, AttributeError, IndexError, ValueError, KeyError):
            return False

    def _show_right(self, exhibit: Exhibit) -> Any:
        assert exhibit.right_form is not None
        gives = self._call(exhibit.right_form)
        _tell("The right form gives", gives)
        source, why = exhibit.right_source, exhibit.why
        kernel.display(Text(f"```python\n{source}\n```\n{why}", f"{source}\n\n{why}"))
        return gives

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
    def without_symptom(self) -> list[str]:
        """Titles of the exhibits that ran and did not show their mistake."""
        return [outcome.exhibit.title for outcome in self.outcomes.values() if not outcome.symptom]

    def table(self) -> pd.DataFrame:
        """Return a row for each exhibit: how it shows itself, and what became of the prediction."""
        import pandas as pd

        def predicted(name: str, exhibit: Exhibit) -> str:
            said = self.outcomes[name].said if name in self.outcomes else None
            return "" if said is None else "right" if said == exhibit.answer else "surprised?"

        rows = [
            {
                "exhibit": exhibit.title,
                "shows itself by": f"skipped: needs {exhibit.missing}"
                if exhibit.missing
                else exhibit.kind,
                "your prediction": predicted(name, exhibit),
            }
            for name, exhibit in self.exhibits.items()
        ]
        return pd.DataFrame(rows).set_index("exhibit")

    def scoreboard(self) -> Chart:
        """Draw how the mistakes that were run have shown themselves, and which were foreseen."""
        from labkit import charts

        shown = [outcome for outcome in self.outcomes.values() if outcome.symptom]
        rows = {
            kind: {"predicted": 0, "predicted otherwise": 0, "no prediction": 0} for kind in KINDS
        }
        for exhibit, _, said, _ in shown:
            foreseen = "no prediction" if said is None else "predicted"
            rows[exhibit.kind][
                foreseen if said in (None, exhibit.answer) else "predicted otherwise"
            ] += 1
        return charts.stacked(rows, "exhibits", f"how {len(shown)} mistakes showed themselves")

    def close(self) -> None:
        """End the ranks, and delete what exhibits wrote."""
        if self._session is not None:
            self._session.close()
        self._scratch.cleanup()


def _tell(what: str, value: Any) -> None:
    """Show a value of an exhibit, cut where it is long."""
    words = " ".join(str(value).split()).replace("`", "'")
    words = words if len(words) <= 240 else f"{words[:239]}…"
    kernel.display(Text(f"**{what}** `{words}`", f"{what}: {words}"))
