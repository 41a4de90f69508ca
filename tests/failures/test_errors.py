"""The pages of errors: every message that ends a run, or refuses one, names its page; each page has a real example."""

import ast
import functools
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.engines.arguments import naming
from labkit.failures.diagnosis import diagnose_own_error
from labkit.failures.facts import RankFacts
from labkit.failures.first_to_fail import diagnose
from labkit.failures.missed import RankCalls
from labkit.failures.stacks import Frame, RankStack
from labkit.launchers.ray import RayJob
from labkit.launchers.run_folder import RunFolder
from labkit.launchers.slurm import SlurmJob
from labkit.monitor.state import RunState
from labkit.protocol.events import Failure
from labkit.protocol.pages import FOLDER, explain, help_hint
from labkit.rank.debugging import Prompt
from labkit.rank.recorder import Collectives
from labkit.run import Run
from labkit.session.turns import Turns
from tests.failures import messages
from tests.failures.test_collectives import WORLD, call, pending
from tests.failures.test_diagnosis import CLOSED, GLOO_SIZES, died, lost, raised, returned
from tests.support.fake_engine import A_JOB, FakeEngine, a_worker
from tests.whole.test_launch import takes_steps, uses_a_lock

PACKAGE = Path(labkit.__file__).parent
PAGES = sorted(file.stem for file in FOLDER.glob("*.md"))
NAMED = re.compile(r'labkit\.explain\("(\w+)"\)')
HEADINGS = ["## An example", "## What to do"]


# Messages, each as its reader meets it


def failed(diagnosis):
    return str(labkit.WorkerFailed(diagnosis, Run(FakeEngine(), 2, "train")))


def refused(kind, function, *arguments, **options):
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    return str(error.value)


def out_of_memory(_):
    killed = died(1, 1.0, -signal.SIGKILL, last_step=5, peak_bytes=int(11.5 * 2**30), out_of_memory="killed")
    return failed(diagnose([lost(0, 1.1), killed]))


def returned_early(_):
    return failed(diagnose([returned(0), lost(1, 1.1)]))


def different_collectives(_):
    def stood(rank, line, shape, summary):
        calls = (*(call(number) for number in range(1, 6)), pending(6, shape=shape))
        library = torch.distributed.distributed_c10d.__file__
        stack = RankStack(rank, [Frame(library, 1, "all_reduce"), Frame("failures.py", line, "work")], {})
        called = RankCalls(rank, Collectives(rank, calls, (WORLD,)), stack.place)
        return raised(rank, 1 + rank, summary, stack=stack, called=called)

    ranks = [stood(0, 221, (1,), CLOSED), stood(1, 92, (100_000,), GLOO_SIZES), stood(2, 221, (1,), CLOSED)]
    return failed(diagnose(ranks))


def not_a_number(_):
    worker, batcher, _channel = a_worker(watches_nan=True)
    worker.log(loss=1.0)
    said = refused(FloatingPointError, worker.log, loss=float("nan"))
    batcher.close()
    return said


def still_going(_):
    run = Run(FakeEngine(), 2, "train")
    run.start(A_JOB)
    said = refused(TimeoutError, run.wait, 0.01)
    run.kill()
    assert run.over.wait(60)
    return said


def bad_argument(_):
    return refused(ValueError, labkit.launch, takes_steps, 1, world_size=0)


def cannot_be_sent(_):
    return refused(ValueError, labkit.launch, uses_a_lock)


def nobody_answers(_):
    channel = SimpleNamespace(rank=0)
    hook = Prompt("the notebook runs headless")
    with hook.around(A_JOB, channel), pytest.raises(RuntimeError) as error:
        breakpoint()
    return str(error.value)


def checkpoint(folder):
    saved = labkit.Checkpoint(folder, model=torch.nn.Linear(1, 1))
    for _ in range(2):
        saved.epoch, saved.step = saved.epoch + 1, saved.step + 3
        path = saved.save()
    (path / "rank-0.pt").write_bytes(b"truncated.")
    return refused(labkit.checkpoint.CheckpointError, labkit.checkpoint.load, path).replace(str(folder), "…")


def session(_):
    turns = Turns()
    turns.of("train").take(FakeEngine())
    return refused(RuntimeError, turns.of("again").take, FakeEngine())


def ended_with(ended):
    state = RunState(2, 0.0, 0.0)
    state.take(ended, 0.0, 0.0)
    return failed(state.ended)


def slurm(_):
    job = SlurmJob(None, RunFolder("/nowhere"), {"nodes": 1, "ranks_per_node": 2})
    job.job_id, job._state = "5", "TIMEOUT"
    return ended_with(job.why_over([0, 1]))


def ray(_):
    job = RayJob(labkit.Ray(nodes=2, ranks_per_node=2))
    job._addresses = ["10.0.0.6", "10.0.0.7"]
    job._note_lost(1, RuntimeError("The actor died because its node has died."))
    return ended_with(job.why_over([2, 3]))


