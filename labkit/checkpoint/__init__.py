"""Save a training so that a killed run goes on as if nothing had happened.

`Checkpoint` saves and resumes on the ranks; `checkpoints` and `load` read what was saved, also in the notebook.

    checkpoint-000012/        moved into place, whole, by one rename; until then it has another name
        manifest.json         epoch, step, world size, versions; size and SHA-256 of every other file
        state.pt              {"model": …, "optimizer": …}: what all ranks hold alike; `torch.load` reads it too
        rank-0.pt, rank-1.pt  a rank's random state and what else is its own
        shards/               what is cut over ranks (DTensors), by `torch.distributed.checkpoint`

Nothing here runs code from a file: tensors are read with `weights_only=True`, and of the pickled index that
`torch.distributed.checkpoint` writes (`.metadata`) only plain descriptions of tensors are accepted. The checksums find
damage, not malice.

Needs torch and the standard library only: it travels with an exported training.
"""

from labkit.checkpoint.files import CheckpointError
from labkit.checkpoint.randomness import random_state, set_random_state
from labkit.checkpoint.reading import Saved, checkpoints, load
from labkit.checkpoint.saving import Checkpoint

__all__ = ["Checkpoint", "CheckpointError", "Saved", "checkpoints", "load", "random_state", "set_random_state"]
