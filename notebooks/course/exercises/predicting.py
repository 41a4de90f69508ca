"""`course.predict`: ask before a cell that surprises; the run answers."""

from __future__ import annotations

import html
import threading
from typing import Any

from course.exercises import progress
from course.exercises.result import with_code
from labkit.ui import kernel

_asked: dict[str, Prediction] = {}
"""By question, in the order in which they were asked."""


class Prediction:
    """A question with its options, what the learner said, and, once the run has told, the answer.

    Shows itself: as buttons where a person reads, as a line of text where none does.
    """

    def __init__(self, question: str, options: tuple[str, ...]) -> None:
        self.question, self.options = question, options
        self.said: str | None = None
        """The option that was chosen; the last click before the answer counts."""
        self.answer: str | None = None
        """The option that the run proved."""
        self._shown: list[tuple[Any, Any]] = []
        """The handle and the widget of each display."""
        self._lock = threading.Lock()

    @property
    def right(self) -> bool | None:
        """Whether the prediction was right; None without one, or before the run."""
        return None if self.said is None or self.answer is None else self.said == self.answer

    def say(self, option: str) -> None:
        """Predict. Raises ValueError for what is no option; too late after the answer, and then without effect."""
        if option not in self.options:
            raise ValueError(f"{option!r} is none of the options {', '.join(map(repr, self.options))}")
        with self._lock:
            if self.answer is None:
                self.said = option

    def reveal(self, answer: Any) -> Revealed:
        """Say what the run has shown, an option or its number from 0, and return a text that shows itself.

        Raises ValueError for what is no option: the lesson's options then leave out what happens.
        """
        index = answer if isinstance(answer, int) and not isinstance(answer, bool) else None
        option = self.options[index] if index is not None and index < len(self.options) else str(answer)
        if option not in self.options:
            raise ValueError(f"the run gave {option!r}, which is none of the options {', '.join(self.options)}")
        with self._lock:
            self.answer = option
        self._make_still()
        if self.right is not None and kernel.is_interactive():
            progress.note_prediction(self.question, self.right)
        return Revealed(self)

    def _make_still(self) -> None:
        for handle, box in self._shown:  # buttons mean nothing any more, and a saved notebook cannot show them
            handle.update(self._still(), raw=True)
            box.children[0].value, box.children = self._still()["text/html"], box.children[:1]  # after a reload

    def __repr__(self) -> str:
        return f"predict: {self.question} {' · '.join(self.options)}"

    def _ipython_display_(self) -> None:
        if not kernel.is_interactive():
            print(self)
            return
        if self.answer is not None:
            kernel.display(self._still(), raw=True)
            return
        import ipywidgets as widgets

        buttons = widgets.ToggleButtons(options=self.options, value=self.said)
        buttons.style.button_width = "auto"
        buttons.observe(lambda change: self.say(change["new"]) if change["new"] else None, names="value")
        asked = widgets.VBox([widgets.HTML(f"<b>Predict:</b> {with_code(self.question)}"), buttons])
        self._shown.append((kernel.display(asked, display_id=True), asked))

    def _still(self) -> dict[str, str]:
        """Return what stays of the question once it is answered: its options, with what the learner said marked."""
        options = "".join(
            f"<span style='border:1px solid #8A8A8A;padding:2px 8px;margin-right:6px;display:inline-block;"
            f"{'font-weight:bold;border-width:2px' if option == self.said else ''}'>{html.escape(option)}</span>"
            for option in self.options
        )
        question = f"<div><b>Predict:</b> {with_code(self.question)}</div>"
        return {"text/plain": repr(self), "text/html": f"{question}<div style='padding:4px 0'>{options}</div>"}


class Revealed:
    """A prediction beside its answer."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction

    def __repr__(self) -> str:
        one = self.prediction
        if one.said is None:
            return f"{one.question} It was: {one.answer} (no prediction was made)"
        return f"{one.question} You said {one.said}; it was {one.answer}: {'right' if one.right else 'surprised?'}"

    def _repr_html_(self) -> str:
        one = self.prediction
        color = {True: "#009E73", False: "#D55E00", None: "#8A8A8A"}[one.right]
        return f"<div style='border-left:4px solid {color};padding:2px 12px'>{with_code(repr(self))}</div>"


def predict(question: str, *options: str) -> Prediction:
    """Ask before a cell that surprises: `guess = course.predict("What will rank 1 print?", "0", "1", "nothing")`.

    The run answers, in the cell that holds it: `guess.reveal(value)`. `course.tally()` counts the hits.
    Raises ValueError for fewer than two options, or two that are alike.
    """
    if len(options) < 2 or len(set(options)) < len(options):
        raise ValueError(f"a prediction needs at least two different options, got {options!r}")
    _asked[question] = prediction = Prediction(question, tuple(options))
    return prediction


class Tally:
    """How many predictions were right, in this notebook."""

    def __init__(self, predictions: list[Prediction]) -> None:
        self.predictions = predictions

    @property
    def right(self) -> int:
        """How many were right."""
        return sum(each.right is True for each in self.predictions)

    @property
    def made(self) -> int:
        """How many were made and answered."""
        return sum(each.right is not None for each in self.predictions)

    def __repr__(self) -> str:
        if not self.made:
            return f"no predictions made, of {len(self.predictions)} asked for"
        return f"you predicted {self.right} of {self.made} right, of {len(self.predictions)} asked for"


def tally() -> Tally | None:
    """Return how many of this notebook's predictions were right; None where none was asked for."""
    return Tally(list(_asked.values())) if _asked else None
