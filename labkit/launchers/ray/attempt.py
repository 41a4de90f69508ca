"""One attempt of all ranks: an actor for each, what they write, and what is done when one fails or is lost."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

from labkit.launchers.ray.mirror import NotebookSide, Piece
from labkit.launchers.ray.notebook import Notebook
from labkit.launchers.ray.orders import Orders
from labkit.launchers.ray.placement import Place
from labkit.launchers.ray.rank_holder import RankHolder, Update

LOOK_EVERY_S = 0.02
"""Time between two looks at what the notebook asks."""

NODES_EVERY_S = 1.0
"""Time between two questions whether a node is being drained."""

FAILURE_GRACE_S = 0.4
"""How long the other ranks may still report after the first has failed; victims' reports make the diagnosis clearer."""

END_S = 5.0
"""How long supervisors may take to end their ranks, before they are ended themselves."""

LOST_S = 30.0
"""How long Ray may take to say that a node is gone which does not answer."""

NO_ANSWER = "its actor does not answer"

CONNECT_S = 1.0
"""How long a node may take to accept a connection, when an actor there has died, to count as there."""

DRAIN_S = 30.0
"""What ranks have for a last checkpoint where a node is drained without a deadline …"""

DRAIN_MARGIN_S = 2.0
"""… and how long before its deadline they are ended."""

WRITE_EVERY_S = 1.0
"""Time between two trials to write what could not be written."""

CLOSE_S = 5.0
"""How long actors may take to let go of their directories."""

BIG_BYTES = 1 << 20
"""From which size on what goes to all ranks is handed to Ray once, and not once for each."""


class Ended(Exception):  # noqa: N818 - what `JobEnded` says, on its way to the notebook
    """There are no ranks any more, or never were, for a reason that is no rank's own."""

    def __init__(self, rank: int, headline: str, cause: str, may_begin_again: bool = True) -> None:
        super().__init__(headline)
        self.rank, self.headline, self.cause, self.may_begin_again = rank, headline, cause, may_begin_again


