"""Another process already listens on the port that a rank wanted: "Address already in use", EADDRINUSE.

labkit's own groups find a free port by themselves. A script that joins a group by itself takes
`MASTER_PORT`, torchrun 29500. Older PyTorch says "The server socket has failed to bind to [::]:29500
(errno: 98 - Address already in use)", Python "[Errno 98] Address already in use".

## An example

    rank 1 failed: torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
…
    Port 29500 is taken: `ss -ltnp 'sport = :29500'` names the process.

## What to do

* *An earlier run is still there*: its process was stopped or lost, and holds the port. Tell: `ss -ltnp`
  (macOS: `lsof -i :29500`) names a Python of yours that is hours old. Cure: end that process by its
  number.
* *Two jobs on one machine* with the same fixed port. Tell: the process belongs to a run that goes
  well. Cure: another `MASTER_PORT` for each; `torchrun --standalone` finds a free one.
* *Every rank wants to be the server*: all have `RANK=0`, or each starts something of its own, such
  as TensorBoard or a metrics server. Tell: it fails on ranks other than 0, at your own line. Cure:
  start it on rank 0 alone, or at `port + rank`.
* A port may stay taken for a minute after its owner has gone (`TIME_WAIT`).
  https://docs.pytorch.org/docs/stable/distributed.html#initialization
"""
