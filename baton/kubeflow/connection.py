"""A Kubeflow Pipelines endpoint: its answers as typed values, its transport, one kind of error.

The work is `kfp.Client`'s. Left alone it prints links to stdout, waits without limit for a host that does not answer,
retries a refused health check for 25 seconds, follows redirects to login pages, and takes any HTML page for an empty
answer. Here every request goes through one transport with a time limit, which turns whatever an endpoint can do wrong
into one `BatonError`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO
from urllib.parse import unquote, urlsplit

import kfp
import urllib3
from kfp.client.token_credentials_base import TokenCredentialsBase
from kfp_server_api import (  # type: ignore[import-untyped, unused-ignore]
    ApiException,
    Configuration,
    V2beta1Pipeline,  # type: ignore[import-untyped, unused-ignore]
    V2beta1PipelineVersionReference,  # type: ignore[import-untyped, unused-ignore]
    V2beta1Run,  # type: ignore[import-untyped, unused-ignore]
    V2beta1RuntimeConfig,  # type: ignore[import-untyped, unused-ignore]
    rest,
)

from baton import machine
from baton.errors import BatonError, UserError

Spec = dict[str, Any]  # part of a compiled pipeline, as YAML has it
Node = dict[str, str]
"""A node of an Argo workflow: `id`, `name`, `displayName`, `type`, `phase`, `message`, `startedAt`, `templateName`.

