"""`launch(…, log_to=…)`: what trackers get, and that none of them can hold up a run. Most of it with trackers that are
made up, on runs without ranks; then with the real libraries, whose files are read back. Nothing here needs a network.
"""

from __future__ import annotations

import importlib.util
import struct
import threading
import tracemalloc
from array import array
from pathlib import Path

import cloudpickle
import pytest

import labkit
from labkit.monitor.history import History
from labkit.protocol import events
from labkit.run import Run
from labkit.trackers import following
from labkit.trackers.base import plain
from labkit.trackers.curves import PATIENCE_S, WAITING_STEPS, Curves
from labkit.trackers.since import Place, since
from tests.conftest import LONG_S
from tests.support.fake_engine import FakeEngine, a_job

STEPS = 20


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a library may take long to be imported."""
    monkeypatch.setattr(following, "CLOSE_S", LONG_S)


def calls(rank, steps, names=("loss",), value=1.0, second=0.1):
    """Log calls of a rank at these steps; every value is `value`, a call is made each `second`."""
    times = array("d", [second * number for number in range(len(steps))])
    return events.Log(rank, names, array("q", steps), times, array("d", [value] * len(steps) * len(names)))


class Notes:
    """A tracker that keeps what it gets."""

    def __init__(self, by_rank=False):
        self.by_rank = by_rank
        self.rows, self.others = [], []

    def begin(self, name, parameters):
        self.others.append(("begin", name, parameters))

    def log(self, step, values):
        self.rows.append((step, values))

    def end(self, status):
        self.others.append(("end", status))

    def close(self):
        self.others.append(("close",))

    def __repr__(self):
        return type(self).__name__


class TimedNotes(Notes):
    """Is told when each step was logged, too."""

    def __init__(self):
        super().__init__()
        self.times_s = []

    def log(self, step, values, time_s):
        self.times_s.append(time_s)


def begun(world_size=2):
    """A run without ranks, which have begun all the same."""
    engine = FakeEngine(world_size)
    run = Run(engine, world_size, "train")
    for rank in range(world_size):
        engine.arrived.put(events.Started(rank))
    run.start(a_job())
    return run, engine


def log_and_end(run, engine, steps=range(STEPS)):
    for rank in range(run.world_size):
        engine.arrived.put(calls(rank, list(steps), value=float(rank)))
    for rank in range(run.world_size):
        engine.arrived.put(events.Result(rank, cloudpickle.dumps(None)))
        engine.arrived.put(events.Exit(rank, 0))
    assert run.over.wait(LONG_S)
    assert run.status == "finished"


def tracked(*trackers):
    """A run that has logged and ended, with these trackers."""
    run, engine = begun()
    with following.Following(run, list(trackers), {"lr": 0.1}):
        log_and_end(run, engine)
    return run


# What has come since


def most_bytes(look):
    """What a look allocates at most."""
    tracemalloc.start()
    try:
        look()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_look_that_finds_nothing_new_copies_nothing():
    history = History(1)
    history.add(calls(0, list(range(50_000))))
    new, place = since(history, Place())
    assert sum(len(log.steps) for log in new) == 50_000
    assert most_bytes(lambda: list(since(history, place)[0])) < 5_000


@pytest.mark.parametrize("names", [[("loss", "accuracy")], [("loss",), ("accuracy",)]], ids=["together", "in turn"])
def test_a_first_look_at_many_values_has_no_object_for_each(names):
    history, count = History(1), 20_000
    for step in range(count):
        for each in names:
            history.add(calls(0, [step], each))
    assert len(history.names) == 2
    found = []
    # Of each step one or two calls of 24 bytes and two values of 8, as they are kept, and where the names change.
    assert most_bytes(lambda: found.append(sum(len(log.values) for log in since(history, Place())[0]))) < 150 * count
    assert found == [2 * count]


# Which steps of which curves


def curves_of(*logs, world_size=2, by_rank=False):
    """What is written at once, and what once all ranks have ended."""
    curves = Curves(world_size, by_rank)
    for log in logs:
        curves.take(log)
    return pairs(curves.ready()), pairs(curves.ready(ended=range(world_size)))


def pairs(rows):
    """Steps and values, without the time."""
    return [(row.step, row.values) for row in rows]


def test_a_mean_is_written_once_every_rank_has_logged_the_step():
    at_once, later = curves_of(calls(0, [0, 1, 2], value=1.0), calls(1, [0, 1], value=3.0))
    assert at_once == [(0, {"loss": 2.0}), (1, {"loss": 2.0})]
    assert later == []


def test_the_least_and_the_greatest_step_are_written():
    at_once, _ = curves_of(calls(0, [-(2**63), 2**63 - 1]), world_size=1)
    assert [step for step, _ in at_once] == [-(2**63), 2**63 - 1]


def test_of_ranks_that_log_other_steps_the_mean_is_of_those_they_share():
    at_once, _ = curves_of(calls(0, [0, 1, 2, 3, 4]), calls(1, [0, 2, 4]))
    assert [step for step, _ in at_once] == [0, 2, 4]


def test_a_value_that_one_rank_alone_logs_is_written_when_the_others_have_had_time_or_have_ended():
    at_once, later = curves_of(calls(0, [0, 1, 2]))
    assert (len(at_once), len(later)) == (0, 3)
    at_once, later = curves_of(calls(0, list(range(6)), second=PATIENCE_S / 4))
    assert (len(at_once), len(later)) == (6, 0)


def test_when_all_begin_again_a_step_that_was_written_is_not_written_again():
    curves = Curves(2, by_rank=False)
    curves.take(calls(0, [0, 1, 2, 3]))
    curves.take(calls(1, [0, 1, 2]))
    assert [row.step for row in curves.ready()] == [0, 1, 2]
    curves.begin_again()  # from a checkpoint after step 1
    for rank in range(2):
        curves.take(calls(rank, [0, 1]))
        curves.take(calls(rank, [2, 3, 4], value=7.0))
    assert pairs(curves.ready()) == [(3, {"loss": 7.0}), (4, {"loss": 7.0})]
    assert curves.again == 0


def test_a_step_that_comes_once_more_is_counted_and_not_written():
    curves = Curves(1, by_rank=False)
    curves.take(calls(0, [0, 1, 2, 1, 2]))
    assert [row.step for row in curves.ready()] == [0, 1, 2]
    assert curves.again == 2


def test_steps_that_begin_again_have_a_curve_of_their_own():
    """Several fits in one run, or folds; a step that comes again alone is no new one."""
    fit = [("loss", step) for step in range(3)] + [("val", 2)]
    curves = Curves(2, by_rank=False)
    for name, step in [*fit, *fit, *fit[:1]]:
        for rank in range(2):
            curves.take(calls(rank, [step], (name,)))
    found = {}
    for row in curves.ready():
        for name in row.values:
            found.setdefault(name, []).append(row.step)
    assert found == {"loss": [0, 1, 2], "val": [2], "loss/2": [0, 1, 2], "val/2": [2], "loss/3": [0]}
    assert (curves.again, curves.began_again) == (0, (0, 0, "loss/2"))


def test_a_row_has_the_time_at_which_its_last_value_was_logged():
    curves = Curves(2, by_rank=False)
    curves.take(calls(0, range(3), second=1.0))
    curves.take(calls(1, range(3), second=2.0))
    assert [row.time_s for row in curves.ready()] == [0.0, 2.0, 4.0]


def test_what_waits_for_a_slower_rank_does_not_grow_without_end():
    curves = Curves(2, by_rank=False)
    curves.take(calls(1, [0]))
    curves.take(calls(0, list(range(2 * WAITING_STEPS))))
    (curve,) = curves._curves.values()
    assert len(curve._waiting) <= WAITING_STEPS + 1


def test_arguments_that_a_tracker_can_show_are_kept():
    given = {"lr": 0.1, "layers": [8, 8], "name": "a", "none": None, "data": object(), "many": list(range(100))}
    assert plain(given) == {"lr": 0.1, "layers": "[8, 8]", "name": "a", "none": None}


# Trackers that are slow, full, dead


def test_a_tracker_gets_every_step_once_in_order_with_arguments_and_outcome():
    notes, by_rank = Notes(), Notes(by_rank=True)
    tracked(notes, by_rank)
    assert notes.rows == [(step, {"loss": 0.5}) for step in range(STEPS)]
    assert by_rank.rows == [(step, {"loss/rank 0": 0.0, "loss/rank 1": 1.0}) for step in range(STEPS)]
    assert notes.others == [("begin", "train", {"lr": 0.1}), ("end", "finished"), ("close",)]


def test_log_and_close_are_all_that_a_tracker_needs():
    class Least:
        steps, closed = [], False

        def log(self, step, values):
            self.steps.append(step)

        def close(self):
            self.closed = True

    least = Least()
    tracked(least)
    assert least.steps == list(range(STEPS))
    assert least.closed


class Full(Notes):
    def log(self, step, values):
        if step >= 5:
            raise OSError(28, "No space left on device")
        super().log(step, values)


class Stuck(Notes):
    """Hangs in one of its methods until the test lets it go."""

    def __init__(self, where):
        super().__init__()
        self.go_on = threading.Event()
        method = getattr(self, where)

        def hang(*arguments):
            self.go_on.wait(LONG_S)
            method(*arguments)

        setattr(self, where, hang)


def test_a_full_tracker_is_named_once_and_the_others_have_everything(capsys):
    full, notes = Full(), Notes()
    tracked(full, notes)
    assert len(notes.rows) == STEPS
    assert capsys.readouterr().err.splitlines() == [
        "train: Full failed at step 5: OSError: [Errno 28] No space left on device. The run is not affected",
        f"train: Full lacks {STEPS - 5} log calls of the run, which run.history has",
    ]
    assert full.others[-1] == ("close",), "so that what it has is there"


@pytest.mark.parametrize(
    ("where", "there"), [("begin", "no step"), ("log", "no step"), ("close", f"nothing after step {STEPS - 1}")]
)
def test_a_dead_tracker_is_left_alone_after_a_while_and_named(where, there, monkeypatch, capsys):
    monkeypatch.setattr(following, "CLOSE_S", 0.3)
    stuck, notes = Stuck(where), Notes()
    try:
        tracked(stuck, notes)
        assert len(notes.rows) == STEPS
        assert capsys.readouterr().err == (
            f"train: Stuck was not done 0.3 s after the run's end, and is left alone: it may have {there}\n"
        )
    finally:
        stuck.go_on.set()


def test_a_tracker_that_cannot_begin_is_named_and_asked_no_more(capsys):
    class Refused(Notes):
        def begin(self, name, parameters):
            raise ConnectionError("no route to host")

    refused = Refused()
    tracked(refused)
    assert refused.rows == []
    assert capsys.readouterr().err == (
        "train: Refused could not begin: ConnectionError: no route to host. The run is not affected\n"
    )


def test_while_a_tracker_hangs_the_run_goes_on_and_ends(monkeypatch):
    monkeypatch.setattr(following, "CLOSE_S", 0.1)
    stuck = Stuck("log")
    try:
        run, engine = begun()
        with following.Following(run, [stuck], {}):
            log_and_end(run, engine, range(50_000))
        assert run.recorded.progress(0).last_step == 49_999
    finally:
        stuck.go_on.set()


def test_a_run_that_is_over_can_be_given_to_a_tracker(capsys):
    run, engine = begun()
    log_and_end(run, engine)
    notes = Notes()
    labkit.trackers.follow(run, notes, {"lr": 0.1})
    assert len(notes.rows) == STEPS
    assert notes.others[0] == ("begin", "train", {"world_size": 2, "lr": 0.1})
    timed = TimedNotes()
    labkit.trackers.follow(run, timed)
    assert_logged_times(timed.times_s, run)


# What cannot be used is said before any rank starts: these tests start no process


@pytest.mark.parametrize(
    ("log_to", "error", "said"),
    [
        ("tensorbord", ValueError, "log_to has no tracker 'tensorbord'; it knows tensorboard, mlflow, wandb, trackio"),
        ([Notes], TypeError, "is a class; call it"),
        (object(), TypeError, "has no log and no close"),
        ([print], TypeError, "has no log and no close"),
    ],
)
def test_what_is_no_tracker_is_refused_before_any_rank_starts(log_to, error, said):
    with pytest.raises(error, match=said):
        labkit.launch(lambda worker: None, world_size=2, log_to=log_to)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb", "trackio"])
def test_a_library_that_is_not_installed_is_said_before_any_rank_starts(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package '{name}'.*no rank was started.*pip install"):
        labkit.launch(lambda worker: None, world_size=2, log_to=name)


def test_a_function_may_not_call_its_own_parameter_log_to():
    with pytest.raises(ValueError, match="keeps log_to=… for itself"):
        labkit.launch(lambda worker, log_to: None, log_to=[Notes()])


# Launched


@pytest.mark.spawns
def test_a_launch_writes_to_its_trackers_what_is_in_its_history(ranks):
    def train(worker, lr, steps=1):
        for step in range(steps):
            worker.log(loss=lr * step + worker.rank)

    notes = Notes(by_rank=True)
    run = labkit.launch(train, 0.5, steps=STEPS, on=ranks, log_to=notes, live=False)
    written = {(step, label): value for step, values in notes.rows for label, value in values.items()}
    logged = {(row.step, f"loss/rank {row.rank}"): row.loss for row in run.history.itertuples()}
    assert written == logged
    assert len(logged) == 2 * STEPS
    assert notes.others == [
        ("begin", "train", {"steps": STEPS, "lr": 0.5, "world_size": 2}),
        ("end", "finished"),
        ("close",),
    ]


@pytest.mark.spawns
def test_of_a_run_that_fails_the_tracker_has_what_was_logged(ranks):
    def train(worker):
        worker.log(loss=1.0)
        raise ValueError("bad batch")

    notes = Notes()
    with pytest.raises(labkit.WorkerFailed, match="bad batch"):
        labkit.launch(train, on=ranks, log_to=[notes], live=False)
    assert notes.rows == [(0, {"loss": 1.0})]
    assert notes.others[-2:] == [("end", "failed"), ("close",)]


# The real libraries


def assert_logged_times(times_s, run):
    """Each step has the time at which it was logged, and not that at which it was written."""
    expected = run.history.groupby("step")["time_s"].max() + run.start_s
    assert times_s == pytest.approx(expected.tolist(), abs=0.01)


def test_tensorboard_has_curves_and_arguments(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked(
        labkit.trackers.TensorBoard(tmp_path / "a"), labkit.trackers.TensorBoard(tmp_path / "b", by_rank=True)
    )
    read = EventAccumulator(str(tmp_path / "a")).Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(step, 0.5) for step in range(STEPS)]
    assert b"lr" in read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert_logged_times([event.wall_time for event in read.Scalars("loss")], run)
    read = EventAccumulator(str(tmp_path / "b")).Reload()
    assert read.Tags()["scalars"] == ["loss/rank 0", "loss/rank 1"]
    assert [event.value for event in read.Scalars("loss/rank 1")] == [1.0] * STEPS


@pytest.mark.spawns  # it asks `uname`
def test_mlflow_has_curves_arguments_and_outcome(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    # Files: a database would need two more packages, and a quarter of a minute to be made.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    store = (tmp_path / "mlruns").as_uri()
    tracker = labkit.trackers.MLflow("digits", uri=store, by_rank=True)
    run = tracked(tracker)
    client = MlflowClient(store)
    found = client.get_run(tracker.run_id)
    assert (found.info.run_name, found.info.status, found.data.params) == ("train", "FINISHED", {"lr": "0.1"})
    curve = client.get_metric_history(tracker.run_id, "loss/rank 1")
    assert sorted((each.step, each.value) for each in curve) == [(step, 1.0) for step in range(STEPS)]
    assert_logged_times([each.timestamp / 1000 for each in sorted(curve, key=lambda each: each.step)], run)
    # Names that it refuses: all values arrive, these under others, which is said once.
    run, engine = begun(1)
    names = ("loss", "acc@1", "mAP50(B)", "acc#1", "../up", "a//b")
    with following.Following(run, [tracker], {}):
        engine.arrived.put(calls(0, [0, 1], names, value=0.5))
        engine.arrived.put(events.Result(0, cloudpickle.dumps(None)))
        engine.arrived.put(events.Exit(0, 0))
        assert run.over.wait(LONG_S)
    there = client.get_run(tracker.run_id).data.metrics
    free = [f"{name}/rank 0" for name in ("loss", "acc_1", "mAP50_B_", "up", "a/b")]
    assert there == dict.fromkeys([*free, "acc_1/rank 0_2"], 0.5)
    said = capsys.readouterr().err
    assert said.count("MLflow takes no metric called 'acc@1/rank 0'; there it is 'acc_1/rank 0'") == 1
    assert said.count("loss") == 0


def records_of(file):
    """The records of a run that Weights & Biases has kept offline: LevelDB's log format after a header of 7 bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md; their own reader is no longer in Python.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole, block = file.read_bytes(), 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.spawns
