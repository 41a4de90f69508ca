"""A CUDA kernel met a value that cannot be, most often an index or a label out of range.

The kernel reports it later, so the Python line in the traceback may be a later one. Under NCCL the
watchdog may be the first to notice, and then the process ends by `SIGABRT`. Newer PyTorch raises
`torch.AcceleratorError`, older `RuntimeError`, in the same words.

## An example

    rank 1 failed: torch.AcceleratorError: CUDA error: device-side assert triggered
…
    The kernel's own words, `t >= 0 && t < n_classes`: a label is not below the number of classes, or negative.

## What to do

* *A label out of range* for the loss. Tell: the output has "nll_loss" and "t < n_classes". Cure:
  compare `labels.min()`, `labels.max()` with the last layer's width; classes count from 0, and what
  is not to count is `ignore_index` (-100).
* *An index out of range* in an embedding or in `gather`. Tell: "Indexing.cu", "srcIndex <
  srcSelectDimSize". Cure: the tokenizer has more tokens than the embedding
  (`model.resize_token_embeddings(len(tokenizer))`), or a position is beyond the longest sequence.
* *NaN* in what must be a probability (`multinomial`, `binary_cross_entropy`). Tell: "probability
  tensor contains either inf, nan", "input_val >= zero && input_val <= one". Cure: see
  `labkit.failures.pages.not_a_number`.
* To see the right line: `%env CUDA_LAUNCH_BLOCKING=1` and new ranks, or the same batch on the CPU,
  `labkit.launch(train, device="cpu")`, where it is a Python `IndexError`. The process cannot use its
  GPU any more: reserved ranks get a new one.
  https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution
"""