One made of its pod has `podName`."""
STARTED_UNSET = 1971  # earlier years mean no time: the backend writes 1970
ENDS = frozenset({"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"})
"""States of a run that has ended."""


@dataclass(frozen=True)
class TaskDetail:
    """State of a task or graph of a run, as the API lists it."""

    key: str  # last part of its node's name in the Argo workflow
    state: str | None
    started: datetime.datetime | None
    ended: datetime.datetime | None
    message: str | None
    children: tuple[str, ...] = ()  # ids of the nodes after it; the API calls them names of pods
    path: tuple[str, ...] = ()  # keys of the graphs around it and its own, where the API tells them
    pod: str | None = None  # of its newest attempt, where the API tells it

    @classmethod
    def of(cls, answer: Any) -> TaskDetail:
        started, ended = (
            time if time and time.year >= STARTED_UNSET else None for time in (answer.start_time, answer.end_time)
        )
        children = tuple(child.pod_name for child in answer.child_tasks or () if child.pod_name)
        told = [answer.error, *(status.error for status in reversed(answer.state_history or ()))]
        message = next((error.message for error in told if error and error.message), None)
        return cls(answer.display_name or "", answer.state, started, ended, message, children)

    @classmethod
    def of_task(cls, answer: Mapping[str, Any]) -> TaskDetail:
        """Returns a `PipelineTask` of the API after 2.17, which lists no task details any more."""
        started, ended = (
            datetime.datetime.fromisoformat(text) if (text := answer.get(name)) else None
            for name in ("create_time", "end_time")
        )
        errors = (status.get("error", {}).get("message") for status in reversed(answer.get("state_history", [])))
        message = next(filter(None, [answer.get("status_metadata", {}).get("message"), *errors]), None)
        state = {"CACHED": "SUCCEEDED"}.get(answer.get("state", ""), answer.get("state"))
        path = tuple(answer.get("scope_path", "").split(".")[1:])  # without `root`
        pod = next((pod["name"] for pod in reversed(answer.get("pods", [])) if pod.get("type") == "EXECUTOR"), None)
        return cls(answer.get("name", ""), state, started, ended, message, path=path, pod=pod)


@dataclass(frozen=True)
class KubeflowRun:
    run_id: str
    display_name: str
    state: str | None
    service_account: str | None
    created_at: datetime.datetime
    finished_at: datetime.datetime | None
    posted: Spec  # the compiled pipeline, where the run carries it itself
    version: tuple[str, str] | None  # otherwise the ids of its pipeline and version
    parameters: dict[str, object]
    details: tuple[TaskDetail, ...]  # a listing of runs lacks them
    history: tuple[tuple[str, datetime.datetime | None], ...] = ()  # states one after another, each with its time
    experiment_id: str | None = None
    pipeline_root: str | None = None  # where it was given
    is_archived: bool = False
    plugins: Any = None  # their settings for this run

    @property
    def num_ends(self) -> int:
        """Times that it has ended: once more after each retry; 0 where the API keeps no history."""
        return sum(state in ENDS for state, _ in self.history)

    @property
    def ended_at(self) -> datetime.datetime | None:
        """Returns when it ended for the last time."""
        times = [self.finished_at, *(time for state, time in self.history[-1:] if state in ENDS)]
        return max((time for time in times if time and time.year >= STARTED_UNSET), default=None)

    @property
    def was_cancelled(self) -> bool:
        """Whether somebody has cancelled it since it was last started: the API calls a cancelled run a failed one."""
        states = [state for state, _ in self.history]
        begun = max((at for at, state in enumerate(states) if state in ("PENDING", "RUNNING")), default=0)
        return self.state == "CANCELED" or "CANCELING" in states[begun:]

    @classmethod
    def of(cls, answer: Any) -> KubeflowRun:
        reference, details = answer.pipeline_version_reference, answer.run_details
        settings = answer.runtime_config
        return cls(
            answer.run_id,
            answer.display_name,
            answer.state,
            answer.service_account,
            answer.created_at,
            answer.finished_at,
            answer.pipeline_spec or {},
            (reference.pipeline_id, reference.pipeline_version_id) if reference else None,
            (settings and settings.parameters) or {},
            tuple(map(TaskDetail.of, (details and details.task_details) or ())),
            tuple((status.state, status.update_time) for status in answer.state_history or () if status.state),
            answer.experiment_id,
            settings and settings.pipeline_root,
            answer.storage_state == "ARCHIVED",
            answer.plugins_input,
        )


@dataclass(frozen=True)
class Workflow:
    """The Argo workflow of a run; empty where it cannot be had."""

    name: str = ""
    nodes: tuple[Node, ...] = ()
    message: str = ""
    is_cancelled: bool = False  # its deadline is 0: so the backend ends a cancelled run
    is_compressed: bool = False  # larger than 1 MiB, so that Argo has compressed its nodes
    retry_strategy: dict[str, str] | None = None  # an installation merges it into every template
    pods_have_ids: bool = False  # Argo's first naming: a pod has the id of its node
    has_all_pods: bool = False  # made of the pods that Kubernetes has: a failed stage without one lost it

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Workflow:
        metadata, spec, status = (manifest.get(part, {}) for part in ("metadata", "spec", "status"))
        return cls(
            metadata.get("name", ""),
            tuple(status.get("nodes", {}).values()),
            status.get("message", ""),
            spec.get("activeDeadlineSeconds") == 0,
            bool(status.get("compressedNodes")),
            spec.get("templateDefaults", {}).get("retryStrategy"),
            metadata.get("annotations", {}).get("workflows.argoproj.io/pod-name-format") == "v1",
        )


ENDPOINT_REMEDY = (
    "Give the address under which /apis/v2beta1/healthz answers: http://localhost:8888 behind "
    "`kubectl port-forward svc/ml-pipeline 8888`, https://HOST/pipeline on a Kubeflow dashboard."
)

_TIMEOUTS_S = (4, 30)
_RUNS = 4  # in an answer: each may carry its whole pipeline, a megabyte once it is read
_TASKS = 200
_HEALTHZ_TIMEOUTS_S = (4, 10)  # seconds to connect and to read
HEALTHZ_PATH = "/apis/v2beta1/healthz"
LOG_PATH = "/log"  # end of the address of a pod's log, which is text
_FORBIDDEN_UPLOADS = ("Failed to create a pipeline", "Failed to create a pipeline version")
"""Kubeflow's whole answer where the right to upload is missing; a fault of the file it names."""
TOKEN_REMEDY = (
    "Put a valid token in BATON_KFP_TOKEN or KF_PIPELINES_TOKEN. One that ends before the run is read again from the "
    "file of BATON_KFP_TOKEN_FILE or the command of BATON_KFP_TOKEN_COMMAND."
)
CREATE_REMEDY = "Ask for list and create on pipelines of pipelines.kubeflow.org in your namespace."


