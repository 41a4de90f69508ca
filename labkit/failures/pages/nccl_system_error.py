"""NCCL's "unhandled system error": a system call of NCCL's failed, most often over the network or in /dev/shm.

The words are the same for all reasons. What failed comes after "Last error:", and if nothing comes
there, in what `NCCL_DEBUG=INFO` prints. Older PyTorch raises `RuntimeError` with the same words, and
without that line.

## An example

    rank 1 failed: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3
…
    ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
…
    Last error:
    Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space left on device (28)

    NCCL found no room in /dev/shm.

## What to do

* The *wrong network interface*, or a firewall between the machines. Tell: "connect … failed",
  "no socket interface found", and it happens on several machines only. Cure:
  `NCCL_SOCKET_IFNAME=eth0` (that of `ip addr` which all machines share), and open the ports
  between them.
* `/dev/shm` is *full or small*: 64 MB in a container. Tell: "shared memory segment", and
  `df -h /dev/shm`. Cure: `docker run --shm-size=8g` or `--ipc=host`, in Kubernetes an `emptyDir`
  with `medium: Memory` there; delete `/dev/shm/nccl-*` that dead runs have left.
* *InfiniBand* cannot lock memory, or its driver is not there. Tell: "ibv_…", and
  `NCCL_IB_DISABLE=1` makes it work, slowly. Cure: `ulimit -l unlimited` where the ranks start.
* Did another rank end first? Then this is the consequence: the report names the rank that was first.
* All variables and errors:
  https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
"""
