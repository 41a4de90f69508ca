"""The rendezvous of torchrun's agent where there is one machine: nobody else is waited for, and no port is opened.

torchrun's own has a `TCPStore` on 127.0.0.1, from which the agent unpickles what it finds under the run's id; the id is
in the process list, so any user of the machine could have the agent run code.
"""

from __future__ import annotations

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.utils.distributed import get_free_port


class OneMachine(RendezvousHandler):
    """Gives the agent a store in its own memory. See https://docs.pytorch.org/docs/stable/elastic/rendezvous.html."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._is_closed = run_id, False

    def get_backend(self) -> str:
        """Return the name by which it is registered."""
        return "labkit-one-machine"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store for each attempt, and a free port as `MASTER_PORT`, by which labkit counts attempts."""
        address = RendezvousStoreInfo("127.0.0.1", get_free_port())
        return RendezvousInfo(HashStore(), rank=0, world_size=1, bootstrap_store_info=address)

    def is_closed(self) -> bool:
        """Return whether the run is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """Take notice that the run is over."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other agent can come."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id, which ranks find in `TORCHELASTIC_RUN_ID`."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: there is nothing to close."""
        return True