class TransientError(BatonError):
    """The endpoint may well answer the next time it is asked."""


class AwayError(TransientError):
    """The endpoint does not answer at present, and may or may not have executed the request."""


class NameClashError(UserError):
    """The name is taken."""


class RefusedError(UserError):
    """The endpoint, or a proxy before it, does not let the user in: a token that has ended, a log-in page."""


class ForbiddenError(RefusedError):
    """The user may not."""


class Renewed(TokenCredentialsBase):  # type: ignore[misc]
    """A bearer token that is read again once it is refused: it may end before the run does."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self.token = read()

    def refresh_api_key_hook(self, config: Configuration) -> None:
        """Puts the token into a request: the generated client calls this before each."""
        config.api_key["authorization"] = self.token

    def is_new(self) -> bool:
        """Reads the token again and tells whether it has changed."""
        before = self.token
        try:
            self.token = self._read()
        except UserError:
            return False
        return self.token != before


def one_line(text: object) -> str:
    """Returns a text on one line, cut after 300 characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= 300 else f"{line[:300]}…"


class Transport(rest.RESTClientObject):  # type: ignore[misc]
    """The generated client's transport: bounded in time, no redirects, one kind of error."""

    def __init__(self, configuration: Configuration) -> None:
        # Who waits has a patience of its own, see `submit.wait`; two loops would multiply.
        configuration.retries = False
        self._endpoint = configuration.host
        self._proxy = machine.proxy_for(self._endpoint)
        if self._proxy:
            parts = urlsplit(self._proxy.url)
            if parts.scheme not in ("http", "https"):
                raise UserError(
                    f"'{self._endpoint}' is behind the proxy {self._proxy}; expected one that speaks HTTP.",
                    remedy=f"Name one, or the endpoint's host in NO_PROXY={urlsplit(self._endpoint).hostname}.",
                )
            configuration.proxy = self._proxy.url
            if parts.username:
                given = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
                configuration.proxy_headers = urllib3.make_headers(proxy_basic_auth=given)
        super().__init__(configuration)
        self._has_token = bool(configuration.api_key)
        owner = getattr(configuration.refresh_api_key_hook, "__self__", None)
        self.renewed = owner if isinstance(owner, Renewed) else None

    def request(self, method: str, url: str, **options: object) -> rest.RESTResponse:
        """Sends one request, and once more with a renewed token where it was refused."""
        try:
            return self._request(method, url, options)
        except RefusedError:
            headers = options.get("headers")
            if self.renewed is None or not isinstance(headers, dict) or not self.renewed.is_new():
                raise
            options["headers"] = {**headers, "authorization": f"Bearer {self.renewed.token}"}
            return self._request(method, url, options)

    def _request(self, method: str, url: str, options: dict[str, object]) -> rest.RESTResponse:
        is_health_check = url.endswith(HEALTHZ_PATH)
        options["_request_timeout"] = _HEALTHZ_TIMEOUTS_S if is_health_check else _TIMEOUTS_S
        try:
            response = super().request(method, url, **options)
        except ApiException as error:
            if error.status == 404 and is_health_check and self._speaks_v1(options):
                raise UserError(
                    f"'{self._endpoint}' speaks v1beta1 of the Kubeflow Pipelines API; expected v2beta1.",
                    remedy="Upgrade Kubeflow Pipelines to 2.0 or later, or give another endpoint.",
                ) from error
            raise self._named(_refused(self._endpoint, url, error, has_token=self._has_token)) from error
        except urllib3.exceptions.HTTPError as error:
            raise self._named(_unreachable(self._endpoint, error)) from error
        if not url.endswith(LOG_PATH) and not _is_json_object(response.data):
            raise self._named(
                RefusedError(
                    f"'{self._endpoint}' answered with {_describe(response.data)}; "
                    "expected JSON from the Kubeflow Pipelines API.",
                    remedy=ENDPOINT_REMEDY if self._has_token else f"{ENDPOINT_REMEDY} {TOKEN_REMEDY}",
                )
            )
        return response

    def _named(self, error: BatonError) -> BatonError:
        """Adds the proxy, if there is one, to the remedy of an error."""
        if self._proxy:
            hint = f"The proxy was {self._proxy}; NO_PROXY={urlsplit(self._endpoint).hostname} bypasses it."
            error.remedy = f"{error.remedy} {hint}" if error.remedy else hint
        return error

    def _speaks_v1(self, options: dict[str, object]) -> bool:
        url = self._endpoint + HEALTHZ_PATH.replace("v2beta1", "v1beta1")
        try:
            return _is_json_object(super().request("GET", url, **options).data)
        except (ApiException, urllib3.exceptions.HTTPError):
            return False


