"""Files as Linux has them, in which it counts the processes that it killed because memory had run out."""

from __future__ import annotations

from pathlib import Path


def system(root: Path, groups: str, counter: str) -> Path:
    """Write the files of a machine, with nothing killed so far: whose cgroup counts in the file `counter`, if any."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    if counter:
        (root / counter).parent.mkdir(parents=True)
    (root / "counter").write_text(counter)
    count(root)
    return root


def v2(root: Path) -> Path:
    """Write those of a machine with cgroup v2, as systemd mounts it."""
    return system(root, "0::/user.slice/jupyter.service\n", V2 + "user.slice/jupyter.service/memory.events")


V2 = "sys/fs/cgroup/"


def count(root: Path, cgroup: int = 0, host: int = 0) -> None:
    """Have the cgroup and the machine count so many kills."""
    if counter := (root / "counter").read_text():
        (root / counter).write_text(f"low 0\nmax 7\noom {cgroup}\noom_kill {cgroup}\noom_group_kill 0\n")
    (root / "proc/vmstat").write_text(f"nr_free_pages 9\noom_kill {host}\ndrop_pagecache 0\n")
