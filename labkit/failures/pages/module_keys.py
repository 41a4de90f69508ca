"""A state dict does not fit, because one side is wrapped: its keys begin with `module.` or `_orig_mod.`.

DDP and DataParallel keep the model as `.module`, `torch.compile` as `._orig_mod`, and the keys of
`state_dict()` say so. PyTorch lists both sides: `Missing key(s) in state_dict: "weight"` are those of
the model, `Unexpected key(s) in state_dict: "module.weight"` those of the file.

## An example

    rank 1 failed: RuntimeError: Error(s) in loading state_dict for Linear:
…
    The keys of the file begin with `module.`: they were saved from a wrapped model.

## What to do

* *Saved from the wrapped model*, loaded into the bare one. Tell: the *unexpected* keys have the
  prefix. Cure, for this file:
  `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")`; for the next
  ones save `model.module.state_dict()`.
* *Saved from the bare model*, loaded into the wrapped one. Tell: the *missing* keys have the prefix.
  Cure: load before the model is wrapped, or into `model.module`.
* *Compiled*: the prefix is `_orig_mod.`, perhaps after `module.`. Tell: `torch.compile(model)` in
  the script. Cure: save `model._orig_mod.state_dict()`; `model.compile()` changes no keys.
* Never `strict=False` for this: it loads nothing at all, and says nothing. `labkit.Checkpoint` and
  `torch.distributed.checkpoint.state_dict.get_model_state_dict` take the prefixes away.
  https://docs.pytorch.org/docs/stable/notes/serialization.html
"""
