"""What a rank has printed comes before what it reports afterwards, whenever its listener looks."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from types import SimpleNamespace

from labkit.engines.listener import Listener
from labkit.protocol import events
from labkit.protocol.job import RankInfo
from labkit.rank.channels import EventQueue


def test_what_is_printed_while_an_event_is_read_comes_before_the_next_event():
    queue, (output, printed), (stacks, _), (alive, _) = EventQueue(), *(Pipe(duplex=False) for _ in range(3))
    receive, put = queue.receive, []

    def receive_later():
        """The rank prints, and is done, after its listener has looked what there is to read."""
        os.write(printed.fileno(), b"sum")
        queue.put(events.Exit(0, 0))
        return receive()

    queue.receive = receive_later
    process = SimpleNamespace(
        queue=queue, output=output, stacks=stacks, process=SimpleNamespace(sentinel=alive), send_job=lambda *_: None
    )
    queue.put(events.Expect(0, 3))
    listener = Listener(RankInfo(0, 0, 1, 1), process, put.append)
    assert listener.listen(SimpleNamespace(is_here=False, start_s=0.0)) == events.Exit(0, 0)
    assert put == [events.Output(0, "sum"), events.Expect(0, 3)]
