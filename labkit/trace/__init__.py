"""What every rank did when: `labkit.launch(train, trace=5)`, then `run.trace`.

    on each rank                                                     in the notebook
    recording   some steps under torch.profiler, then one record ──► trace      what the reader holds: `run.trace`
    phases      when the network is called, its backward runs, …     meeting    the same collective on all ranks
    lines       in which line of the reader's code a rank was        findings   who is late, and what else costs time
    reading     the profiler's events as spans and calls             timeline   the chart; `chrome` the file
    clocks      how far machines' clocks are apart                   memory     what a rank holds, over a step

`records` is what travels from a rank, `intervals` the arithmetic of both sides. `profiling` is public, as
`labkit.profiling`: what a rank does in a step, and what that costs, asked of one rank by its own code.
"""
