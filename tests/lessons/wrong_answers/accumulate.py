"""Wrong answers to `accumulate`, and a piece of what each must be told."""

from torch.nn.functional import mse_loss

from tests.support.wrong_answers import told


@told("DDP sent the gradients 4 times, expected once")
def sends_every_time(model, batches):
    """No no_sync."""
    for inputs, targets in batches:
        (mse_loss(model(inputs), targets) / len(batches)).backward()


@told("this rank's alone: nothing was sent")
def never_sends(model, batches):
    """Everything in no_sync."""
    with model.no_sync():
        sends_every_time(model, batches)


# A step several times as long.


@told("`weight.grad[0, 0]` is")
def last_batch_only(model, batches):
    """Cleared in between."""
    for inputs, targets in batches:
        model.zero_grad()
        with model.no_sync():
            (mse_loss(model(inputs), targets) / len(batches)).backward()
    sends_every_time(model, batches[-1:])
