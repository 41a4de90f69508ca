"""Ways to train side by side: `labkit.compare` of runs, or of functions, which it launches and measures.

`launching` is the public call, `comparison` what it returns, `reading` what that takes from its runs, `differences` how
far their weights are apart, and `view` how a person picks in it. On the ranks `measuring` watches a plain training
function, `held` what it holds, and `program` records a step as PyTorch dispatches it; in the notebook `replay` computes
how long that takes on ideal devices.
"""
