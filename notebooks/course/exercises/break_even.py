"""Exercise: from which speed of devices DDP is no faster than one process, by formula."""

from __future__ import annotations

from course.exercises.base import Exercise
from course.exercises.trial import Trial

EXERCISE = Exercise(
    lesson="07",
    title="When is DDP no faster?",
    statement="""
    One device computes a step of `flops` operations. In DDP `world_size` devices compute a part of the batch each, all
    parts equal; then a ring all-reduce averages the gradients, which are as large as the weights, `weight_bytes`. A
    link carries `bytes_per_s`. Nothing is sent while something is computed, and a message needs no time to start.

    At which speed of a device, in operations per second, does a step of DDP take as long as one of one process? Return
    it as a `float`. Faster devices than that are better off alone.
    """,
    hints=(
        "Write down both steps' times, as functions of the speed, and set them equal.",
        "In a ring all-reduce of n ranks each rank sends 2 (n − 1) / n of the tensor.",
        "A device of DDP saves flops · (1 − 1 / n) operations. At the speed that is asked for, they take as long as "
        "what is sent.",
    ),
    why="A device saves (n − 1) / n of the operations and sends 2 (n − 1) / n of the weights, so n cancels out: what "
    "counts is how many operations there are for each byte of the weights, and how fast the link is.",
    world_sizes=(),
    imports=(),
    cases=tuple(
        {"flops": flops, "weight_bytes": size, "world_size": n, "bytes_per_s": speed}
        for n in (4, 2, 8)
        for flops, size, speed in ((6e9, 2**20, 1e9), (1e12, 4 * 10**8, 25e9))
    ),
)


@EXERCISE.reference
def break_even(flops, weight_bytes, world_size, bytes_per_s):
    """Return the operations per second from which a step of DDP is no shorter than one of one process."""
    saved = flops * (1 - 1 / world_size)
    sent = 2 * (world_size - 1) / world_size * weight_bytes
    return saved / (sent / bytes_per_s)


@EXERCISE.trial
def trial(t: Trial, flops: float, weight_bytes: int, world_size: int, bytes_per_s: float) -> None:
    """Call it, and compare both steps on devices of that speed."""
    speed = t.call(flops, weight_bytes, world_size, bytes_per_s)
    t.require(isinstance(speed, (float, int)), f"returned a {type(speed).__name__}, expected a float")
    t.require(speed > 0, f"it is {speed:.4g}, expected a speed greater than 0")
    n = world_size
    sending_s = 2 * (n - 1) / n * weight_bytes / bytes_per_s
    one_s, ddp_s = flops / speed, flops / n / speed + sending_s
    expected = flops * (n - 1) / n / sending_s
    known = {
        2 * expected: ": an all-reduce sends twice, to sum and to hand out the sums",
        expected * n / (n - 1): ": a device of DDP computes, too, its part of the batch",
        expected * (n - 1) / n: ": a rank sends 2 (n − 1) / n of the weights, not 2 times the weights",
        expected / n: ": one process computes the whole batch",
    }
    said = next((text for value, text in known.items() if abs(value / speed - 1) < 1e-6), "")
    t.require(
        abs(expected / speed - 1) < 1e-6,
        f"with {speed:.4g} operations a second one process takes {1000 * one_s:.4g} ms and DDP {1000 * ddp_s:.4g} ms, "
        f"expected equal times{said}",
    )


# Sums, and nobody gets them.
EXERCISE.slip("sends_once", "an all-reduce sends twice", ("sent = 2 * ", "sent = "))

# All of one process's time is there for sending.
EXERCISE.slip("saves_everything", "a device of DDP computes, too", ("flops * (1 - 1 / world_size)", "flops"))

# Each rank sends everything to a server, and gets it back.
EXERCISE.slip(
    "sends_all_twice", "not 2 times the weights", ("(world_size - 1) / world_size * weight_bytes", "weight_bytes")
)

# As if one process had one rank's part.
EXERCISE.slip(
    "saves_a_part_of_a_part", "one process computes the whole batch", ("flops * (1", "flops / world_size * (1")
)

# GFLOP/s.
EXERCISE.slip("in_giga", "expected equal times", ("return saved", "return 1e-9 * saved"))

# DDP's operations less one process's.
EXERCISE.slip(
    "the_wrong_way_round", "expected a speed greater than 0", ("(1 - 1 / world_size)", "(1 / world_size - 1)")
)


@EXERCISE.wrong("returned a NoneType, expected a float")
def returns_nothing(flops, weight_bytes, world_size, bytes_per_s):
    """No return."""
