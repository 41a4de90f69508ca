"""A process that only starts ranks and relays what they say, as a cluster's node has one, does not import torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import labkit
from labkit.engines.local import LocalEngine
from labkit.rank.channels import pack
from tests.support.repository import ROOT

pytestmark = pytest.mark.spawns

RELAY = """
import pickle, sys
from labkit.engines import listener, local
from labkit.launchers import agent, ray_node, start
from labkit.protocol import events, framing, job
from labkit.protocol.packed import Packed
from labkit.rank import channels
sent = job.Job(Packed(b"a call"), 2, None, 0, 1, None, 0, 0.0, {}, {})
said = [events.Result(1, Packed(bytes(1 << 20))), events.Log(0, (), [], [], []), events.Exit(0, 1), sent]
messages = channels.Messages()
found = [each for word in said for part in channels.pack(word) for each in messages.add(bytes(part))]
assert bytes(found[0].value.data) == bytes(1 << 20) and bytes(found[-1].function.data) == b"a call"
assert found[1:3] == said[1:3]
assert "torch" not in sys.modules
"""


def test_an_engine_and_an_agent_are_imported_and_relay_what_ranks_say_without_torch():
    subprocess.run([sys.executable, "-c", RELAY], cwd=ROOT, check=True)


class Kept(Exception):  # noqa: N818 - it is what the test waits for
    """A job was about to be sent."""


def test_the_job_of_a_launch_is_passed_on_without_torch(tmp_path, monkeypatch):
    def keep(engine, job):
        (tmp_path / "job").write_bytes(b"".join(pack(job)))
        raise Kept

    monkeypatch.setattr(LocalEngine, "start", keep)
    with pytest.raises(Kept):
        labkit.launch(lambda worker: None, world_size=1, trace=2, live=False)
    code = """
import sys
from labkit.rank.channels import Messages
(job,) = Messages().add(open(sys.argv[1], "rb").read())
assert (job.world_size, len(job.hooks)) == (1, 1) and job.settings
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "job")], cwd=ROOT, check=True)
