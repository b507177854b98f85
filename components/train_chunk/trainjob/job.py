"""One job from its creation to its end: made or found, followed, and deleted whatever happens."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from baton.components.shared.core import events
from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.core.patience import attempts, insist
from baton.components.train_chunk.trainjob import reasons
from baton.components.train_chunk.trainjob.cluster import AwayError, Cluster
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


class Job:
    """The job of one attempt at a chunk.

    Args:
        cluster: Where it runs.
        document: The job as it is to be; see `manifest.train_job`.
        siblings: Labels by which all jobs of the chunk are found.
        wait: Seconds that the nodes may take until all run.
        notice: Returns that this stage's machine will be preempted, None while it stays.
    """

    def __init__(
        self,
        cluster: Cluster,
        document: TrainJob,
        siblings: dict[str, str],
        *,
        wait: float,
        notice: Callable[[], str | None],
    ) -> None:
        self.name = document["metadata"]["name"]
        self.nodes = document["spec"]["trainer"]["numNodes"]
        self._cluster = cluster
        self._document = document
        self._siblings = siblings
        self._wait = wait
        self._notice = notice
        self._present: list[Pod] = []
        self._pods: dict[str, Pod] = {}
        self._log: RankLog | None = None
        self._reason = ""
        self._waiting_since: float | None = None
        self._stuck_since: float | None = None

    def run(self) -> bool:
        """Creates the job, or finds it, and follows it to its end.

        Returns:
            Whether it ended by itself: False where this stage must go, or somebody else deleted it.

        Raises:
            BatonError: it failed, does not start, or Kubernetes does not answer.
        """
        # First: nodes of an earlier attempt hold the devices that this one asks for.
        self._clear()
        created = self._patiently(lambda: self._cluster.create(self._document))
        # A stage that is killed deletes nothing. Its job goes with the pod that owns it; what is left is deleted by the
        # next attempt, or taken over where it asks for the same.
        with self._deleted_after():
            if not created:
                self._take_over()
            events.emit(events.TrainJob(name=self.name, state="created" if created else "found", nodes=self.nodes))
            return self._follow()

    def _clear(self) -> None:
        """Deletes what earlier attempts left of this chunk, but for a job that is this one and still runs."""
        for other in self._patiently(lambda: self._cluster.jobs(self._siblings)):
            name = other["metadata"]["name"]
            over = reasons.condition(other, "Complete") or reasons.condition(other, "Failed")
            if name != self.name or over or other["metadata"].get("deletionTimestamp"):
                logger.info("TrainJob %s is of an earlier attempt: it is deleted", name)
                self._remove(name)

    def _take_over(self) -> None:
        """Becomes the owner of the job that is there, so that the end of its owner before does not end it."""
        if owners := self._document["metadata"]["ownerReferences"]:
            self._patiently(lambda: self._cluster.adopt(self.name, owners))

    def _follow(self) -> bool:
        while True:
            if notice := self._notice():
                logger.warning("%s: TrainJob %s is deleted; its nodes save what they have", notice, self.name)
                return False
            job = self._patiently(lambda: self._cluster.job(self.name))
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
        self._present = self._patiently(lambda: self._cluster.pods(self.name))
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
        """Says what the nodes wait for, once each time that changes.

        Raises:
            UserError: an image cannot be had, or the time for starting is over.
        """
        pods, now = self._present, time.monotonic()
        if len(pods) >= self.nodes and all(map(reasons.has_started, pods)):
            self._waiting_since = self._stuck_since = None
            return
        if self._waiting_since is None or reasons.condition(job, "Suspended"):  # in a queue, which is nobody's fault
            self._waiting_since = now
        stuck = reasons.not_starting(pods)
        self._stuck_since = (self._stuck_since or now) if stuck else None
        if stuck and self._stuck_since and now - self._stuck_since >= IMAGE_PATIENCE:
            raise UserError(stuck, remedy="Check resources.image, resources.secret and the other names there.")
        reason = reasons.waiting_for(job, self.nodes, pods, self._patiently(lambda: self._cluster.warnings(self.name)))
        if now - self._waiting_since >= self._wait:
            raise UserError(
                f"resources.wait_for_nodes is over, {self._wait:.0f} s: {reason}.",
                remedy="Ask for fewer or other nodes, or give them more time.",
            )
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
            lines = self._patiently(lambda: self._cluster.tail(first["metadata"]["name"], OTHERS_LINES))
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
        if not self._patiently(lambda: self._cluster.delete(name)):
            return
        for _ in attempts(GONE_WAIT, pause=1.0):
            if self._patiently(lambda: self._cluster.job(name)) is None and not self._alive(name):
                return
        logger.warning("TrainJob %s is being deleted, and not gone after %.0f s", name, GONE_WAIT)

    def _alive(self, name: str) -> bool:
        pods = self._patiently(lambda: self._cluster.pods(name))
        return any(pod["status"].get("phase") in ("Pending", "Running") for pod in pods)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Asks until there is an answer.

        Raises:
            AwayError: there was none for `PATIENCE` seconds.
        """
        tries = attempts(PATIENCE, pause=1.0)
        return insist(ask, AwayError, tries, lambda error, _: logger.warning("%s Asking again.", error))
