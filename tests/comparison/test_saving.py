"""What a comparison is saved as: a page. No process."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pandas as pd
import pytest

from labkit.comparison.comparison import Comparison
from labkit.comparison.measured import Measured
from labkit.comparison.program import Piece, Program
from labkit.comparison.reading import others_cores, speed_up, time_to_come
from labkit.comparison.replay import LAPTOP, Devices
from labkit.comparison.timed import Load, Timed
from labkit.monitor.history import History
from labkit.system import host


class Run:
    """A finished run, as much as a comparison asks of it."""

    error, status, placement, devices, elapsed_s = None, "finished", "", ("cpu",), 12.0
    peak_bytes = peak_device_bytes = (0,)

    def __init__(self, name, *ranks):
        self.name, self.results, self.world_size = name, list(ranks), len(ranks)
        self.recorded, self.history = History(len(ranks)), pd.DataFrame({"rank": [], "samples": []})
        self.over = SimpleNamespace(is_set=lambda: True)

    def progress(self, rank):
        return SimpleNamespace(last={}), None


def rank(flops, load=None, steps_s=(0.01, 0.02, 0.03)):
    memory = {"parameters": 2**20}
    program = Program((Piece("forward", flops=flops),))
    timed = Timed()
    return Measured({}, timed, steps_s, program, math.nan, memory, (memory,), load=load or Load())


@pytest.fixture
def compared():
    idle, busy = Load(2.0, 1.1, 1.0), Load(2.0, 2.0 * host.cores() + 2.0, 1.0)
    runs = {"one process": Run("one process", rank(4e9, idle)), "DDP": Run("DDP", rank(2e9, busy), rank(2e9, busy))}
    return Comparison(runs)


def test_a_page_says_on_what_it_was_measured_and_when_and_needs_no_network(compared, tmp_path):
    page = compared.save(tmp_path / "page.html", "Mine <&>", "for Monday")
    text = page.read_text()
    for said in (
        "Mine &lt;&amp;&gt;",
        "for Monday",
        host.processor(),
        "PyTorch",
        "20.0 (12.0 – 28.0; 3 steps)",
        "speed-up over one process",
        "efficiency",
        LAPTOP.source,
    ):
        assert said in text, said
    assert re.search(r"20\d\d-\d\d-\d\d", text)
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r'(src|href)="https?://', outside)
    assert not re.search(r"<script[^>]*src=", text)
    assert text.count("Plotly.newPlot(") == len(compared.pictures())
    assert text.count("plotly.js v") == 1, "Plotly once, however many charts"


def test_a_machine_that_others_used_is_said(compared, tmp_path):
    text = compared.save(tmp_path / "page.html").read_text()
    assert "(during DDP) of" in text
    assert "during one process" not in text
    assert others_cores(compared.runs["one process"]) == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["page.pdf", "page.csv", "page"])
def test_another_ending_is_refused(compared, tmp_path, name):
    with pytest.raises(ValueError, match="saved as .html, got 'page"):
        compared.save(tmp_path / name)
    with pytest.raises(ValueError, match="no run has begun"):
        Comparison({}).save(tmp_path / "page.html")


def test_a_speed_up_counts_samples_and_devices():
    one, two = Run("one", rank(4e9)), Run("two", rank(4e9), rank(4e9))
    for run, samples in ((one, 8), (two, 8)):
        rows = [{"rank": number, "samples": samples} for number in range(run.world_size) for _ in range(3)]
        run.history = pd.DataFrame(rows)
    found = speed_up(two, one, Devices(1.0, 1.0, 0.0))
    assert found == {"speed-up": pytest.approx(2), "efficiency": pytest.approx(1)}, "twice the samples in the same time"


def test_how_long_the_others_will_take_is_said_where_it_is_long():
    over = SimpleNamespace(elapsed_s=150.0)
    assert time_to_come([over], ["b", "c"]) == "about 5 min for b, c"
    assert time_to_come([over], []) == ""
    assert time_to_come([SimpleNamespace(elapsed_s=5.0)], ["b", "c"]) == "", "not worth a line"
    assert time_to_come([], ["b"]) == ""
