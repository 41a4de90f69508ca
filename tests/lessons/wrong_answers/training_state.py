"""Wrong answers to `training_state`, and a piece of what each must be told."""

from course.exercises.training_state import EXERCISE, training_state
from tests.support.wrong_answers import WrongAnswers

WRONG = WrongAnswers(EXERCISE)

# The keys are DDP's.
WRONG.slip(
    "saves_the_wrapper",
    "the keys under `model` begin with `module.`",
    ("model.module.state_dict()", "model.state_dict()"),
)


@WRONG("what the dict holds has changed while training went on")
def takes_no_copy(model, optimizer, scheduler, epoch):
    """References."""
    return training_state(model, optimizer, scheduler, epoch) | {"model": model.module.state_dict()}


# The curves part.
WRONG.slip("forgets_the_momentum", 'the dict has no "optimizer"', ('"optimizer": optimizer.state_dict(),', ""))

# Dropout draws other masks.
WRONG.slip("forgets_the_random_numbers", 'the dict has no "rng"', ('"rng": torch.get_rng_state(),', ""))

# The learning rate begins anew.
WRONG.slip("forgets_the_scheduler", 'the dict has no "scheduler"', ('"scheduler": scheduler.state_dict(),', ""))

# The one that is done.
WRONG.slip("repeats_an_epoch", "`epoch` is 0, expected 1: the first that is still to be done", ("epoch + 1", "epoch"))
