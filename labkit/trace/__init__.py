"""What every rank did when: `labkit.launch(train, trace=5)`, then `run.trace`. What ranks record is in `labkit.steps`.

`profiling` is public, as `labkit.profiling`: what a rank does in a step, and what that costs, asked of one rank by its
own code.
"""
