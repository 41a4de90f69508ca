"""A checkpoint could not be written or read. What was saved before is as it was.

Each file's size is kept in the checkpoint's `about.json` and compared before anything is loaded, so a
checkpoint that was cut off is refused rather than resumed from. `resume()` goes on from the newest
that is whole, with a warning.

## An example

    …/checkpoint-000002/rank-0.pt has 10 bytes of the 34 that were written. The newest that is whole is …/checkpoint-000001

## What to do

* Damaged or missing: `labkit.checkpoint.checkpoints(folder)` lists all, with what is wrong with
  each. Delete or move the damaged one, and resume again.
* "No space left", "Read-only": make room for one checkpoint more than are kept, or choose another
  folder. On several nodes it must be one that all of them see. One run at a time uses a folder: a
  second one clears away what the first is writing.
* "it holds model, optimizer, but this Checkpoint has …": give `labkit.Checkpoint` the same objects
  under the same names as when it was saved.
* "Missing key", "size mismatch": the model is not the one that was saved.
* Never edit the files. To take weights out use `labkit.checkpoint.load(path)["model"]`.
"""
