"""Ranks on a Ray cluster: `labkit.launch(train, on=labkit.Ray(address="auto", world_size=8, gpus_per_rank=1))`.

A process beside the notebook connects to Ray (`driver`): Ray ends a process that has lost its cluster, which is not to
be the notebook's kernel, and one process can be in one cluster only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from labkit.engines.arguments import naming
from labkit.launchers.directory_engine import Launcher, check_whole, runs_folder
from labkit.launchers.ray.job import RayJob
from labkit.launchers.ray.orders import Orders
from labkit.launchers.ray.placement import STRATEGIES
from labkit.launchers.ray.working_dir import without_runs
from labkit.launchers.run_directory.directory import RunDirectory


class Ray(Launcher):
    """Where to launch: `world_size` ranks on a Ray cluster, each in a place of its own in one placement group.

    Args:
        address: of the cluster, as `ray.init` takes it: "auto" (the one that this machine is in), "HOST:PORT", or
            "ray://HOST:PORT" from a machine outside. A variable RAY_ADDRESS stands for "auto".
        world_size: number of ranks, whatever GPUs the cluster has. They begin when there is room for all of them.
        gpus_per_rank: GPUs that Ray gives each rank, in `CUDA_VISIBLE_DEVICES`; 0: none.
        cpus_per_rank: CPUs that Ray counts for each rank.
        resources: other resources that each rank takes, {"TPU": 4}, say.
        placement: how the ranks are spread over nodes: "PACK" (on few), "SPREAD", "STRICT_PACK" (all on one) or
            "STRICT_SPREAD" (each on a node of its own).
        max_restarts: how often all ranks are started again when one fails, or its node is lost or taken away. A
            function that keeps checkpoints where every node sees them then goes on from the newest.
        grow_s: how long a cluster in which the ranks could not be placed at all may take to grow, in s. One in which
            they could, but which is in use, is waited for as long as it takes.
        connect_s: how long the cluster may take to answer, in s.
        runtime_env: what the ranks find, as Ray's runtime environments have it: {"working_dir": "."} takes the
            notebook's folder along, but for the runs' folders and the like (`labkit.launchers.ray.working_dir`),
            {"env_vars": {…}} sets variables, {"pip": […]} installs packages.
        folder: where the runs' folders are made, on the notebook's machine; no node need see it.

    Every node needs labkit, with the versions of Python and Ray that the notebook has. Nodes that do not
    see the notebook's files get its folder by `runtime_env={"working_dir": "."}`.
    """

    def __init__(
        self,
        address: str = "auto",
        world_size: int = 2,
        gpus_per_rank: float = 0,
        cpus_per_rank: float = 1,
        resources: Mapping[str, float] | None = None,
        placement: str = "PACK",
        max_restarts: int = 0,
        grow_s: float = 60.0,
        connect_s: float = 30.0,
        runtime_env: Mapping[str, Any] | None = None,
        folder: str | os.PathLike[str] = "labkit-runs",
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("labkit.Ray needs Ray: pip install ray", name="ray")
        with naming("bad_argument"):
            check_whole("world_size", world_size)
            check_whole("max_restarts", max_restarts, least=0)
            if not isinstance(address, str) or not address:
                raise ValueError(f"address is 'auto', 'HOST:PORT' or 'ray://HOST:PORT', got {address!r}")
            if placement not in STRATEGIES:
                raise ValueError(f"placement is one of {', '.join(STRATEGIES)}, got {placement!r}")
            if runtime_env is not None and not isinstance(runtime_env, Mapping):
                raise TypeError(f"runtime_env is a dict, as ray.init takes it, got a {type(runtime_env).__name__}")
            each = {"CPU": cpus_per_rank, "GPU": gpus_per_rank, **(resources or {})}
            for name, amount in each.items():
                if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
                    raise ValueError(f"a rank takes a number of {name} that is at least 0, got {amount!r}")
            each = {name: amount for name, amount in each.items() if amount}
            if not each:
                raise ValueError(
                    "a rank takes nothing, so Ray cannot place it; give cpus_per_rank, gpus_per_rank or both"
                )
            for what, wait_s in {"grow_s": grow_s, "connect_s": connect_s}.items():
                if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or wait_s < 0:
                    raise ValueError(f"{what} is a number of seconds that is at least 0, got {wait_s!r}")
        self.world_size, self.folder = world_size, runs_folder(folder)
        runtime_env = without_runs(runtime_env or {}, self.folder)
        self.orders = Orders(address, world_size, each, placement, max_restarts, grow_s, connect_s, runtime_env)

    def job_in(self, directory: RunDirectory, about: dict[str, Any]) -> RayJob:
        """Return a job; its driver is not started yet."""
        return RayJob(self.orders, directory, about)

    def __repr__(self) -> str:
        orders = self.orders
        return f"Ray(address={orders.address!r}, world_size={self.world_size}, max_restarts={orders.max_restarts})"
