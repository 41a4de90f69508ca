"""TPUs are not supported: ranks compute on GPUs or on CPU cores.

TPUs are programmed through PyTorch/XLA, whose ranks are started and synchronised in ways of its
own. On a TPU machine, in Colab or Kaggle, `labkit.launch` does work, but on the machine's CPU
cores: the TPU stays idle.

## An example

    TPUs are not supported: ranks compute on GPUs or CPU cores. Use 'gloo'

## What to do

* Choose a runtime with a GPU (Colab: Runtime ▸ Change runtime type; Kaggle: Settings ▸
  Accelerator), or none.
* Leave `backend` away: labkit takes NCCL where every rank has a GPU, and gloo elsewhere.
"""