def _refused(endpoint: str, url: str, error: ApiException, *, has_token: bool) -> BatonError:
    status, reply = error.status, _describe(error.body)
    if not status:
        return _tls_failed(endpoint, error.reason)
    if 300 <= status < 400:
        target = (error.headers or {}).get("location", "elsewhere").split("?")[0]
        return RefusedError(
            f"'{endpoint}' redirects to '{target}' ({status}); expected the API itself.",
            remedy=f"If that is a login page: {TOKEN_REMEDY} Otherwise give that address instead.",
        )
    if status in (401, 403):
        answer = "refuses the token" if has_token else "asks for a token and got none"
        return ForbiddenError(
            f"'{endpoint}' {answer} ({status}: {reply}); expected access.",
            remedy=f"{TOKEN_REMEDY} Check that it has not expired and that the namespace is yours.",
        )
    if status == 404 and _is_json_object(error.body) and not url.endswith(HEALTHZ_PATH):
        return UserError(f"'{endpoint}' does not have it (404: {reply}); expected it to exist.")
    if status == 404:
        return UserError(
            f"'{endpoint}' has no Kubeflow Pipelines API (404: {reply}); expected {HEALTHZ_PATH} there.",
            remedy=ENDPOINT_REMEDY,
        )
    if status == 409:
        return NameClashError(f"The name is taken (409: {reply}); expected a new one.", remedy="Choose another.")
    if status == 429 or status >= 500:
        kind = TransientError if status == 500 else AwayError  # 500 is the API's own, the others a proxy's before it
        return kind(f"'{endpoint}' fails ({status}: {reply}); expected an answer.", remedy="Try again in a minute.")
    if reply in _FORBIDDEN_UPLOADS:
        return ForbiddenError(
            f"'{endpoint}' refuses the upload ({status}: {reply}); expected the right to create pipelines.",
            remedy=CREATE_REMEDY,
        )
    if "Schedule cron" in reply:
        return UserError(
            f"'{endpoint}' refuses the cron line ({reply.rpartition('Error: ')[2]}); expected one that it reads.",
            remedy="Every night at three is '0 3 * * *', every Sunday '0 3 * * 0'.",
        )
    if "namespace" in reply.lower():
        return UserError(
            f"'{endpoint}' refuses the request ({status}: {reply}); expected a namespace that is yours.",
            remedy="Name your Kubeflow profile with --namespace; where there is one user, leave it out.",
        )
    return UserError(
        f"'{endpoint}' refuses the request ({status}: {reply}); expected what the pipeline declares.",
        remedy="Check the parameters, and that the pipeline was compiled for this version.",
    )


