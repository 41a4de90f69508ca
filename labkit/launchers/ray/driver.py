"""The process beside the notebook that speaks with Ray: connects, has the ranks placed, starts them again if need be.

The notebook sends its `Orders` and then words, a line each: "end" (end the ranks), "leave" (they have ended). It is
sent an `Answer`, that there is a connection or why not, and then events: where the ranks are or what they wait for, why
there are none any more. What ranks write comes into the run's directory, by `attempt`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from labkit.launchers import job_events
from labkit.launchers.ray import placement
from labkit.launchers.ray.attempt import Attempt, Ended, draining_nodes
from labkit.launchers.ray.mirror import NotebookSide
from labkit.launchers.ray.notebook import Notebook
from labkit.launchers.ray.orders import Answer, Orders
from labkit.launchers.ray.working_dir import size_in_words

LISTEN_S = 5.0
"""How long whoever listens at the cluster's address may take to take a connection."""

WAIT_S = 1
"""Time between two looks at a placement that waits, in whole seconds: Ray takes no others."""

SAY_AGAIN_S = 5.0
"""Time between two looks at what is missing, while it waits."""


class CannotConnectError(Exception):
    """There is no connection; the text says why, and what to do."""


def main() -> NoReturn:
    """Carry out the orders that come through stdin; then exit."""
    gc.enable()  # which `die_with_parent` has turned off
    notebook = Notebook(os.dup(1))
    os.dup2(2, 1)  # what libraries print is none of the notebook's words
    orders: Orders = pickle.load(sys.stdin.buffer)
    code = 1
    try:
        address = connect(orders, notebook)
    except CannotConnectError as error:
        notebook.say(Answer("", str(error)))
    else:
        notebook.say(Answer(address))
        notebook.listen()
        if ended := carry_out(orders, notebook):
            notebook.say(job_events.JobEnded(ended.rank, ended.headline, ended.cause, "ray"))
        code = 0
        leave_ray()
    finally:
        # Ray's own threads may hold an ordinary exit up.
        sys.stderr.flush()
        os._exit(code)


def connect(orders: Orders, notebook: Notebook) -> str:
    """Join the cluster; return its address. Raises CannotConnectError; does not take longer than was asked."""

    def give_up() -> None:
        notebook.say(Answer("", f"it has not answered within connect_s={orders.connect_s:g} s"))
        os._exit(1)

    late = threading.Timer(orders.connect_s, give_up)
    late.daemon = True
    late.start()
    try:
        return _connect(orders)
    finally:
        late.cancel()


def _connect(orders: Orders) -> str:
    import ray

    _check_somebody_listens(orders.address)
    try:
        context = ray.init(
            address=orders.address,
            namespace="labkit",
            runtime_env={**orders.runtime_env} or None,  # in which Ray changes things
            log_to_driver=False,  # it comes by rank, with the records
            logging_level="warning",
        )
    except ConnectionError as error:
        raise CannotConnectError(
            f"no cluster is found there ({_first_line(error)}). Start one with ray start --head, and ray start "
            "--address=HOST:6379 on the other machines; from a machine outside, give address='ray://HOST:10001'"
        ) from error
    except Exception as error:
        text = str(error)
        if "ersion mismatch" in text:
            raise CannotConnectError(
                f"the versions differ. {text} Notebook and cluster need the same Ray, and the same Python up to its "
                f"second number: pip install 'ray=={_version_in(text)}' here, say"
            ) from error
        size = size_in_words(orders.runtime_env) if "ackage size" in text else ""
        advice = f". {size}; leave out what the ranks do not need: runtime_env={{'excludes': […]}}" if size else ""
        raise CannotConnectError(f"{type(error).__name__}: {text}{advice}") from error
    return str(context.address_info.get("gcs_address") or orders.address) if context.address_info else orders.address


def _check_somebody_listens(address: str) -> None:
    """Raise CannotConnectError if nobody does: Ray itself would try for long, and then say it in many lines."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or what Ray knows better
    try:
        socket.create_connection((host, int(port)), LISTEN_S).close()
    except OSError as error:
        raise CannotConnectError(
            f"nobody listens there ({error.strerror or error}). ray start --head prints the cluster's address"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _version_in(text: str) -> str:
    """Return the cluster's version of Ray, as Ray says it."""
    return next((line.partition(":")[2].strip() for line in text.splitlines() if "Ray:" in line), "…")


