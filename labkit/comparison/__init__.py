"""Training functions side by side: `labkit.compare` of functions, which it launches, or of runs.

`compare` is the public call and what it returns; `curves` and `differences` say how far two runs' curves and tensors
are apart, and `picker` shows it all where somebody watches. What a row is made of is in `labkit.steps`.
"""
