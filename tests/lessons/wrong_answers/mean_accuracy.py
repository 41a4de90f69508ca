"""Wrong answers to `mean_accuracy`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from course.exercises.mean_accuracy import EXERCISE
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)


@WRONG("the mean of the ranks' accuracies")
def mean_of_means(correct, count):
    """Each rank counts alike."""
    share = torch.tensor(correct / max(1, count))
    dist.all_reduce(share)
    return (share / dist.get_world_size()).item()


@WRONG("this rank's own")
def only_its_own(correct, count):
    """No communication."""
    return correct / max(1, count)


@WRONG("called all_reduce 2 times, expected once")
def two_calls(correct, count):
    """Right, and twice as slow."""
    one, other = torch.tensor(float(correct)), torch.tensor(float(count))
    dist.all_reduce(one)
    dist.all_reduce(other)
    return (one / other).item()


# One division too many.
WRONG.slip("divides_twice", "divided by the number of ranks, too", (".item()", ".item() / dist.get_world_size()"))

# A rank without samples.
WRONG.slip("divides_first", "raised ZeroDivisionError", ("[correct, count]", "[correct / count * count, count]"))

# No float.
WRONG.slip(
    "returns_a_tensor", "returned a Tensor, expected a float", ("(sums[0] / sums[1]).item()", "sums[0] / sums[1]")
)
