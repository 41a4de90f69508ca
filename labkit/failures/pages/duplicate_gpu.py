"""Two ranks use the same GPU, and NCCL takes one rank for each GPU.

NCCL 2.27 says "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", where the number
is the GPU's place on the PCI bus; NCCL 2.30 says "Multiple Ranks are using the same GPU/Partition".
With old PyTorch they stand in the output alone, under `NCCL_DEBUG=WARN`, and the error says
"invalid usage".

## An example

    rank 1 failed: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3
…
    ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
    Last error:
    Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000

## What to do

* *The script never chose a GPU*, so all ranks are on `cuda:0`: `.cuda()` and `device="cuda"` mean
  the current one. Tell: `nvidia-smi` shows all processes on GPU 0. Cure:
  `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before anything else; with labkit take
  `worker.device`, which is set already.
* *More ranks than GPUs*. Tell: `torch.cuda.device_count()` is below the ranks of a machine;
  `CUDA_VISIBLE_DEVICES` may hide some. Cure: fewer ranks, or `backend="gloo"`.
* *The rank was taken for the local rank*, or each rank sees one GPU and both see the same. Tell:
  it happens on several machines only, or `echo $CUDA_VISIBLE_DEVICES` is equal on all ranks. Cure:
  `LOCAL_RANK`, not `RANK`; one of the scheduler and the script sets `CUDA_VISIBLE_DEVICES`, not both.
* Parts of one GPU (MIG) count as one GPU; NCCL 2.30 allows them with `NCCL_MULTI_RANK_GPU_ENABLE=1`.
  https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
"""
