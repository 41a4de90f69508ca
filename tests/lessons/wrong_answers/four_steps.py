"""Wrong answers to `four_steps`, and a piece of what each must be told."""

from course.exercises.four_steps import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# No threads.
WRONG.slip("one_after_another", "the pieces are computed one after another", ("threads.map(", "map("))

# Each twin keeps its own weights, and its gradients.
WRONG.slip(
    "copies_outside_the_graph",
    "is None: backward does not reach the original's weights",
    ("functional_call(twin, own, (piece.to(device),))", "twin(piece)"),
)

# The other copies are no part of the graph.
WRONG.slip(
    "detached", "only the first piece's gradient has come", ("tensor.to(device, copy=True)", "tensor.detach().clone()")
)

# A list of pieces.
WRONG.slip(
    "does_not_gather",
    "`outputs` is [tensor(",
    ("torch.cat([output.to(inputs.device) for output in outputs])", "outputs"),
)

# The last piece first.
WRONG.slip(
    "in_another_order", "the pieces are in another order", ("for output in outputs", "for output in reversed(outputs)")
)

# No twin for the first device.
WRONG.slip(
    "uses_the_original",
    "`network` itself was called",
    ("[copy.deepcopy(network) for _ in pieces]", "[network, *(copy.deepcopy(network) for _ in pieces[1:])]"),
)

# The first copy's buffer is not the original's.
WRONG.slip(
    "all_are_copies",
    "`network.sums[0]` is 0",
    ("copies = [tensors]", "copies = [{name: tensor.clone() for name, tensor in tensors.items()}]"),
)

# Pieces of so many rows, not so many pieces.
WRONG.slip(
    "pieces_of_n_rows",
    "`outputs` has shape (4, 2), expected (6, 2)",
    ("inputs.chunk(len(devices))", "inputs.split(len(devices))"),
)

# Every device computes all rows.
WRONG.slip(
    "scatters_nothing",
    "`outputs` has shape (12, 2), expected (6, 2)",
    ("inputs.chunk(len(devices))", "[inputs] * len(devices)"),
)