def test_wandb_has_curves_and_arguments(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    try:
        followed = tracked(labkit.trackers.Wandb("digits", dir=str(tmp_path)))
        assert wandb.run is None, "the notebook's own run is left alone"
    finally:
        wandb.teardown()  # ends its process
    (file,) = Path(tmp_path).rglob("*.wandb")
    records = list(records_of(file))
    rows = [
        {item.key or item.nested_key[0]: item.value_json for item in r.history.item} for r in records if r.history.item
    ]
    assert [(float(row["step"]), float(row["loss"])) for row in rows] == [(step, 0.5) for step in range(STEPS)]
    assert_logged_times([float(row["_timestamp"]) for row in rows], followed)
    (run,) = [record.run for record in records if record.run.run_id]
    assert ("lr", "0.1") in {(item.key, item.value_json) for item in run.config.update}


if importlib.util.find_spec("trackio"):  # not where the tests' packages are: it wants an older Pillow

    def test_trackio_has_curves_and_arguments(tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        from trackio.sqlite_storage import SQLiteStorage

        tracked(labkit.trackers.Trackio("digits", auto_log_cpu=False))
        rows = SQLiteStorage.get_logs("digits", "train")
        assert [(row["step"], row["loss"]) for row in rows] == [(step, 0.5) for step in range(STEPS)]
        assert SQLiteStorage.get_run_config("digits", "train")["lr"] == 0.1
