"""One job from its creation to its end: made or found, followed, and deleted whatever happens."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.core.patience import Attempt, attempts, insist
from baton.components.train_chunk.trainjob import reasons
from baton.components.train_chunk.trainjob.cluster import AwayError, Cluster, NoRoomError
from baton.components.train_chunk.trainjob.objects import Pod, TrainJob
from baton.components.train_chunk.trainjob.rank_log import LAST_LINES, RankLog

logger = logging.getLogger("baton")

T = TypeVar("T")
POLL = 3.0
"""Seconds between two looks."""
PATIENCE = 300.0
"""Seconds for which the API server may not answer: a control plane that is upgraded takes minutes."""
IMAGE_PATIENCE = 120.0
"""Seconds for which an image may not be had: registries refuse now and then, and Kubernetes asks again."""
OTHERS_LINES = 200
"""Lines that are read of another node's log, where that is the one that failed."""
LAST_LINES_WAIT = 10.0
"""Seconds for the end of a log whose pod has ended."""
GONE_WAIT = 180.0
"""Seconds for a job's end after it was deleted: its pods have their grace period."""


def patiently(ask: Callable[[], T]) -> T:
    """Asks the API server until there is an answer.

    Raises:
        AwayError: there was none for `PATIENCE` seconds.
    """
    tries = attempts(PATIENCE, pause=1.0)
    return insist(ask, AwayError, tries, lambda error, _: logger.warning("%s Asking again.", error))


