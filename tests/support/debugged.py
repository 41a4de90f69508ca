"""Ranks to debug without processes: threads, each with Python's own debugger and a channel to a run nobody follows."""

from __future__ import annotations

import sys
import threading
import time

from labkit.debugger.debugger import Debugger
from labkit.protocol.events import Exit, Started
from labkit.rank.breakpoints.conversation import HOLD, LINE, Conversation, place_of
from labkit.rank.breakpoints.prompt import RankPdb
from labkit.rank.channels import Channel
from labkit.rank.stop_agreement import Stopped
from labkit.run import Run
from tests.support.fake_engine import FakeEngine

LONG_S = 60


class RankThread(Channel):
    """One rank: calls `function(rank, stop, ask)`; `stop()` stops it there, `ask(prompt)` is its `input`."""

    def __init__(self, rank, function, ranks):
        super().__init__()
        self.rank, self._ranks, self._function = rank, ranks, function
        self.outcome = None
        self.conversation = Conversation(self)
        self.listen = self.conversation.receive
        self.pdb = RankPdb(self.conversation, {__file__: "Cell In[0]"})
        self.thread = threading.Thread(target=self._work, daemon=True)

    def send(self, event):
        self._ranks.run._follower.take(event)

    def receive(self, word):
        if word == "stop":
            self.stop_asked_s = 0.0
        self.listen(word)

    def _stop(self):
        self.pdb.stop(sys._getframe(1), "", None)

    def _ask(self, prompt, kind="input"):
        answer = self.conversation.ask(kind, prompt, "", place_of(sys._getframe(1)))
        self.conversation.let_go("")
        return answer

    def _work(self):
        try:
            self.outcome = self._function(self.rank, self._stop, self._ask)
        except Stopped:
            self.outcome = "stopped"
        finally:
            sys.settrace(None)
            self.pdb.clear_all_breaks()
        self.send(Exit(self.rank, 0))


class Ranks(FakeEngine):
    sends_words = True

    """Ranks at work, with a `Debugger` beside their run."""

    def __init__(self, function, world_size=2, way="", cells=None):
        super().__init__(world_size)
        self.words = []
        self.debugger = Debugger(live=None, wait=True)
        self.debugger._cells, self.debugger._way = cells or {}, way
        self.run = Run(self, world_size, "train", observers=[self.debugger])
        self.ranks = [RankThread(rank, function, self) for rank in range(world_size)]
        for each in self.ranks:
            each.send(Started(each.rank))
        for each in self.ranks:
            each.thread.start()

    def say(self, rank, word):
        self.words.append((rank, word))
        self.ranks[rank].receive(word)

    def ask_to_stop(self):
        for each in self.ranks:
            each.receive("stop")

    def until(self, condition):
        deadline = time.monotonic() + LONG_S
        while True:
            with self.debugger._changed:  # not between a question and its text
                if condition():
                    return
            assert time.monotonic() < deadline, (self.debugger.said, self.debugger.where, self.debugger.prompt)
            time.sleep(0.002)

    def until_asked(self, *ranks):
        self.until(lambda: set(ranks) <= set(self.debugger._asking) and self.debugger.prompt)

    def type(self, *lines):
        """Type lines, each once the debugger has a prompt; return what has been said since."""
        before = len(self.debugger.said)
        for line in lines:
            self.until(lambda: self.debugger.prompt)
            self.debugger.submit(line)
        self.until(lambda: self.debugger.prompt or not self.run.paused_by)
        return self.debugger.said[before:]

    def outcomes(self):
        for each in self.ranks:
            each.thread.join(LONG_S)
        return [each.outcome for each in self.ranks]

    @property
    def lines_sent(self):
        return [(rank, word.removeprefix(LINE)) for rank, word in self.words if word != HOLD]
