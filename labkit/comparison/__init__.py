"""Ways to train side by side: `labkit.compare` of runs, or of functions, which it launches and measures.

`launching` is the public call, `comparison` what it returns, `reading` what that takes from its runs, `differences` how
far their weights are apart, and `view` how a person picks in it. On the ranks `measuring` watches a plain training
function, and `accelerator` gives each rank a device of its own, by the clock. `recorded` shows what was measured where
there are GPUs.
"""