class Attempt:
    """Follows all ranks until each has ended or is lost."""

    def __init__(
        self, orders: Orders, number: int, group: Any, places: list[Place], side: NotebookSide, notebook: Notebook
    ) -> None:
        self._orders, self._number, self._group, self._places = orders, number, group, places
        self._side, self._notebook = side, notebook
        self._holders: list[Any] = []
        self._asked: dict[Any, tuple[int, int]] = {}
        """Questions for news that are not answered: the rank, and the number of the question."""
        self._held: dict[int, int] = {}
        """Ranks that are not asked while what they have said cannot be written: the number of the next question."""
        self._written_s = 0.0
        """When that was tried last."""
        self._told = [0] * len(places)
        """How often each rank has been given something."""
        self._codes: dict[int, int] = {}
        """How the supervisors ended."""
        self._ended: Ended | None = None
        self._lost: tuple[int, str] | None = None
        """The first rank whose actor was lost, and why, in Ray's words."""
        self._failed_rank: int | None = None
        self._told_at_s = self._close_at_s = self._give_up_at_s = float("inf")
        """When the other ranks are to be told of a failure; when what is left is closed; when it is no longer waited
        for."""
        self._looked_s = time.monotonic()
        self._was_drained = False

    @property
    def is_done(self) -> bool:
        """Whether every rank has done what it was to do."""
        return not self._was_drained and all(code == 0 for code in self._codes.values()) and self._ended is None

    @property
    def failed_in_words(self) -> str:
        """Which rank failed first."""
        return f"rank {self._failed_rank} failed"

    def follow(self) -> Ended | None:
        """Start the ranks and follow them; return why they are gone, if that is no rank's doing."""
        self._start()
        try:
            while self._asked or self._held:
                now = time.monotonic()
                self._tell(self._side.news())
                self._mind_the_time(now)
                self._write_what_waits(now)
                self._receive()
        finally:
            self._close()
        if self._lost is not None:  # once more: that a node is gone may be known only after that of its actor
            self._ended = self._loss(*self._lost)
        return self._ended

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        orders, each = self._orders, dict(self._orders.each)
        cpus, gpus = each.pop("CPU", 0), each.pop("GPU", 0)
        kind: Any = ray.remote(RankHolder)
        self._side.begin()
        for place in self._places:
            holder = kind.options(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=each,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, place.bundle),
                max_concurrency=4,
                max_restarts=0,
            ).remote(
                place,
                orders.world_size,
                self._number,
                orders.supervisor,
                "working_dir" in orders.runtime_env,
                self._side.for_rank(place.rank),
            )
            self._holders.append(holder)
            self._ask(place.rank, 1)

    def _ask(self, rank: int, number: int) -> None:
        self._asked[self._holders[rank].news.remote(number, time.time())] = (rank, number)

    def _tell(self, pieces: list[Piece], but: int | None = None, then_leave: bool = False) -> None:
        """Give pieces to all ranks that are there, but for the one from which they come; perhaps have them leave."""
        import ray

        ranks = [rank for rank in self._present() if rank != but]
        if not (pieces or then_leave) or not ranks:
            return
        given: Any = pieces
        if len(ranks) > 1 and sum(len(piece.data) for piece in pieces) > BIG_BYTES:
            given = ray.put(pieces)
        for rank in ranks:
            self._told[rank] += 1
            self._holders[rank].take.remote(self._told[rank], given, then_leave)

    def _present(self) -> list[int]:
        """Return the ranks that are there."""
        return [*(rank for rank, _ in self._asked.values()), *self._held]

    def _write_what_waits(self, now: float) -> None:
        """Try again to write what could not be written on the notebook's machine; then the ranks are asked on."""
        if self._held and now > self._written_s + WRITE_EVERY_S:
            self._written_s = now
            self._tell(self._side.take([]))
            if self._side.error is None:
                self._notebook.warn("disk", "")
                held, self._held = self._held, {}
                for rank, number in held.items():
                    self._ask(rank, number)

    def _hold(self, rank: int, number: int, error: OSError) -> None:
        """Have a rank keep what it has to say until what it has said before is written."""
        if not self._held:
            why = f"{error.strerror or error}"
            text = f"what the ranks write cannot be written to {self._orders.directory}: {why}. They go on, and keep it"
            self._notebook.warn("disk", text)
        self._held[rank] = number

    def _receive(self) -> None:
        import ray

        if not self._asked:
            time.sleep(LOOK_EVERY_S)
            return
        ready, _ = ray.wait(list(self._asked), timeout=LOOK_EVERY_S)
        if ready:
            ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for answer in ready:
            rank, number = self._asked.pop(answer)
            try:
                update: Update = ray.get(answer)
            except ray.exceptions.ActorUnavailableError:  # for a while, or for ever: Ray will say
                self._ask(rank, number)
                time.sleep(LOOK_EVERY_S)
            except ray.exceptions.RayError as error:
                self._lose(rank, str(error))
            else:
                self._tell(self._side.take(update.pieces), but=rank)
                if update.exit_code is None and self._side.error is not None:
                    self._hold(rank, number + 1, self._side.error)
                elif update.exit_code is None:
                    self._ask(rank, number + 1)
                else:
                    self._note_exit(rank, update.exit_code, update.wrote)

    def _note_exit(self, rank: int, code: int, wrote: str) -> None:
        self._codes[rank] = code
        if code and self._failed_rank is None:
            self._failed_rank = rank
            self._told_at_s = min(self._told_at_s, time.monotonic() + FAILURE_GRACE_S)
            if wrote and self._ended is None:
                self._ended = Ended(rank, f"rank {rank} could not begin", f"Its supervisor wrote:\n{wrote}")

    def _lose(self, rank: int, why: str) -> None:
        """Take notice that an actor is gone, or that it never began, with Ray's words for it."""
        self._codes[rank] = -1
        self._told_at_s = min(self._told_at_s, time.monotonic())
        if self._ended is None or (self._was_drained and self._lost is None):
            self._lost = rank, why
            self._ended = self._loss(rank, why)

    def _loss(self, rank: int, why: str) -> Ended:
        import ray

        node = self._places[rank].node
        found: dict[str, Any] = next((one for one in ray.nodes() if one["NodeID"] == node), {})
        address = found.get("NodeManagerAddress", "not known")
        said = said_by_ray(why)
        if "No module named 'labkit'" in why:
            return Ended(
                rank,
                f"rank {rank} could not begin: its node ({address}) has no labkit",
                "Every node needs it, in the version that the notebook has: install it there as here, or have Ray "
                'bring the folder: runtime_env={"py_modules": [os.path.dirname(labkit.__file__)]}.',
                may_begin_again=False,
            )
        if "RuntimeEnvSetupError" in why or "runtime environment" in why or "creation task" in why:
            return Ended(rank, f"rank {rank} could not begin on its node ({address})", said, may_begin_again=False)
        if not found.get("Alive", False) or "node has died" in why or "node died" in why or not _answers(found):
            drained = ", which was being drained" if self._was_drained else ""
            return Ended(
                rank,
                f"Ray has lost the node of rank {rank} ({address}{drained})",
                f"Ray says: {said}\nPerhaps the machine failed, was taken away, or lost its connection. With "
                "max_restarts=… and a checkpoint that every node sees the run goes on from it.",
            )
        if why == NO_ANSWER:
            return Ended(
                rank,
                f"nothing was heard of rank {rank} on Ray for {LOST_S:.0f} s, though it was to end",
                f"Ray says that its node ({address}) is there. Perhaps its connection is lost, or the machine is "
                "overloaded.",
            )
        return Ended(
            rank,
            f"rank {rank} was taken away: its worker on Ray has died",
            f"Its node ({address}) is still there. Ray says: {said}\nPerhaps another job had precedence, the node "
            "lacked memory, or somebody ended it.",
        )

    def _mind_the_time(self, now: float) -> None:
        if self._notebook.wants_end.is_set() and self._close_at_s == float("inf"):
            self._tell([Piece("asked", b"end\n", False)])
            self._close_at_s, self._told_at_s = now + END_S, float("inf")
        if now > self._told_at_s:
            self._told_at_s = float("inf")
            self._tell([Piece(f"failed.{self._number}", b"")], then_leave=True)
            self._close_at_s = min(self._close_at_s, now + END_S)
        if now > self._close_at_s:
            self._close_at_s, self._give_up_at_s = float("inf"), now + LOST_S
            for rank in self._present():
                self._holders[rank].close.remote()
        if now > self._give_up_at_s:
            for rank in self._present():
                self._lose(rank, NO_ANSWER)
            self._asked.clear()
            self._held.clear()
        if now > self._looked_s + NODES_EVERY_S:
            self._looked_s = now
            self._look_for_drained_nodes(now)

    def _look_for_drained_nodes(self, now: float) -> None:
        if self._was_drained or self._ended is not None or self._failed_rank is not None:
            return
        draining = draining_nodes(self._notebook)
        for place in self._places:
            if place.node in draining and place.rank not in self._codes:
                self._was_drained = True
                left_s = draining[place.node] / 1000 - time.time() if draining[place.node] else DRAIN_S
                self._told_at_s = now + max(0.0, left_s - DRAIN_MARGIN_S)
                self._ended = Ended(
                    place.rank,
                    f"Ray takes the node of rank {place.rank} away",
                    f"It is being drained, and the ranks had {max(0.0, left_s):.0f} s to stop. With max_restarts=… and "
                    "a checkpoint that every node sees the run goes on from it, on other nodes.",
                )
                self._tell([], then_leave=True)
                return

    def _close(self) -> None:
        """Have every actor let go of its directory, and end it."""
        import ray

        closing = [holder.close.remote() for holder in self._holders]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for holder in self._holders:
            ray.kill(holder)


