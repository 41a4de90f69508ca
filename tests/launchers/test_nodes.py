"""What agents tell each other goes through a socket that answers nobody without the run's token."""

import json
import socket

import pytest

from labkit.launchers.nodes import Board, BoardServer, Nodes, board_of_node_zero


@pytest.fixture
def server():
    """Node 0's agent, on loopback."""
    server = BoardServer(socket.create_server(("127.0.0.1", 0)), Board(), "secret")
    yield server
    server.shutdown()
    server.server_close()


def test_every_node_hears_every_word_once_and_all_have_one_sum(server):
    here = Nodes(server.board.exchange)
    there, third = (Nodes(board_of_node_zero(*server.server_address, "secret")) for _ in range(2))
    assert here.say(["stop"]) == ["stop"]
    assert there.say(["stacks", "end"]) == ["stop", "stacks", "end"]
    assert here.say([]) == ["stacks", "end"]
    assert there.say([]) == []
    assert third.say([]) == ["stop", "stacks", "end"]
    assert [here.count("over", 1), there.count("over", 1), third.count("over"), third.count("left")] == [1, 2, 2, 0]


QUESTION = [[], {}, 0]


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(["another", *QUESTION]),
        json.dumps([None, *QUESTION]),
        json.dumps(["", *QUESTION]),
        json.dumps(["secret"]),
        json.dumps(["secret", 1, 2, 3]),
        json.dumps({"secret": 1}),
        "GET / HTTP/1.1",
        "[" * 5000,
    ],
)
def test_who_does_not_know_the_token_is_not_answered(server, line):
    with socket.create_connection(server.server_address, 10) as connection:
        connection.sendall(line.encode() + b"\n")
        assert connection.makefile("rb").read() == b""
    assert server.board.exchange([], {}, 0) == ([], {})


def test_a_node_that_has_gone_is_told(server):
    exchange = board_of_node_zero(*server.server_address, "another")
    with pytest.raises(ConnectionError, match="node 0 does not answer any more"):
        exchange([], {}, 0)