def leave_ray() -> None:
    """Leave the cluster, but not for ever: it ends what this process had there in any case."""
    import ray

    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(3.0)


def carry_out(orders: Orders, notebook: Notebook) -> Ended | None:
    """Have the ranks do their job, again if need be; return why they have not, if that is no rank's doing."""
    import ray

    side = NotebookSide(Path(orders.directory))
    why, along = "", size_in_words(orders.runtime_env)
    for number in range(orders.max_restarts + 1):
        if number:
            why = f"{why}; all ranks begin again (restart {number} of {orders.max_restarts})"
        try:
            group, node_of_bundle = place(orders, notebook, why)
        except Ended as never:
            return never
        if group is None:
            return None
        try:
            places = placement.places(node_of_bundle)
            where = _where({place.node for place in places})
            notebook.notice(f"{where}{f': {why}' if why else ''}{f'; {along}' if along else ''}")
            attempt = Attempt(orders, number, group, places, side, notebook)
            ended = attempt.follow()
        finally:
            ray.util.remove_placement_group(group)
        if attempt.is_done or notebook.wants_end.is_set() or (ended is not None and not ended.may_begin_again):
            return ended
        why = ended.headline if ended else attempt.failed_in_words
    return ended


def place(orders: Orders, notebook: Notebook, why: str) -> tuple[Any, dict[int, str]]:
    """Wait until there is room for all ranks; return the placement group, and the node of each of its bundles.

    Return None in place of the group if the notebook does not want it any more. Raises Ended if there never was room.
    """
    import ray

    group = ray.util.placement_group([dict(orders.each)] * orders.world_size, strategy=orders.placement)
    asked = placement.asked_for(orders.each, orders.world_size, orders.placement)
    too_small_since_s: float | None = None
    say_at_s = 0.0
    notebook.notice(why or f"waits for {asked}", queued=True)
    while not group.wait(WAIT_S):
        if notebook.wants_end.is_set():
            ray.util.remove_placement_group(group)
            return None, {}
        draining = draining_nodes(notebook)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
        total = [node["Resources"] for node in nodes]
        now = time.monotonic()
        if placement.can_be_placed(total, orders.each, orders.world_size, orders.placement):
            too_small_since_s = None
            missing = f"free: {placement.there_is(_free(nodes), orders.each)}"
        else:
            too_small_since_s = too_small_since_s or now
            missing = (
                f"more than the cluster has: {placement.there_is(total, orders.each)}. It may grow for "
                f"{max(0.0, orders.grow_s - (now - too_small_since_s)):.0f} s"
            )
            if now - too_small_since_s >= orders.grow_s:
                ray.util.remove_placement_group(group)
                raise never_placed(orders, total, why)
        if now >= say_at_s:
            say_at_s = now + SAY_AGAIN_S
            notebook.notice(f"{f'{why}; ' if why else ''}waits for {asked}; {missing}", queued=True)
    table = ray.util.placement_group_table(group)
    return group, {int(bundle): node for bundle, node in table["bundles_to_node_id"].items()}


def never_placed(orders: Orders, total: list[dict[str, float]], why: str = "") -> Ended:
    """Return what is said of ranks for which nodes with so much in all will never have room."""
    return Ended(
        -1,
        f"Ray can never place {placement.asked_for(orders.each, orders.world_size, orders.placement)}",
        f"The cluster has {placement.there_is(total, orders.each)}, and did not grow within "
        f"grow_s={orders.grow_s:g} s. Ask for less, add nodes, or wait longer for a cluster that grows."
        + (f" Before: {why}." if why else ""),
    )


def _free(nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return what is free on each node; where Ray does not say it by node, on all together."""
    import ray

    with contextlib.suppress(Exception):  # not public, and not there for clients from outside
        from ray._private.state import available_resources_per_node

        by_node = available_resources_per_node()
        return [by_node.get(node["NodeID"], {}) for node in nodes]
    return [ray.available_resources()]


def _where(nodes: set[str]) -> str:
    import ray

    names = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] in nodes})
    return f"on {len(nodes)} node{'' if len(nodes) == 1 else 's'} of Ray ({', '.join(names)})"
