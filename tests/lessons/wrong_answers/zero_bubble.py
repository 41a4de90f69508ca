"""Wrong answers to `zero_bubble`, and a piece of what each must be told."""

from course.exercises.zero_bubble import zero_bubble
from tests.support.wrong_answers import told


def _without_weights(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    return [one for one in zero_bubble(stage, stages, micro_batches) if one[0] != "W"]


@told("every W follows its I at once")
def at_once(stage, stages, micro_batches):
    """Split, but not put off."""
    order = _without_weights(stage, stages, micro_batches)
    return [one for f in order for one in ([f, ("W", f[1])] if f[0] == "I" else [f])]


@told("micro-batches, expected 2 at most: from F to W")
def all_at_the_end(stage, stages, micro_batches):
    """No bubble, and as much memory as GPipe."""
    return _without_weights(stage, stages, micro_batches) + [("W", i) for i in range(micro_batches)]


@told("('W', 0) is missing")
def forgets_the_weights(stage, stages, micro_batches):
    """1F1B's list."""
    return _without_weights(stage, stages, micro_batches)


@told("comes before ('I', ")
def weights_first(stage, stages, micro_batches):
    """There are no output gradients yet."""
    order = _without_weights(stage, stages, micro_batches)
    return [one for f in order for one in ([("W", f[1]), f] if f[0] == "I" else [f])]


@told("deadlock: rank 0 is blocked before ")
def in_a_circle(stage, stages, micro_batches):
    """The first stage takes its micro-batches from the last to the first one."""
    order = zero_bubble(stage, stages, micro_batches)
    return [(kind, i if stage else micro_batches - 1 - i) for kind, i in order]