def labkit_failed(_):
    return failed(diagnose_own_error(OSError(28, "No space left on device"), "", ""))


MADE = [
    *(out_of_memory, returned_early, different_collectives, not_a_number, still_going, bad_argument, cannot_be_sent),
    *(nobody_answers, checkpoint, session, slurm, ray, labkit_failed),
]
"""Named as their pages; the others' messages are kept by test_failures.py and test_hangs.py, from real ranks."""


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_message_ends_with_its_page_and_of_a_run_with_the_cause_once_more_and_is_as_it_was_kept(make, tmp_path):
    page, said = make.__name__, make(tmp_path)
    first, *_, last = said.splitlines()
    if last.startswith("WorkerFailed: "):  # which is all that pytest and nbmake show
        assert last == f"WorkerFailed: {first}"
        assert said.splitlines()[-3] == help_hint(page)
    else:
        assert last == help_hint(page)
    assert len(NAMED.findall(said)) == 1
    messages.assert_as_kept(f"error {page}", said)


def test_every_page_has_a_message_that_was_kept():
    lines = {line for file in messages.HERE.glob("*.txt") for line in file.read_text().splitlines()}
    assert {help_hint(page) for page in PAGES} <= lines


def test_an_error_of_labkits_own_on_a_rank_names_its_own_page_and_no_other():
    said = not_a_number(None)
    traceback = f"Traceback (most recent call last):\nFloatingPointError: {said}\n"
    rank = RankFacts(0, failure=Failure(0, 1.0, "running", f"FloatingPointError: {said.splitlines()[0]}", traceback))
    assert NAMED.findall(failed(diagnose([rank]))) == ["not_a_number"]


def test_an_error_from_inside_a_launch_keeps_the_readers_traceback():
    try:
        with naming("bad_argument"):
            int("no number")
    except ValueError as error:
        frames = list(_functions(error.__traceback__))
        said = str(error)
    assert said.endswith(help_hint("bad_argument"))
    assert frames == ["test_an_error_from_inside_a_launch_keeps_the_readers_traceback"]


def _functions(trace):
    while trace is not None:
        yield trace.tb_frame.f_code.co_name
        trace = trace.tb_next


# Pages


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_it_is_about_shows_a_message_as_it_was_kept_and_what_to_do(page):
    text = explain(page)
    title, *_ = text.splitlines()
    assert title.endswith(".")
    assert len(title) <= 110
    assert re.findall("^## .*", text, re.MULTILINE) == HEADINGS
    _, example, advice = re.split("^## .*", text, flags=re.MULTILINE)
    shown = messages.plain("\n".join(line.removeprefix("    ") for line in example.strip("\n").splitlines()))
    parts = [part.strip("\n") for part in re.split("^…$", shown, flags=re.MULTILINE)]
    kept = [file.name for file in messages.HERE.glob("*.txt") if all(part in file.read_text() for part in parts)]
    assert kept, shown
    assert len(re.findall(r"^\* ", advice, re.MULTILINE)) >= 2


def test_a_page_is_shown_as_a_message_names_it_and_the_first_lists_all():
    for page in PAGES:
        assert eval(help_hint(page).removeprefix("What to do: ")) == explain(page)
        assert f'* `labkit.explain("{page}")`: {explain(page).splitlines()[0]}' in explain().splitlines()
    assert repr(explain("hang")) == explain("hang")._repr_markdown_() == (FOLDER / "hang.md").read_text()
    named = re.findall(r"`labkit\.explain\(.(\w+).\)`", "".join(map(explain, PAGES)))
    assert named
    assert set(named) <= set(PAGES)
    with pytest.raises(ValueError, match="there is no page 'hangs'; there are address_in_use, bad_argument"):
        explain("hangs")


# What of the code names a page


@functools.cache
def trees():
    """Return the package's modules as trees of syntax, by their paths."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}


def test_every_page_is_named_by_a_message_and_every_named_page_is_there():
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    assert set(PAGES) <= set(re.findall(r"""["'](\w+)["']""", sources))
    named = re.findall(r"""(?:(?:help_hint|naming|Known)\(\s*|\bpage=)["'](\w+)["']""", sources)
    assert set(named) <= set(PAGES)


ENDINGS = {"RuntimeError", "TimeoutError", "FloatingPointError"}
"""Kinds of errors that refuse a run, or end one. A TypeError or ValueError of `launch` names its page in `naming`."""

SAY_IT_ALL = {
    "rank/device.py": "a GPU that has gone since: the message has every step",
    "rank/channels.py": "said by a rank, in a failure that names rank_failed",
}


def test_what_ends_or_refuses_a_run_names_its_page():
    without = [
        f"{file}:{node.lineno}"
        for file, tree in trees().items()
        if file not in SAY_IT_ALL
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in ENDINGS
        if not any("help_hint(" in ast.unparse(part) for part in node.exc.args)
    ]
    assert without == []
