r"""Half a surrogate pair in the reader's text ("\ud800") hides nothing: it is shown escaped."""

from __future__ import annotations

import json
import logging
import os

import pytest
from jupyter_client.session import json_packer

import labkit
from labkit.protocol.text import printable, slug, titled
from labkit.ui import summary, view
from tests.conftest import LONG_S
from tests.ui.test_view import (  # noqa: F401 - two are fixtures
    drawn,
    fail,
    finish,
    log,
    page,
    slow_imports_are_paid,
    started,
)

HALF = "\ud800"
SHOWN = r"\ud800"
FILE = os.fsdecode(b"caf\xe9")
"""A file's name in another encoding, as `os.listdir` gives it."""


@pytest.mark.parametrize(
    ("title", "typed"),
    [
        ("one process", "one_process"),
        ("DDP", "ddp"),
        ("ZeRO-1", "zero_1"),
        ("FSDP2 × tensor parallel", "fsdp2_x_tensor_parallel"),
        ("DDP, fp16 hook", "ddp_fp16_hook"),
        ("DataParallel (threads)", "dataparallel_threads"),
    ],
)
def test_a_title_has_a_slug_that_finds_it(title, typed):
    assert slug(title) == typed
    for name in (title, typed, title.upper()):
        assert titled(name, [title, "another"]) == title


def test_what_is_no_title_or_that_of_several_is_refused_with_all():
    for name in ("FSDP", "zero 1"):
        with pytest.raises(ValueError, match=rf"known are ZeRO-1 \(zero_1\), ZeRO 1 \(zero_1\), ddp; got '{name}'"):
            titled(name, ["ZeRO-1", "ZeRO 1", "ddp"])
    assert titled("ZeRO 1", ["ZeRO-1", "ZeRO 1"]) == "ZeRO 1", "word for word it is one of them"


def fails_with_odd_text(worker):
    worker.log(**{f"loss {HALF}": 1.0})
    print("printed", HALF)
    state = {HALF: HALF}  # noqa: F841 - one of the variables that are shown
    raise ValueError(f"no file {FILE} for {HALF}")


def sendable(*shown):
    """What Jupyter makes of it; raises where Jupyter would, so that nothing is shown at all."""
    for each in shown:
        json_packer({"data": each}).decode()


@pytest.mark.spawns
def test_a_run_with_odd_text_is_shown_with_its_error_in_every_view():
    with pytest.raises(labkit.WorkerFailed) as failed:
        labkit.launch(fails_with_odd_text, name=f"run {HALF}", world_size=1, live=False)
    error, run = failed.value, failed.value.run
    sendable(summary.bundle(run), view.state_of(run), error._render_traceback_(), str(error), run.figure().bundle())
    report = summary.as_html(run)
    assert rf"no file caf\udce9 for {SHOWN}" in report
    assert f"run {SHOWN}: failed" in report
    assert f"printed {SHOWN}" in report
    assert "state" in error.frames[0].variables
    sendable(str(error.frames[0]), dict(error.frames[0].variables))
    assert rf"no file caf\udce9 for {SHOWN}" in error.cause


@pytest.mark.parametrize("text", ["", "plain", "Grüße, 世界 🙂", "\x00\x1b[31m\r"])
def test_text_that_can_be_sent_stays_as_it_is(text):
    assert printable(text) == text


def test_a_live_view_that_cannot_draw_still_shows_how_the_run_ended(page, monkeypatch, caplog):  # noqa: F811
    def broken(*_):
        raise OSError("no paper")

    run = started(steps=3)
    live = view.LiveView(run)
    monkeypatch.setattr(view, "state_of", broken)
    monkeypatch.setattr(view, "panels_of", broken)
    monkeypatch.setattr(summary, "as_html", broken)
    with caplog.at_level(logging.ERROR):
        live.start()
        fail(run, cause=f"Cell In[3]\nValueError: bad batch {HALF}")
        live.join(LONG_S)
    assert not live.is_alive()
    assert "bad batch" in drawn(live)["html"]
    last = page[0].things[-1]
    assert "rank 1 failed: ValueError: bad batch" in last["text/plain"]
    assert json.dumps(last).isascii()
    assert "application/vnd.plotly.v1+json" in page[1].things[-1], "and the chart, which is none the worse"
    assert [record.message for record in caplog.records] == ["run 'train' could not be shown. It is not affected"]
