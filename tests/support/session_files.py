"""A session's directory as tests write it, in the place of notebook, supervisors and ranks."""

from __future__ import annotations

import json

from labkit.session.directory import SessionDirectory
from tests.support.fake_engine import A_JOB


def a_session(path):
    made = SessionDirectory(path)
    made.create_for_jobs({"launcher": "test", "session": {"idle_s": None}})
    return made


def add_job(folder, number, text="", only=(0, 1)):
    job = folder.of_job(number)
    job.create(A_JOB, {"name": f"job {number}", "only": list(only), "processes": [0, 0]})
    (job.path / "what").write_text(text)
    return job


def write(path, *record):
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