def _answers(node: dict[str, Any]) -> bool:
    """Whether a node accepts connections, as far as that can be seen from here: Ray takes seconds to notice."""
    import ray

    port = node.get("NodeManagerPort")
    if not port or ray.util.client.ray.is_connected():  # from outside the cluster its nodes are not reached
        return True
    try:
        socket.create_connection((node["NodeManagerAddress"], port), CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def draining_nodes(notebook: Notebook) -> dict[str, int]:
    """Return the nodes that are being drained, by Ray's numbers, with their deadlines: ms since 1970, 0 for none.

    Ray has no public name for it. Where its own has changed, the notebook is told once.
    """
    import ray

    if ray.util.client.ray.is_connected():
        return {}  # it does not say so to clients from outside
    try:
        from ray._private.state import state

        found: dict[str, int] = state.get_draining_nodes()
    except Exception as error:
        text = (
            f"this version of Ray ({ray.__version__}) does not say which nodes are taken away "
            f"(ray._private.state.state.get_draining_nodes: {type(error).__name__}: {error}): ranks there get no time "
            "for a last checkpoint"
        )
        notebook.warn_once("draining", text)
        return {}
    return found


def said_by_ray(text: str) -> str:
    """Return Ray's own words without colours, its numbers of actors, and more than a person reads."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).partition("Some common causes include")[0]
    plain = re.sub(r"\n\t(class_name|actor_id|pid|namespace|ip):.*", "", plain).strip()
    return plain if len(plain) <= 1500 else f"{plain[:300]} … {plain[-1200:]}"
