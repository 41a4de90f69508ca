"""Wrong answers to `mean_accuracy`, and a piece of what each must be told."""

import torch
import torch.distributed as dist

from tests.support.wrong_answers import told


@told("the mean of the ranks' accuracies")
def mean_of_means(correct, count):
    """Each rank counts alike."""
    share = torch.tensor(correct / max(1, count))
    dist.all_reduce(share)
    return (share / dist.get_world_size()).item()


@told("this rank's own")
def only_its_own(correct, count):
    """No communication."""
    return correct / max(1, count)


# One division too many.

# A rank without samples.

# No float.
