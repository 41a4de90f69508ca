"""A rank logged NaN or infinity in a run that was launched with `watch="nan"`.

The run ends at the first such value, as that rank's failure, while the variables that made it are
still there: `error.frames` has them.

## An example

    loss is nan at step 1: the run was launched with watch='nan'

## What to do

* Look at the last steps before: `run.history`. Did the loss grow first? Then the learning rate is
  too large, or gradients want clipping (`torch.nn.utils.clip_grad_norm_`).
* On one rank only? Its batch may hold an empty or broken sample: a mean over nothing is NaN.
* At the first step: a logarithm or division by 0, or weights never initialised.
* Half precision: a `GradScaler` skips such steps, but does log them; log after its check, or watch
  the scale.
* `torch.autograd.set_detect_anomaly(True)` in the function names the operation whose gradient was
  NaN first.
"""
