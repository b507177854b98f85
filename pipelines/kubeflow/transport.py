"""The transport of requests to a Kubeflow Pipelines endpoint: bounded in time, and with one kind of error.

kfp's own waits without limit for a host that does not answer, follows redirects to login pages, and takes any HTML page
for an empty answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

import urllib3
from kfp.client.token_credentials_base import TokenCredentialsBase
from kfp_server_api import ApiException, Configuration, rest  # type: ignore[import-untyped, unused-ignore]

from baton.components.shared.core import proxies
from baton.components.shared.core.errors import BatonError, UserError

ENDPOINT_REMEDY = (
    "Give the address under which /apis/v2beta1/healthz answers: http://localhost:8888 behind "
    "`kubectl port-forward svc/ml-pipeline 8888`, https://HOST/pipeline on a Kubeflow dashboard."
)

_TIMEOUTS_S = (4, 30)
_HEALTHZ_TIMEOUTS_S = (4, 10)
"""Seconds to connect and seconds to read."""

HEALTHZ_PATH = "/apis/v2beta1/healthz"
LOG_PATH = "/log"
"""End of the address of a pod's log, which is text."""
_FORBIDDEN_UPLOADS = ("Failed to create a pipeline", "Failed to create a pipeline version")
"""What Kubeflow answers, and no more, where the right to upload is missing; what is wrong with a file it names."""
TOKEN_REMEDY = (
    "Put a valid token in BATON_KFP_TOKEN or KF_PIPELINES_TOKEN. One that ends before the run is read again from the "
    "file of BATON_KFP_TOKEN_FILE or the command of BATON_KFP_TOKEN_COMMAND."
)
CREATE_REMEDY = "Ask for list and create on pipelines of pipelines.kubeflow.org in your namespace."


class TransientError(BatonError):
    """The endpoint may well answer the next time it is asked."""


class AwayError(TransientError):
    """The endpoint cannot be asked at present, so that it is not known whether it has done what it was to do."""


class NameClashError(UserError):
    """The name is taken."""


class RefusedError(UserError):
    """The endpoint, or what stands before it, does not let the user in: a token that has ended, a log-in page."""


class ForbiddenError(RefusedError):
    """The user may not."""


class Renewed(TokenCredentialsBase):  # type: ignore[misc]
    """A bearer token that is read anew once it is refused: it may end before the run does.

    Args:
        read: Returns the token as it is now.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self.token = read()

    def refresh_api_key_hook(self, config: Configuration) -> None:
        """Puts the token into a request; the generated client calls this before each."""
        config.api_key["authorization"] = self.token

    def is_new(self) -> bool:
        """Reads the token anew and tells whether it is another one."""
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
        self._proxy = proxies.applies(self._endpoint)
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
        """Sends one request, and once more with a new token where it was refused and there is one.

        Raises:
            BatonError: The answer is anything but JSON with a 2xx status.
        """
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
        """Returns an error that names the proxy, where there is one between us and who has answered, or has not."""
        if self._proxy:
            hint = f"Asked was the proxy {self._proxy}; NO_PROXY={urlsplit(self._endpoint).hostname} passes it by."
            error.remedy = f"{error.remedy} {hint}" if error.remedy else hint
        return error

    def _speaks_v1(self, options: dict[str, object]) -> bool:
        url = self._endpoint + HEALTHZ_PATH.replace("v2beta1", "v1beta1")
        try:
            return _is_json_object(super().request("GET", url, **options).data)
        except (ApiException, urllib3.exceptions.HTTPError):
            return False


def _refused(endpoint: str, url: str, error: ApiException, *, has_token: bool) -> BatonError:
    """Returns the error that a person reads for an answer with a status other than 2xx."""
    status, reply = error.status, _describe(error.body)
    if not status:
        return _tls_failed(endpoint, error.reason)
    if 300 <= status < 400:
        target = (error.headers or {}).get("location", "elsewhere").split("?")[0]
        return RefusedError(
            f"'{endpoint}' redirects to '{target}' ({status}); expected the API itself.",
            remedy=f"Where that is a login page: {TOKEN_REMEDY} Otherwise give that address instead.",
        )
    if status in (401, 403):
        answer = "refuses the token" if has_token else "asks for a token and got none"
        return ForbiddenError(
            f"'{endpoint}' {answer} ({status}: {reply}); expected to be let in.",
            remedy=f"{TOKEN_REMEDY} Check that it has not expired and that the namespace is yours.",
        )
    if status == 404 and _is_json_object(error.body) and not url.endswith(HEALTHZ_PATH):
        return UserError(f"'{endpoint}' does not have it (404: {reply}); expected what was asked for to exist.")
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
            f"'{endpoint}' cannot be reached: its proxy fails ({one_line(error)}); expected a way through.",
            remedy="Check the proxy's address, user and password.",
        )
    if isinstance(error, urllib3.exceptions.ProtocolError):
        reason = "closes the connection or does not answer in HTTP"
        remedy = "Where it serves TLS, write https://; the gRPC port (8887) is not the API's (8888)."
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
    """Says in a few words what an answer holds: its message, or what kind of page it is."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body or ""
    if _is_json_object(text):
        answer = json.loads(text)
        return one_line(answer.get("message") or answer.get("error_message") or answer.get("error") or text)
    if "<html" in text[:2000].lower():
        title = re.search(r"<title[^>]*>(.*?)</title>", text, re.IGNORECASE | re.DOTALL)
        return f"an HTML page titled '{one_line(title[1])}'" if title else "an HTML page"
    return one_line(text) or "an empty answer"
