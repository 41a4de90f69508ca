"""The rendezvous of torchrun's agent where there is one machine: nobody else is waited for, and no port is opened.

torchrun's own has a `TCPStore` on 127.0.0.1, from which the agent unpickles what it finds under the run's id; the id is
in the process list, so any user of the machine could have the agent run code.
"""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.utils.distributed import get_free_port


class OneMachine(StaticTCPRendezvous):
    """Gives the agent a store in its own memory. See https://docs.pytorch.org/docs/stable/elastic/rendezvous.html."""

    def __init__(self, run_id: str) -> None:
        super().__init__("127.0.0.1", 0, rank=0, world_size=1, run_id=run_id, timeout=0)

    def get_backend(self) -> str:
        """Return the name by which it is registered."""
        return "labkit-one-machine"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks meet in the agent's store: not in its memory."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for each attempt, and a free port as `MASTER_PORT`, by which labkit counts attempts."""
        address = RendezvousStoreInfo("127.0.0.1", get_free_port())
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=address)
