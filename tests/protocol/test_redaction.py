"""Secrets stay where they were given: reports, exported scripts and jobs are without them."""

from __future__ import annotations

import linecache
import re
import sys
import textwrap
import warnings
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

import labkit
from labkit import launcher
from labkit.engines import base
from labkit.exporting import script
from labkit.exporting.secrets import Environment, lines_with_secrets, without_secrets
from labkit.protocol import pickling
from labkit.protocol.redaction import LEFT_OUT, has_secret_name, is_surely_secret, looks_random, redact, shown
from labkit.rank.describe import named
from labkit.ui import kernel
from tests.exporting.test_export import HEAD, exported, notebook  # noqa: F401 - fixtures
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
    assert is_surely_secret("text", text)


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
    assert not is_surely_secret("text", text)


@pytest.mark.parametrize(
    ("text", "random"),
    [(HEX, True), ("x" * 40, False), ("a sentence of some words", False), ("AbC123/+=" * 5, True), (HEX[:19], False)],
)
def test_a_key_is_long_without_spaces_and_of_many_characters(text, random):
    assert looks_random(text) is random


@pytest.mark.parametrize(
    ("name", "value", "is_one"),
    [
        *(("key", "loss", False), ("token", "<s>", False), ("key", HEX, True), ("WANDB_KEY", HEX, True)),
        *(("password", "abc", True), ("password", "", False), ("password", 1234, True), ("step", 1234, False)),
        *(("api_key", b"abc", True), ("tokens", ["abc"], False), ("name", HEX, False)),
    ],
)
def test_where_a_wrong_answer_changes_a_program_more_must_speak_for_it(name, value, is_one):
    assert is_surely_secret(name, value) is is_one


# One redaction for reports and scripts

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


def test_so_does_what_an_exported_script_notes_of_its_options(monkeypatch, tmp_path, capsys):
    def train(worker, hf_token="abc", lr=0.1, url="https://u:abc@host", keys=({"of": "abc"},)):
        pass

    chosen = script.options(train, {}, 0)
    with pytest.raises(SystemExit):
        chosen.parse(["--help"])
    said = capsys.readouterr().out
    assert "abc" not in said
    assert "--lr" in said
    assert "https://…@host" in said


# Exported scripts

SECRETS = HEAD + textwrap.dedent(
    f"""
    WANDB_KEY = "sk-abcabcabc"
    DATABASE = "postgres://reader:abc@host/db"
    PASSWORD = 1234
    SETTINGS = {{"api_key": "abc", "lr": 0.1, "key": "loss", "hosts": ["https://u:abc@one"]}}
    GREETING = "hello"

    class Client:
        token = "{HEX}"

    def login(key="hf_abcabcabc", *, auth="abc"):
        '''Logs in, as with https://u:abc@host.'''
        return key, auth  # such as sk-abcabcabc

    def train(worker, password="abc", extra_token="", steps=1):
        client = Client()
        found = client.login = "sk-abcabcabc"
        secret: str = "abc"
        rows = sorted([{{"key": 1}}], key=lambda row: row["key"])
        text = f"https://reader:{{secret}}@host"
        return WANDB_KEY, DATABASE, PASSWORD, SETTINGS, GREETING, login(), rows, text, found, password
    """
)


@pytest.fixture
def with_secrets(exported, tmp_path):  # noqa: F811
    with pytest.warns(UserWarning, match="train.py does not have the secrets that the notebook has") as warned:
        text = exported(SECRETS, extra_token="sk-defdefdef", steps=3)
    return text, str(warned[0].message), (tmp_path / "job" / "README.txt").read_text()


def test_an_exported_script_reads_secrets_from_the_environment(with_secrets, tmp_path):
    text, _, _ = with_secrets
    assert "abc" not in text
    assert "defdef" not in text
    assert HEX not in text
    assert "1234" not in text
    for line in (
        'WANDB_KEY = os.environ["WANDB_KEY"]',
        'DATABASE = os.environ["DATABASE"]',
        'PASSWORD = int(os.environ["PASSWORD_2"])',
        '"api_key": os.environ["API_KEY"], "lr": 0.1, "key": "loss", "hosts": [os.environ["HOSTS"]]',
        'GREETING = "hello"',
        'token = os.environ["TOKEN"]',
        'def login(key=os.environ["KEY"], *, auth=os.environ["AUTH"]):',
        "Logs in, as with https://…@host.",
        "# such as …",
        'found = client.login = os.environ["FOUND"]',
        'sorted([{"key": 1}], key=lambda row: row["key"])',
        'text = f"https://reader:{secret}@host"',
        '"extra_token": os.environ["EXTRA_TOKEN"], "steps": 3',
    ):
        assert line in text, line
    assert 'password=os.environ["PASSWORD"]' in text, "where there are several of a name, they have numbers"


def test_it_says_which_and_how_to_set_them(with_secrets, tmp_path):
    text, warned, readme = with_secrets
    read = set(re.findall(r'os\.environ\["(\w+)"\]', text))
    assert len(read) == 12
    for name in read:
        assert name in warned
        assert f"{name}=…" in readme
    assert '"WANDB_KEY": "…"' in readme


def test_with_them_set_it_is_the_notebooks_function(with_secrets, tmp_path, monkeypatch):
    text, _, _ = with_secrets
    environment = {"WANDB_KEY": "one", "PASSWORD": "three", "API_KEY": "two", "PASSWORD_2": "1234", "KEY": "four"}
    for name in ("DATABASE", "HOSTS", "TOKEN", "AUTH", "FOUND", "SECRET", "EXTRA_TOKEN"):
        environment[name] = "else"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names = {"__name__": "exported"}
    exec(compile(text, "train.py", "exec"), names)
    assert (names["WANDB_KEY"], names["PASSWORD"], names["SETTINGS"]["api_key"]) == ("one", 1234, "two")
    assert names["login"]()[0] == "four"


def test_without_secrets_nothing_is_said(exported, tmp_path):  # noqa: F811
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = exported(HEAD + "KEY = 'loss'\ndef train(worker, key='name'):\n    return {KEY: key}")
    assert "environ" not in text
    assert "environment" not in (tmp_path / "job" / "README.txt").read_text()


def test_a_module_that_is_copied_with_a_secret_is_named(exported, tmp_path, monkeypatch):  # noqa: F811
    module = tmp_path / "helpers_with_a_key.py"
    module.write_text('import os\n\nAPI_KEY = "abc"\n\n\ndef help():\n    return API_KEY\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match=r"helpers_with_a_key\.py, copied as it is, has .* a secret in line 3"):
        exported(HEAD + "from helpers_with_a_key import help\ndef train(worker):\n    return help()")
    del sys.modules["helpers_with_a_key"]


def test_a_source_keeps_its_lines_and_what_is_no_secret():
    text = 'def f(\n    a, password="""a\nbc""",\n    b="ü", auth="abc", c=1\n):\n    return a  # ö\n'
    environment = Environment()
    found = without_secrets(text, environment.expression)
    assert found.splitlines() == [
        "def f(",
        '    a, password=os.environ["PASSWORD"],',
        '    b="ü", auth=os.environ["AUTH"], c=1',
        "):",
        "    return a  # ö",
    ]
    assert sorted(environment.variables) == ["AUTH", "PASSWORD"]
    assert lines_with_secrets(text) == [2, 4]
    assert without_secrets("x = 1\n", environment.expression) == "x = 1\n"


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
