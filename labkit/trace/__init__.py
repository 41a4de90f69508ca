"""What every rank did when: `labkit.launch(train, trace=5)`, then `run.trace`. What ranks record is in `labkit.steps`.

`profiling` is public, as `labkit.profiling`: what a training function measures of its own rank by hand.
"""
