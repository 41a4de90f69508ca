"""Secrets stay where they were given: reports and jobs are without them."""

from __future__ import annotations

import linecache
import textwrap
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

import labkit
from labkit import launcher
from labkit.engines import base
from labkit.protocol import pickling
from labkit.protocol.redaction import LEFT_OUT, has_secret_name, looks_random, redact, shown
from labkit.rank.describe import named
from labkit.ui import kernel
from tests.support.fake_engine import FakeEngine

HEX = "f3a9c8e7b1d24f6a9c8e7b1d24f6aa11"

# By name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("password", "abc"), ("db_password", 1234), ("api_key", "abc"), ("apiKey", "abc"), ("HF_TOKEN", "abc")),
        *(("client_secret", ["abc"]), ("credentials", {"user": "abc"}), ("AWS_SECRET_ACCESS_KEY", "abc")),
        *(("auth", "abc"), ("wandb-key", "abc"), ("tokens", ["abc", 1]), ("session", HEX), ("cookie", HEX)),
    ],
)
def test_a_secret_is_known_by_its_name(name, value):
    assert has_secret_name(name, value)
    assert shown(name, value) == LEFT_OUT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_tokens", 512), ("tokens", [101, 2054, 102]), ("key_dim", 64), ("n_keys", 8), ("tokens_per_s", 1e6)),
        *(("eos_token", "</s>"), ("pad_token_id", 0), ("monitor_key", "loss"), ("token_type", "word")),
        *(("hf_token", None), ("use_auth_token", False), ("monkey", "abc"), ("tokenizer", "gpt2"), ("author", "abc")),
        *(("session", "monday"), ("passes", 3), ("keyboard", "abc"), ("lr", 0.1), ("name", "abc"), (3, "abc")),
    ],
)
def test_what_only_sounds_like_one_is_shown(name, value):
    assert not has_secret_name(name, value)
    assert shown(name, value) is value


# By how it looks


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("postgres://reader:abc@host/db", "postgres://…@host/db"),
        ("postgres://reader:a@bc@host/db", "postgres://…@host/db"),
        ("postgres://reader:a/bc@host/db", "postgres://…@host/db"),
        ("redis://:abc@host", "redis://…@host"),
        ("https://abc@host/1", "https://…@host/1"),
        ("https://host/x?token=abc&page=2", "https://host/x?token=…&page=2"),
        ("Server=host;Password=abc;Port=1", "Server=host;Password=…;Port=1"),
        ("curl -H 'Authorization: Bearer abc'", "curl -H 'Authorization: Bearer …"),
        ("hf_abcabcabc and sk-abcabcabc", "… and …"),
        ("ghp_abcabc, glpat-abcabc, xoxb-abcabc, AKIAabcabc", "…, …, …, …"),
        ("eyJhbGciOi.eyJzdWIi.abc_", "…"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "… RSA PRIVATE KEY-----"),
    ],
)
def test_secrets_in_a_text_are_left_out_of_it(text, rest):
    assert redact(text) == rest


@pytest.mark.parametrize(
    "text",
    [
        *("https://host:8080/x", "see https://a.b/c, or mail x@y.org", "git@github.com:a/b", "ssh://git@host/a"),
        *("sklearn", "risk-averse-model", "task-sk", "https://{user}:{password}@host", "?token={token}", "max_token=5"),
        *("Bearer {token}", "", "a password", "key=loss"),
    ],
)
def test_an_ordinary_text_stays_as_it_is(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "random"),
    [(HEX, True), ("x" * 40, False), ("a sentence of some words", False), ("AbC123/+=" * 5, True), (HEX[:19], False)],
)
def test_a_key_is_long_without_spaces_and_of_many_characters(text, random):
    assert looks_random(text) is random


# In reports

ARGUMENTS = {
    "hf_token": "abc",
    "database": "postgres://reader:abc@host/db",
    "hosts": ["https://abc@one", "https://two"],
    "keys": ["abc"],
    "max_tokens": 512,
    "lr": 0.1,
    "name": "first",
}


def test_a_report_of_a_failure_leaves_out_the_same():
    for name, value in ARGUMENTS.items():
        assert "abc" not in named(name, value)
    assert named("tokens", torch.tensor([1])) == "int64 [1] on cpu: 1", "an attention's keys, a text's tokens"


# What a job carries


def a_cell(monkeypatch, number, text, names):
    """Run a cell as IPython does."""
    file = f"/tmp/ipykernel_99999/{number}.py"
    text = textwrap.dedent(text)
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    numbers = {**kernel.cell_numbers(), file: number}
    monkeypatch.setattr(kernel, "cell_numbers", lambda: numbers)
    exec(compile(text, file, "exec"), names)
    return file


@pytest.fixture
def cells(monkeypatch):
    names = {"__name__": "__main__", "labkit": labkit}
    files = [
        a_cell(monkeypatch, 1, "print_nothing = lambda: 'a secret of another cell'", names),
        a_cell(monkeypatch, 2, "def helper():\n    return 'helped'", names),
        a_cell(monkeypatch, 3, "class Model:\n    def forward(self):\n        return helper()", names),
        a_cell(monkeypatch, 4, "def train(worker):\n    return Model().forward()", names),
        a_cell(monkeypatch, 5, "def other(worker):\n    return 'something else'", names),
        a_cell(monkeypatch, 12, "def twelve(worker):\n    return 12", names),
    ]
    yield SimpleNamespace(names=names, files=files)
    for file in files:
        del linecache.cache[file]


class Target(base.Target):
    """Takes a job, and keeps it."""

    is_here, world_size = True, 2

    def engine(self, name, stall_s):
        self.taken = FakeEngine(2)
        self.taken.start = lambda job: setattr(self, "job", job)
        return self.taken


def test_a_job_carries_the_cells_that_its_function_reaches_and_no_others(cells):
    target = Target()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "show_run", lambda run, *_: run)
        run = labkit.launch(cells.names["train"], on=target, live=False)
    run.kill()
    assert [cell.title for cell in target.job.cells.values()] == ["Cell In[2]", "Cell In[3]", "Cell In[4]"]
    assert b"a secret of another cell" not in cloudpickle.dumps(target.job)
    assert b"something else" not in cloudpickle.dumps(target.job)


def test_cells_are_told_apart_by_their_whole_names(cells):
    pickled = pickling.dumps(cells.names["twelve"])
    assert list(kernel.cells(pickled)) == [cells.files[-1]], "and not Cell In[1]"
    assert list(kernel.cells()) == cells.files


@pytest.mark.parametrize("files", [[], ["one.py"], ["one.py", "two.py"], ["/a/1", "/a/12", "/a/2"]])
def test_names_are_found_wherever_they_are(files):
    for wanted in files:
        assert wanted in kernel.files_named_in(b"x" * 100 + wanted.encode() + b"x", files)
    assert kernel.files_named_in(b"x/a/x", files) == []