def _unreachable(endpoint: str, error: Exception) -> BatonError:
    if isinstance(error, urllib3.exceptions.SSLError):
        return _tls_failed(endpoint, str(error))
    if isinstance(error, urllib3.exceptions.ProxyError):
        return TransientError(
            f"'{endpoint}' cannot be reached: its proxy fails ({one_line(error)}); expected it to forward the request.",
            remedy="Check the proxy's address, user and password.",
        )
    if isinstance(error, urllib3.exceptions.ProtocolError):
        reason = "closes the connection or does not answer in HTTP"
        remedy = "If it serves TLS, write https://; the gRPC port (8887) is not the API's (8888)."
    elif isinstance(error, urllib3.exceptions.NameResolutionError):
        reason, remedy = "names a host that does not resolve", "Check the spelling, the VPN and the DNS."
    elif isinstance(error, urllib3.exceptions.NewConnectionError):  # a TimeoutError too, to urllib3
        reason, remedy = "takes no connection", "Check the port, and that `kubectl port-forward` is running."
    else:
        reason, remedy = "does not answer in time", "Check the network, and that the service is up."
    return AwayError(f"'{endpoint}' {reason}; expected the Kubeflow Pipelines API ({one_line(error)}).", remedy=remedy)


def _tls_failed(endpoint: str, reason: str) -> BatonError:
    remedy = "Name your authority's certificate in SSL_CERT_FILE, or use `kubectl port-forward`."
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason.upper().replace(" ", "_"):
        remedy = "It seems to speak plain HTTP: write http:// instead of https://."
    return UserError(f"'{endpoint}' fails the TLS handshake ({one_line(reason)}); expected a valid one.", remedy=remedy)


def _is_json_object(body: bytes | str | None) -> bool:
    try:
        return isinstance(json.loads(body or ""), dict)
    except ValueError:
        return False


def _describe(body: bytes | str | None) -> str:
    """Returns the message of an answer, or the kind of page that it is."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body or ""
    if _is_json_object(text):
        answer = json.loads(text)
        return one_line(answer.get("message") or answer.get("error_message") or answer.get("error") or text)
    if "<html" in text[:2000].lower():
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        return f"an HTML page titled '{one_line(title[1])}'" if title else "an HTML page"
    return one_line(text) or "an empty answer"


def ui_address(endpoint: str) -> str:
    """Returns the address of the Kubeflow Pipelines UI, where it is another than the API's by kfp's own variable."""
    return (os.environ.get(kfp.client.client.KF_PIPELINES_UI_ENDPOINT_ENV) or endpoint).rstrip("/")


COMMAND = "BATON_KFP_TOKEN_COMMAND"  # environment variable: prints the bearer token
COMMAND_S = 60  # seconds that it may take
FILES = ("BATON_KFP_TOKEN_FILE", kfp.client.KF_PIPELINES_SA_TOKEN_ENV)  # environment variables: ours and kfp's own


def token() -> str | Renewed | None:
    """Returns the bearer token that the environment names: by a command, a file of ours, itself, or kfp's file."""
    ours, theirs = ((name, os.environ.get(name)) for name in FILES)
    if command := os.environ.get(COMMAND):
        return Renewed(lambda: _printed(command))
    itself = os.environ.get("BATON_KFP_TOKEN") or os.environ.get("KF_PIPELINES_TOKEN")
    for name, file in (ours, theirs) if not itself else (ours,):
        if file:
            return Renewed(lambda name=name, file=file: _read(name, file))  # type: ignore[misc]
    return itself


