"""One instrument that watches the steps of a plain training function, for a trace and for a comparison.

on each rank                                                      in the notebook
watch      counts steps off; what it sees is a `StepRecord`  ───► record     who came last, waiting, transfer
hooks      when the network is called, its backward runs, …       intervals  arithmetic of times, of both sides
counting   operations, and bytes by kind of memory
profiler   PyTorch's profiler, and what its events say
"""
