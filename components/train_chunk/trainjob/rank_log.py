"""The log of the first node, in the stage's own: its events as events, its other lines as they are."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque

from baton.components.shared.core import events
from baton.components.train_chunk.trainjob.cluster import Cluster

logger = logging.getLogger("baton")

LAST_LINES = 20
"""Lines that are kept, for the message of a failure that says nothing itself."""


class RankLog:
    """Follows the log of one pod in a thread.

    Args:
        cluster: Where the pod is.
        pod: Its name.
        after: Time of the last line that was told before, as Kubernetes writes it; from the first line when empty.

    Attributes:
        told: Time of the last line told.
        error: The event with which the node's own stage failed.
        partial: Whether the node said that it left before its target.
        tail: The last lines that were no events.
    """

    def __init__(self, cluster: Cluster, pod: str, after: str = "") -> None:
        self.pod = pod
        self.told = after
        self.error: events.Error | None = None
        self.partial = False
        self.tail: deque[str] = deque(maxlen=LAST_LINES)
        self._cluster = cluster
        self._thread = threading.Thread(target=self._follow, name=f"log-{pod}", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether there may be more to come."""
        return self._thread.is_alive()

    def again(self) -> RankLog:
        """Returns what follows the same log from where this one broke off."""
        further = RankLog(self._cluster, self.pod, self.told)
        further.partial, further.tail = self.partial, self.tail
        return further

    def finish(self, seconds: float) -> None:
        """Waits for the log's end, at most for some time."""
        self._thread.join(seconds)

    def _follow(self) -> None:
        try:
            for line in self._cluster.log(self.pod):
                time, _, text = line.partition(" ")
                if time > self.told:  # RFC 3339 in UTC, to the nanosecond: in order as text, too
                    self.told = time
                    self._tell(text)
        except Exception as error:  # a connection that broke, a pod that is gone: `Job` asks again
            logger.info("the log of %s broke off: %s", self.pod, str(error).splitlines()[0] if str(error) else error)

    def _tell(self, text: str) -> None:
        event = events.parse(text)
        if event is None:
            self.tail.append(text)
            print(text, file=sys.stderr, flush=True)
            return
        if isinstance(event, events.Error):
            self.error = event
        elif not isinstance(event, events.Stage):  # the stage that follows tells these of itself
            self.partial = self.partial or isinstance(event, events.Partial)
            events.emit(event)
