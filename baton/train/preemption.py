"""Notices that a machine will be preempted: SIGTERM, a file, a metadata service, a node's taint."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.recipe.run import Preemption

logger = logging.getLogger("baton")

TIMEOUT = 2.0  # seconds for one answer: metadata services are one hop away
# Intervals between two questions to a service that does not answer: some notices come only 30 seconds ahead.
LONGEST_PAUSE = 8
# Intervals between two questions about the node: its document has tens of kB, and the API server serves everyone.
NODE_PAUSE = 5
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

# Asks a source once: returns the notice in words, None without one, and raises where it cannot tell.
Look = Callable[[], str | None]


class _CannotWatchError(Exception):
    """Asking again will not help; the message has the remedy."""


class PreemptionWatch:
    """Watches for the notice that this machine will be preempted.

    Sources are asked in daemon threads, `interval` seconds apart; a silent one is a warning, never an error.
    `on_notice` is called once with the first notice, in a thread of the watch; it is logged when left out.
    """

    def __init__(
        self, settings: Preemption, *, interval: float = 1.0, on_notice: Callable[[str], None] | None = None
    ) -> None:
        self._settings, self._interval = settings, interval
        self._on_notice = on_notice or (lambda notice: logger.warning("this machine will be preempted: %s", notice))
        # The first entry counts. Appending to a list is atomic, so threads and the signal handler need no lock.
        self._notices: list[str] = []
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._catches = False
        self._previous: Callable[[int, FrameType | None], object] | int | None = None

    @property
    def notice(self) -> str | None:
        """The first notice in words, such as `SIGTERM` or `node n has taint k`."""
        return self._notices[0] if self._notices else None

    def __enter__(self) -> PreemptionWatch:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():  # Python sets handlers there alone
            self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._catches = True
        settings = self._settings
        self._start(self._report)  # in the signal handler's place, which must not log
        if settings.notice_file:
            path = settings.notice_file
            there = f"file {path} appeared"
            self._start(self._ask_again, path, lambda: there if os.path.exists(path) else None, self._interval)
        if url := settings.notice_url:
            presets: dict[str, Look] = {"aws": _AwsLook(), "gcp": _look_at_gcp, "azure": _look_at_azure}
            look = presets.get(url) or (lambda: None if _get(url) is None else f"{url} answers 200")
            self._start(self._ask_again, url, look, self._interval)
        if settings.node_taints:
            keys = frozenset(settings.node_taints)
            self._start(self._ask_again, "the node", lambda: _look_at_node(keys), self._interval * NODE_PAUSE)
        return self

    def __exit__(self, *_: object) -> None:
        if self._catches:
            # None represents a handler that was not set from Python, which Python cannot set again.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            self._catches = False
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=0.2)  # one that waits for an answer ends by itself, and time may be short

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"preemption-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _on_sigterm(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child, such as a worker process, inherits this handler: to it, SIGTERM means the end.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._note("SIGTERM")

    def _note(self, notice: str) -> None:
        if not self._notices:
            self._notices.append(notice)

    def _report(self) -> None:
        while not self._notices and not self._stop.wait(self._interval):
            pass
        if self._notices:
            self._on_notice(self._notices[0])

    def _ask_again(self, source: str, look: Look, interval: float) -> None:
        pause, warned = interval, False
        while not self._stop.is_set() and not self._notices:
            try:
                notice = look()
            except _CannotWatchError as error:
                logger.warning("%s", error)
                return
            except Exception as error:
                if not warned and not self._stop.is_set():
                    logger.warning("cannot tell from %s whether this machine stays: %s; asking on", source, error)
                warned, pause = True, min(pause * 2, max(interval, self._interval * LONGEST_PAUSE))
            else:
                pause = interval
                if notice:
                    self._note(notice)
            self._stop.wait(pause)


def _ask(url: str, headers: dict[str, str] | None = None, *, method: str = "GET", tls: Any = None) -> tuple[int, str]:
    # Here, not at the top: it takes 60 ms, and most runs ask no one.
    import urllib.error
    import urllib.request

    # Past any proxy, whose machine is another one.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
    request = urllib.request.Request(url, headers=headers or {}, method=method)
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")


def _get(url: str, headers: dict[str, str] | None = None) -> str | None:
    return _body(url, *_ask(url, headers))


def _body(url: str, status: int, body: str) -> str | None:
    if status == 200:
        return body
    if status in (204, 404):
        return None
    raise OSError(f"{url} answers {status}")


class _AwsLook:
    """Asks Amazon EC2 for `spot/instance-action`: 404 until the instance is to be interrupted, two minutes ahead.

    A rebalance recommendation is no notice: such an instance often stays. The session token reaches a pod only where
    the instance's hop limit is 2 or more.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/configuring-instance-metadata-service.html
    """

    def __init__(self) -> None:
        self._token: dict[str, str] = {}

    def __call__(self) -> str | None:
        # The variable of Amazon's own clients.
        base = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/")
        url = f"{base}/latest/meta-data/spot/instance-action"
        status, body = _ask(url, self._token) if self._token else (401, "")
        if status == 401:  # there is no token yet, or its six hours are over
            address = f"{base}/latest/api/token"
            token = _body(address, *_ask(address, {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, method="PUT"))
            self._token = {"X-aws-ec2-metadata-token": token or ""}
            status, body = _ask(url, self._token)
        action = _body(url, status, body)
        return None if action is None else f"{url} says {' '.join(action.split())}"


def _look_at_gcp() -> str | None:
    """Asks Google Compute Engine whether the instance is preempted, or stops for maintenance of its host.

    https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption
    https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    """
    # The variable of Google's own clients.
    host = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    for key, leaving in (("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")):
        url = f"http://{host}/computeMetadata/v1/instance/{key}"
        if (_get(url, {"Metadata-Flavor": "Google"}) or "").strip() == leaving:
            return f"{url} says {leaving}"
    return None


def _look_at_azure() -> str | None:
    """Asks Azure's Scheduled Events for a `Preempt` or `Terminate` of this machine.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    https://learn.microsoft.com/azure/virtual-machines/instance-metadata-service
    """
    # Baton's own variable: Azure has none.
    base = (os.environ.get("AZURE_METADATA_ENDPOINT") or "http://169.254.169.254").rstrip("/")
    url = f"{base}/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(_get(url, {"Metadata": "true"}) or "{}").get("Events") or []
    leaving = [event for event in events if event.get("EventType") in ("Preempt", "Terminate")]
    name = ""
    if leaving:
        with contextlib.suppress(Exception):
            address = f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            name = (_get(address, {"Metadata": "true"}) or "").strip()
    # Every machine of a scale set sees the events of all. One that cannot learn its name takes each for its own:
    # leaving in vain costs less than staying too long.
    for event in leaving:
        affected = [resource.lower() for resource in event.get("Resources") or []]
        if not name or not affected or name.lower() in affected:
            return f"{url} says {event['EventType']}"
    return None


def _look_at_node(keys: frozenset[str]) -> str | None:
    """Asks the API server for the taints of this pod's node, as the pod's service account.

    https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
    """
    host, node = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("NODE_NAME")
    if not host or not node:
        missing = "NODE_NAME is not set" if host else "this is not a pod"
        raise _CannotWatchError(f"the taints of the node are not watched: {missing}.")
    status, body = ask_api_server(host, f"/api/v1/nodes/{node}")
    if status == 403:
        raise _CannotWatchError(
            f"the taints of node {node} are not watched: the API server forbids it. Give the pod's service "
            f"account a ClusterRole with the verb get on the resource nodes."
        )
    if status != 200:
        raise OSError(f"the API server answers {status} for node {node}")
    taints = keys.intersection(taint["key"] for taint in json.loads(body)["spec"].get("taints") or [])
    return f"node {node} has taint {min(taints)}" if taints else None


def ask_api_server(host: str, path: str) -> tuple[int, str]:
    """Returns status and body of a GET to the cluster's API server, by the pod's account; OSError where it fails."""
    # Not with the package `kubernetes`: its import takes 0.9 s of the training process, for one GET.
    import ssl

    # Both files are read each time, because they are replaced while the pod runs.
    with open(os.path.join(SERVICE_ACCOUNT, "token"), encoding="ascii") as file:
        headers = {"Authorization": f"Bearer {file.read().strip()}", "Accept": "application/json"}
    tls = ssl.create_default_context(cafile=os.path.join(SERVICE_ACCOUNT, "ca.crt"))
    port = os.environ.get("KUBERNETES_SERVICE_PORT") or "443"
    return _ask(f"https://{f'[{host}]' if ':' in host else host}:{port}{path}", headers, tls=tls)