class Job:
    """The job of one attempt at a chunk.

    Args:
        cluster: Where it runs.
        document: The job as it is to be; see `manifest.train_job`.
        siblings: Labels by which all jobs of the chunk are found.
        wait: Seconds that the nodes may take until all run.
        patience: Seconds for which nodes may have no machine or quota; None where that is a matter of `wait` alone, and
            a job that no quota lets in fails at once.
        notice: Returns that this stage's machine will be preempted, None while it stays.
    """

    def __init__(
        self,
        cluster: Cluster,
        document: TrainJob,
        siblings: dict[str, str],
        *,
        wait: float,
        patience: float | None = None,
        notice: Callable[[], str | None],
    ) -> None:
        self.name = document["metadata"]["name"]
        self.nodes = document["spec"]["trainer"]["numNodes"]
        self._cluster = cluster
        self._document = document
        self._siblings = siblings
        self._wait = wait
        self._patience = patience
        self._notice = notice
        self._present: list[Pod] = []
        self._pods: dict[str, Pod] = {}
        self._leftover: set[str] = set()
        self._log: RankLog | None = None
        self._reason = ""
        self._waiting_since: float | None = None
        self._stuck_since: float | None = None
        self._roomless_since: float | None = None

    def run(self) -> bool:
        """Creates the job, or finds it, and follows it to its end.

        Returns:
            Whether it ended by itself: False where this stage must go, or somebody else deleted it.

        Raises:
            NoRoomError: the cluster does not give as many nodes.
            LostError: it failed of what another job may be spared.
            BatonError: it failed otherwise, does not start, or Kubernetes does not answer.
        """
        # First what earlier attempts left of this chunk, but for a job that is this one and still runs: its nodes hold
        # the devices that this one asks for.
        for other in patiently(lambda: self._cluster.jobs(self._siblings)):
            name, nodes = other["metadata"]["name"], other["spec"]["trainer"]["numNodes"]
            if (name, nodes) != (self.name, self.nodes) or reasons.is_over(other):
                logger.info("TrainJob %s is of an earlier attempt: it is deleted", name)
                self._remove(name)
        created = self._create()
        # A stage that is killed deletes nothing. Its job goes with the pod that owns it; what is left is deleted by the
        # next attempt, or taken over where it asks for the same.
        with self._deleted_after():
            # The end of its owner before does not end it then.
            if not created and (owners := self._document["metadata"]["ownerReferences"]):
                patiently(lambda: self._cluster.adopt(self.name, owners))
            logger.info("TrainJob %s is %s, with %d node(s)", self.name, "created" if created else "found", self.nodes)
            return self._follow()

    def _create(self) -> bool:
        """Creates the job; False where it is there.

        Raises:
            NoRoomError: no quota has let it in for as long as the nodes may have none.
        """

        def wait(error: NoRoomError, _: Attempt) -> None:
            if self._notice():
                raise error
            self._tell(error.message)

        # On a machine that is lost, pods of the job that had this name before may end late.
        before = patiently(lambda: self._cluster.pods(self.name))
        self._leftover = {pod["metadata"]["name"] for pod in before if pod["metadata"].get("deletionTimestamp")}
        tries = attempts(self._patience or 0.0, pause=POLL)
        return insist(lambda: patiently(lambda: self._cluster.create(self._document)), NoRoomError, tries, wait)

    def _follow(self) -> bool:
        while True:
            if notice := self._notice():
                logger.warning("%s: TrainJob %s is deleted; its nodes save what they have", notice, self.name)
                return False
            job = patiently(lambda: self._cluster.job(self.name))
            if job is None:
                logger.warning("TrainJob %s is gone: somebody deleted it", self.name)
                return False
            self._look()
            if reasons.condition(job, "Complete"):
                self._hear_out()
                return True
            if reasons.condition(job, "Failed"):
                # The last lines say whether the nodes left early.
                self._hear_out()
                if self.left_early:  # all is saved; that a machine was preempted meanwhile is no failure of the chunk
                    return True
                raise self._failure(job)
            self._require_start(job)
            self._pause()

    def _pause(self) -> None:
        """Waits until it is time to look again; not with a notice, as little time is left then."""
        for _ in attempts(POLL, pause=0.1):
            if self._notice():
                return

    def _look(self) -> None:
        """Takes note of the pods, and follows the first one's log once there is one."""
        pods = patiently(lambda: self._cluster.pods(self.name))
        self._present = [pod for pod in pods if pod["metadata"]["name"] not in self._leftover]
        self._pods.update({pod["metadata"]["name"]: pod for pod in self._present})
        first = [pod for pod in self._pods.values() if reasons.index(pod) == 0 and reasons.has_started(pod)]
        if not first:
            return
        newest = max(first, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))["metadata"]["name"]
        if self._log is None or self._log.pod != newest:
            self._log = RankLog(self._cluster, newest)
        elif not self._log.is_open and self._pods[newest]["status"].get("phase") == "Running":
            self._log = self._log.again()

    def _require_start(self, job: TrainJob) -> None:
        """Says what the nodes wait for.

        Raises:
            NoRoomError: nodes have had no machine or quota for too long.
            UserError: an image cannot be had, or the time for starting is over.
        """
        pods, now = self._present, time.monotonic()
        if len(pods) >= self.nodes and all(map(reasons.has_started, pods)):
            self._waiting_since = self._stuck_since = self._roomless_since = None
            return
        is_queued = reasons.condition(job, "Suspended")  # which is nobody's fault
        if self._waiting_since is None or is_queued:
            self._waiting_since = now
        has_room = is_queued or (len(pods) >= self.nodes and all(map(reasons.has_place, pods)))
        self._roomless_since = None if has_room else self._roomless_since or now
        stuck = reasons.not_starting(pods)
        self._stuck_since = (self._stuck_since or now) if stuck else None
        if stuck and self._stuck_since and now - self._stuck_since >= IMAGE_PATIENCE:
            raise UserError(stuck, remedy="Check resources.image, resources.secret and the other names there.")
        reason = reasons.waiting_for(job, self.nodes, pods, patiently(lambda: self._cluster.warnings(job)))
        if now - self._waiting_since >= self._wait:
            raise (NoRoomError if self._roomless_since else UserError)(
                f"resources.wait_for_nodes is over, {self._wait:.0f} s: {reason}.",
                remedy="Ask for fewer or other nodes, or give them more time.",
            )
        if self._patience is not None and self._roomless_since and now - self._roomless_since >= self._patience:
            raise NoRoomError(reason)
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Says what the nodes wait for, once each time that changes."""
        if reason != self._reason:
            self._reason = reason
            logger.info("TrainJob %s: %s", self.name, reason)

    def _failure(self, job: TrainJob) -> BatonError:
        """Returns why the job failed, by the pod that failed first: the others end for want of it."""
        self._look()  # states that came with the end
        pods = list(self._pods.values())
        error, tail = (self._log.error, list(self._log.tail)) if self._log else (None, [])
        first = reasons.first_failed(pods)
        if first and reasons.index(first):
            lines = patiently(lambda: self._cluster.tail(first["metadata"]["name"], OTHERS_LINES))
            errors = (event for line in lines if isinstance(event := events.parse(line), events.Error))
            error, tail = next(errors, error), lines[-LAST_LINES:]
        return reasons.failure(job, pods, error, tail)

    def _hear_out(self) -> None:
        if self._log:
            self._log.finish(LAST_LINES_WAIT)

    @property
    def left_early(self) -> bool:
        """Whether the nodes said that they left before the target."""
        return self._log is not None and self._log.partial

    @contextlib.contextmanager
    def _deleted_after(self) -> Iterator[None]:
        """Deletes the job on every way out; that this fails never hides what went before."""
        try:
            yield
        finally:
            try:
                self._remove(self.name)
            except BatonError as error:
                logger.warning("TrainJob %s may still be there: %s", self.name, error)

    def _remove(self, name: str) -> None:
        """Deletes a job and waits until it and its pods are gone, as the next one's pods would find no room."""
        if not patiently(lambda: self._cluster.delete(name)):
            return
        for _ in attempts(GONE_WAIT, pause=1.0):
            if patiently(lambda: self._cluster.job(name)) is None and not self._alive(name):
                return
        logger.warning("TrainJob %s is being deleted, and not gone after %.0f s", name, GONE_WAIT)

    def _alive(self, name: str) -> bool:
        pods = patiently(lambda: self._cluster.pods(name))
        return any(pod["status"].get("phase") in ("Pending", "Running") for pod in pods)
