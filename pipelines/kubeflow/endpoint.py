"""One way to talk to a Kubeflow Pipelines endpoint, and one kind of error where that fails.

The work is `kfp.Client`'s. Left alone it prints links to stdout, waits without limit for a host
that does not answer, retries a refused health check for 25 seconds, follows redirects to login
pages, and takes any HTML page for an empty answer. Here every request goes through one transport
with a time limit, which turns whatever an endpoint can do wrong into one `BatonError`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO
from urllib.parse import urlsplit

import kfp
from kfp_server_api import V2beta1Pipeline  # type: ignore[import-untyped, unused-ignore]

from baton.components.shared.core.errors import BatonError, UserError
from baton.pipelines.kubeflow.api import Installation, Pipeline, PostedSpec, Run, Workflow
from baton.pipelines.kubeflow.transport import (
    ENDPOINT_REMEDY,
    HEALTHZ_PATH,
    LOG_PATH,
    TOKEN_REMEDY,
    Renewed,
    Transport,
    one_line,
)


def page(endpoint: str) -> str:
    """Returns the address of the Kubeflow Pipelines UI, where it is another than the API's by kfp's own variable."""
    return (os.environ.get(kfp.client.client.KF_PIPELINES_UI_ENDPOINT_ENV) or endpoint).rstrip("/")


COMMAND = "BATON_KFP_TOKEN_COMMAND"
"""Environment variable: the command that prints the bearer token."""
COMMAND_S = 60
"""Seconds that it may take."""
FILES = ("BATON_KFP_TOKEN_FILE", kfp.client.KF_PIPELINES_SA_TOKEN_ENV)
"""Environment variables: the file with the bearer token, ours and kfp's own."""

Token = str | Renewed | None
"""A bearer token, one that is read anew once it is refused, or none."""


def token() -> Token:
    """Returns the bearer token that the environment names: by a command, a file of ours, itself, or kfp's file.

    Raises:
        UserError: the file cannot be read, or the command fails.
    """
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


def connect(endpoint: str, *, token: Token, namespace: str | None) -> Client:
    """Checks the address and the token, and returns a client whose endpoint has answered a health check."""
    _check_endpoint(endpoint)
    fixed = _one_word(token) if isinstance(token, str) and token.strip() else None
    with quiet(sys.stderr):  # kfp asks here for a browser log-in, where its IAP variables are set
        try:
            client = Client(
                host=endpoint,
                existing_token=fixed,
                credentials=token if isinstance(token, Renewed) else None,
                namespace=namespace or "kubeflow",
                ssl_ca_cert=os.environ.get("SSL_CERT_FILE"),
            )
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


class Client(kfp.Client):  # type: ignore[misc]
    """kfp's client on our transport, with one health check where kfp's own tries five times."""

    @property
    def renews(self) -> bool:
        """Whether its token is read anew once it is refused."""
        transport: Transport = self._run_api.api_client.rest_client
        return transport.renewed is not None

    def get_kfp_healthz(self, sleep_duration: int = 5) -> object:
        """Installs the transport and asks once. The constructor calls this, once its API exists."""
        self._versions: dict[str, PostedSpec] = {}
        api_client = self._healthz_api.api_client
        if not isinstance(api_client.rest_client, Transport):
            api_client.rest_client = Transport(api_client.configuration)
        return self._healthz_api.healthz_service_get_healthz()

    def retry_run(self, run_id: str) -> None:
        """Starts the failed stages of a run again."""
        self._run_api.run_service_retry_run(run_id)

    def create_pipeline(self, name: str, namespace: str | None) -> Pipeline:
        """Registers a pipeline that has no version yet."""
        body = V2beta1Pipeline(name=name, display_name=name, namespace=namespace)
        pipeline: Pipeline = self._pipelines_api.pipeline_service_create_pipeline(body)
        return pipeline

    def specification(self, run: Run) -> PostedSpec:
        """Returns the compiled pipeline of a run, also of one that refers to a version that was uploaded.

        Empty where that version is not to be had.
        """
        reference = run.pipeline_version_reference
        if run.pipeline_spec or not reference:
            return run.pipeline_spec or {}
        key = reference.pipeline_version_id
        if key not in self._versions:
            try:
                version: PostedSpec | None = self.get_pipeline_version(reference.pipeline_id, key).pipeline_spec
            except BatonError:
                return {}  # it may be had the next time
            self._versions[key] = version or {}
        return self._versions[key]

    def workflow(self, run_id: str) -> Workflow:
        """Returns the Argo workflow of a run, which knows what its pods say. Only the API's first version has it.

        Raises:
            BatonError: The endpoint does not serve that version, or fails.
        """
        answer = json.loads(self._get(f"/apis/v1beta1/runs/{run_id}"))
        manifest = answer.get("pipeline_runtime", {}).get("workflow_manifest")
        return json.loads(manifest) if manifest else {}

    def installation(self) -> Installation:
        """Returns what an installation says of itself."""
        answer: Installation = json.loads(self._get(HEALTHZ_PATH))
        return answer

    def own_mlflow(self, run_id: str) -> str | None:
        """Returns the page of a run in the MLflow that Kubeflow itself logs to, None where it does not."""
        outputs = json.loads(self._get(f"/apis/v2beta1/runs/{run_id}")).get("plugins_output") or {}
        page = outputs.get("mlflow", {}).get("entries", {}).get("run_url", {}).get("value")
        return str(page) if page else None

    def log(self, run_id: str, pod: str) -> str:
        """Returns what a pod's main container has printed.

        Raises:
            BatonError: The endpoint does not have it, or fails.
        """
        return self._get(f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}{LOG_PATH}")

    def _get(self, path: str) -> str:
        api_client = self._run_api.api_client
        headers = dict(api_client.default_headers)
        api_client.update_params_for_auth(headers, [], ["Bearer"])
        answer = api_client.rest_client.GET(api_client.configuration.host + path, headers=headers)
        return str(answer.data.decode("utf-8", "replace"))


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
