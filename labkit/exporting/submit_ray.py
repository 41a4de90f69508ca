"""Start the ranks of train.py, in this folder, on a Ray cluster: no folder need be shared, and only Ray is needed here.

    ray job submit --address http://HOST:8265 --working-dir . -- python submit_ray.py --world-size 4 --gpus-per-rank 1

On a machine of the cluster `python submit_ray.py` does the same. What follows -- is for the function: -- --epochs 3
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WORLD_SIZE = 2
HERE = Path(__file__).absolute().parent


class Rank:
    """An actor on a node: starts one rank as torchrun would, in the copy of this folder that Ray has made there."""

    def place(self) -> tuple[str, str, int]:
        """Return the node, its address, and a port that is free there, in case this is rank 0."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, environment: dict[str, str], words: list[str]) -> tuple[int, dict[str, bytes]]:
        """Run the rank; return its exit code, and what it has written below log."""
        before = set(Path("log").glob("*/*"))  # of another job with the same folder
        code = subprocess.run([sys.executable, "train.py", *words], env={**os.environ, **environment}).returncode
        mine = (f"rank-{environment['RANK']}.jsonl", f"result-{environment['RANK']}.pt", "options.json")
        return code, {str(file): file.read_bytes() for file in {*Path("log").glob("*/*")} - before if file.name in mine}


def main() -> None:
    """Place the ranks, all or none, run them, bring back what they have written; exit as the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, default=WORLD_SIZE, help="default: %(default)s")
    parser.add_argument("--gpus-per-rank", type=float, default=0, help="default: none")
    parser.add_argument("--cpus-per-rank", type=float, default=1, help="default: 1")
    parser.add_argument("--out", type=Path, default=HERE, help="where log/ is made, beside this driver; default: here")
    parser.add_argument("options", nargs="*", help="of the function, after --")
    given = parser.parse_args()
    is_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # it has brought the folder along
    ray.init("auto", runtime_env=None if is_job else {"working_dir": str(HERE), "excludes": [".venv", "log"]})
    resources = {"CPU": given.cpus_per_rank, "GPU": given.gpus_per_rank}
    group = ray.util.placement_group([{name: n for name, n in resources.items() if n}] * given.world_size)
    print(f"waiting for {given.world_size} ranks, each with {resources}", flush=True)
    ray.get(group.ready())
    each = {"num_cpus": given.cpus_per_rank, "num_gpus": given.gpus_per_rank}
    where = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(given.world_size)]
    actors = [ray.remote(Rank).options(scheduling_strategy=place, **each).remote() for place in where]
    places = dict(zip(actors, ray.get([actor.place.remote() for actor in actors]), strict=True))
    actors.sort(key=lambda actor: places[actor][0])  # ranks of a node follow each other
    nodes = [places[actor][0] for actor in actors]
    runs = {}
    for rank, actor in enumerate(actors):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": given.world_size,
            "LOCAL_RANK": rank - nodes.index(nodes[rank]),
            "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
            "MASTER_ADDR": places[actors[0]][1],
            "MASTER_PORT": places[actors[0]][2],
            "TORCHELASTIC_RUN_ID": "ray",
        }
        words = {name: str(value) for name, value in environment.items()}
        runs[actor.run.remote(words, given.options)] = rank
    while runs:
        (done,), _ = ray.wait(list(runs))
        code, files = ray.get(done)
        for name, content in files.items():
            (given.out / name).parent.mkdir(parents=True, exist_ok=True)
            (given.out / name).write_bytes(content)
        if code:
            # The others would wait for it in a collective; with this process they end.
            sys.exit(f"rank {runs[done]} failed (exit code {code}); what it wrote is above, or in Ray's log")
        del runs[done]


if __name__ == "__main__":
    main()
