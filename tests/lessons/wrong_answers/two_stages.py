"""Wrong answers to `two_stages`, and a piece of what each must be told."""

from course.exercises.two_stages import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The first stage never learns.
WRONG.slip(
    "no_backward_on_rank_0",
    "`model.0.weight.grad` is None: backward has not come to this stage",
    ("hidden.backward(gradient)", "pass"),
)

# What was received is no leaf that asks for a gradient.
WRONG.slip("no_gradient_for_what_came", "raised", ("hidden.requires_grad_()", "pass"))

# As if the loss were the sum of what was sent.
WRONG.slip(
    "sends_ones_back",
    "`model.0.weight.grad[0, 0]` is",
    ("dist.send(hidden.grad, peer)", "dist.send(torch.ones(hidden_shape), peer)"),
)

# Rank 1 keeps the gradient to itself.
WRONG.slip("nothing_comes_back", "a hang: rank", ("dist.send(hidden.grad, peer)", "pass"))

# No float.
WRONG.slip("returns_a_tensor", "returned a Tensor, expected the loss as a float", ("return loss.item()", "return loss"))

# A mean over the batch is forgotten.
WRONG.slip(
    "sends_the_sum_back",
    "5 times what it should be",
    ("dist.send(hidden.grad, peer)", "dist.send(hidden.grad * len(hidden), peer)"),
)