def _printed(command: str) -> str:
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=COMMAND_S, check=False)
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        if done.returncode == 0:
            return _one_word(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = [str(error)]
    raise UserError(
        f"{COMMAND} is {command!r}, which fails ({one_line(reason[0])}); expected it to print a bearer token.",
        remedy="Try it in a shell; its words are split as there, and no shell runs it.",
    )


def _read(name: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return _one_word(file.read())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "no text"
        raise UserError(
            f"{name} is {path!r}, which cannot be read ({reason}); expected a file that holds a bearer token.",
            remedy="Name the file, or unset the variable.",
        ) from None


def _one_word(text: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", text.strip()):
        raise UserError("The token holds a space or a letter beyond ASCII; expected one word.", remedy=TOKEN_REMEDY)
    return text.strip()


def connect(endpoint: str, namespace: str | None = None) -> KubeflowClient:
    """Checks the address and the token, and returns a client whose endpoint has answered a health check."""
    _check_endpoint(endpoint)
    given = token()
    fixed = _one_word(given) if isinstance(given, str) and given.strip() else None
    with quiet(sys.stderr):  # kfp asks here for a browser log-in, where its IAP variables are set
        try:
            client = KubeflowClient(
                host=endpoint,
                existing_token=fixed,
                credentials=given if isinstance(given, Renewed) else None,
                namespace=namespace or "kubeflow",
                ssl_ca_cert=os.environ.get("SSL_CERT_FILE"),
            )
            client.pods_namespace = namespace or "kubeflow"
            client.get_kfp_healthz()
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise UserError(
                f"kfp's own settings cannot be read: {one_line(error)}; expected a JSON object.",
                remedy="Mend or remove ~/.config/kfp/context.json.",
            ) from error
    return client


@contextlib.contextmanager
def quiet(sink: TextIO) -> Iterator[None]:
    """Sends what kfp prints elsewhere, and drops its warnings."""
    with contextlib.redirect_stdout(sink), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class KubeflowClient(kfp.Client):  # type: ignore[misc]
    """kfp's client on our transport, with one health check where kfp's own tries five times."""

    pods_namespace: str

    @property
    def renews(self) -> bool:
        transport: Transport = self._run_api.api_client.rest_client
        return transport.renewed is not None

    def get_kfp_healthz(self, sleep_duration: int = 5) -> object:
        """Installs the transport and asks once. The constructor calls this, once its API exists."""
        self._versions: dict[str, Spec] = {}
        api_client = self._healthz_api.api_client
        if not isinstance(api_client.rest_client, Transport):
            api_client.rest_client = Transport(api_client.configuration)
        return self._healthz_api.healthz_service_get_healthz()

    def retry_run(self, run_id: str) -> None:
        self._run_api.run_service_retry_run(run_id)

    def get_run(self, run_id: str) -> KubeflowRun:
        run = KubeflowRun.of(super().get_run(run_id))
        return run if run.details else replace(run, details=tuple(self._tasks(run_id)))

    def _tasks(self, run_id: str) -> Iterator[TaskDetail]:
        """Yields the tasks of a run from the API after 2.17; none from an older one."""
        path, page = f"/apis/v2beta1/runs/{run_id}/tasks?page_size={_TASKS}", ""
        with contextlib.suppress(BatonError, ApiException, ValueError):
            while True:
                answer = json.loads(self._get(f"{path}&page_token={page}"))
                yield from map(TaskDetail.of_task, answer.get("tasks") or ())
                page = answer.get("next_page_token") or ""
                if not page:
                    return

    def newest_runs(self, count: int, namespace: str | None, **options: str) -> tuple[list[KubeflowRun], int]:
        """Returns the newest runs, without their stages, and how many there are."""
        listed = self.list_runs(page_size=count, sort_by="created_at desc", namespace=namespace, **options)
        runs = list(map(KubeflowRun.of, listed.runs or ()))
        return runs, int(listed.total_size or len(runs))

    def runs_of(self, namespace: str | None, most: int) -> Iterator[KubeflowRun]:
        """Yields the newest runs of a namespace, without their stages: `most` at most."""
        page = ""
        while most > 0:
            listed = self.list_runs(
                page_token=page, page_size=min(most, _RUNS), sort_by="created_at desc", namespace=namespace
            )
            yield from map(KubeflowRun.of, (listed.runs or ())[:most])
            most -= len(listed.runs or ())
            page = listed.next_page_token or ""
            if not page:
                return

    def create_pipeline(self, name: str, namespace: str | None) -> str:
        """Registers a pipeline that has no version yet, and returns its id."""
        body = V2beta1Pipeline(name=name, display_name=name, namespace=namespace)
        return str(self._pipelines_api.pipeline_service_create_pipeline(body).pipeline_id)

    def specification(self, run: KubeflowRun) -> Spec:
        """Returns the compiled pipeline of a run, empty where its uploaded version is not to be had."""
        return specification(self._pipeline(run))

    def deadline_s(self, run: KubeflowRun) -> int | None:
        """Returns the seconds from its start that the compiled pipeline gives a run, None for no limit."""
        platforms = self._pipeline(run).get("platform_spec", {}).get("platforms", {})
        seconds = platforms.get("kubernetes", {}).get("pipelineConfig", {}).get("activeDeadlineSeconds")
        return int(seconds) if seconds else None

    def _pipeline(self, run: KubeflowRun) -> Spec:
        if run.posted or not run.version:
            return run.posted
        pipeline, version = run.version
        if version not in self._versions:
            try:
                self._versions[version] = self.get_pipeline_version(pipeline, version).pipeline_spec or {}
            except BatonError:
                return {}  # it may be had the next time
        return self._versions[version]

    def start_again(self, run: KubeflowRun, parameters: dict[str, object]) -> str:
        """Submits the pipeline of a run once more, with these parameters, and returns the new run's id."""
        version = run.version and V2beta1PipelineVersionReference(
            pipeline_id=run.version[0], pipeline_version_id=run.version[1]
        )
        body = V2beta1Run(
            display_name=run.display_name,
            experiment_id=run.experiment_id,
            pipeline_spec=None if version else run.posted,
            pipeline_version_reference=version,
            runtime_config=V2beta1RuntimeConfig(parameters=parameters, pipeline_root=run.pipeline_root),
            service_account=run.service_account,
            plugins_input=run.plugins,
        )
        return str(self._run_api.run_service_create_run(body).run_id)

    def workflow(self, run_id: str) -> Workflow:
        """Returns the Argo workflow, which has the messages of pods; only v1beta1, not served everywhere, has it."""
        answer = json.loads(self._get(f"/apis/v1beta1/runs/{run_id}"))
        manifest = answer.get("pipeline_runtime", {}).get("workflow_manifest")
        return Workflow.of(json.loads(manifest)) if manifest else Workflow()

    def installation(self) -> dict[str, Any]:
        """Returns `tag_name` and `multi_user` of an installation."""
        answer: dict[str, Any] = json.loads(self._get(HEALTHZ_PATH))
        return answer

    def own_mlflow(self, run_id: str) -> str | None:
        """Returns the page of a run in the MLflow that Kubeflow itself logs to, None where it does not."""
        outputs = json.loads(self._get(f"/apis/v2beta1/runs/{run_id}")).get("plugins_output") or {}
        page = outputs.get("mlflow", {}).get("entries", {}).get("run_url", {}).get("value")
        return str(page) if page else None

    def log(self, run_id: str, pod: str) -> str:
        """Returns the output of a pod's main container."""
        return self._get(f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}{LOG_PATH}")

    def _get(self, path: str) -> str:
        api_client = self._run_api.api_client
        headers = dict(api_client.default_headers)
        api_client.update_params_for_auth(headers, [], ["Bearer"])
        answer = api_client.rest_client.GET(api_client.configuration.host + path, headers=headers)
        return str(answer.data.decode("utf-8", "replace"))


def specification(posted: Spec | None) -> Spec:
    """Returns a compiled pipeline as it was posted: alone, or with its platform's."""
    found: Spec = (posted or {}).get("pipeline_spec", posted or {})
    return found


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 - raises for a port that is none
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_valid = False
    if "@" in endpoint:
        shown, problem = endpoint.rpartition("@")[2], "carries a user name or password"
    else:
        shown, problem = endpoint, "is not an address"
    if not is_valid or re.search(r"[\s@?#]", endpoint):
        raise UserError(
            f"Endpoint '{shown}' {problem}; expected http(s)://HOST[:PORT][/PATH] and no more.",
            remedy=ENDPOINT_REMEDY,
        )
