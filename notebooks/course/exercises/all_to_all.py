"""Exercise: all-to-all from messages."""

from __future__ import annotations

import torch
import torch.distributed as dist

from course.exercises.base import POINT_TO_POINT, Cost, Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="03",
    title="All-to-all from messages",
    statement="""
    Every rank has a piece for every rank: `pieces[j]` is for rank j, all of one shape. Return the list of the pieces
    that this rank gets: entry j is what rank j had for it. `pieces` stays as it is.

    Messages only (`send`, `recv`, `isend`, `irecv`), and each piece is sent once, to where it belongs.
    """,
    hints=(
        "The piece for oneself need not be sent.",
        "In round d = 1 … n − 1 send to rank + d and receive from rank − d, modulo n: so everybody is busy in "
        "every round.",
        "`isend`, then `recv`, then `wait()`: if all ranks wait in `send`, nobody receives.",
    ),
    why="In round d everybody sends d places on, so all ranks send and receive at the same time and none waits "
    "for a queue.",
    allowed=POINT_TO_POINT,
    cases=({"shape": (3,)}, {"shape": (2, 5)}, {"shape": (1,)}),
)


@EXERCISE.reference
def all_to_all(pieces, rank, world_size):
    """Return what each rank had for this one: a list of world_size tensors, as `pieces` is."""
    received = [torch.empty_like(piece) for piece in pieces]
    received[rank].copy_(pieces[rank])
    for distance in range(1, world_size):
        target, source = (rank + distance) % world_size, (rank - distance) % world_size
        sending = dist.isend(pieces[target], target)
        dist.recv(received[source], source)
        sending.wait()
    return received


def _piece(t: Trial, shape: tuple[int, ...], sender: int, receiver: int) -> torch.Tensor:
    return t.numbers(*shape, of=sender, salt=f"for {receiver}")


@EXERCISE.trial
def trial(t: Trial, shape: tuple[int, ...]) -> None:
    """Call it, then look where each piece has come from."""
    pieces = [_piece(t, shape, t.rank, other) for other in range(t.world_size)]
    before = [piece.clone() for piece in pieces]
    received = t.call(pieces, t.rank, t.world_size)
    t.require(isinstance(received, list), f"returned a {type(received).__name__}, expected a list of tensors")
    t.require(len(received) == t.world_size, f"returned {len(received)} pieces, expected {t.world_size}")
    for other, piece in enumerate(received):
        known = {"it is the piece that this rank had for the other": pieces[other]} if other != t.rank else {}
        for third in range(t.world_size):
            if third != t.rank:
                known[f"it is what rank {other} had for rank {third}"] = _piece(t, shape, other, third)
        t.equal(f"received[{other}]", piece, _piece(t, shape, other, t.rank), None, known)
    for other, piece in enumerate(pieces):
        t.unchanged(f"pieces[{other}]", piece, before[other])
    sent, least = t.traffic.bytes_sent, best(t.world_size, shape).bytes
    t.require(sent <= least, f"sent {sent:,} B; each piece once, to where it belongs, is {least:,} B")


@EXERCISE.best
def best(world_size: int, shape: tuple[int, ...]) -> Cost:
    """Return all pieces but the own."""
    return Cost(world_size - 1, (world_size - 1) * 4 * torch.Size(shape).numel())


# The same piece to everybody.
EXERCISE.slip(
    "sends_its_own_piece", "it is what rank", ("dist.isend(pieces[target], target)", "dist.isend(pieces[rank], target)")
)

# Right with two ranks.
EXERCISE.slip(
    "forgets_a_round",
    "`received[1][0]` is 0, expected",
    ("empty_like", "zeros_like"),
    ("range(1, world_size)", "range(1, min(2, world_size))"),
)


@EXERCISE.wrong("it is the piece that this rank had for the other")
def returns_what_it_was_given(pieces, rank, world_size):
    """Nothing is sent."""
    return [piece.clone() for piece in pieces]


@EXERCISE.wrong("waits in send for rank")
def sends_before_it_receives(pieces, rank, world_size):
    """Everybody waits in send."""
    received = [piece.clone() for piece in pieces]
    for other in range(world_size):
        if other != rank:
            dist.send(pieces[other], other)
    for other in range(world_size):
        if other != rank:
            dist.recv(received[other], other)
    return received


@EXERCISE.wrong("`pieces[")
def receives_into_what_it_was_given(pieces, rank, world_size):
    """The input is overwritten."""
    received = all_to_all(pieces, rank, world_size)
    for piece, new in zip(pieces, received, strict=True):
        piece.copy_(new)
    return received


@EXERCISE.wrong("calls dist.all_to_all, which this exercise does not allow")
def calls_the_collective(pieces, rank, world_size):
    """Leave it to torch."""
    received = [torch.empty_like(piece) for piece in pieces]
    dist.all_to_all(received, pieces)
    return received
