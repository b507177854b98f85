"""Submits a compiled pipeline to a Kubeflow Pipelines endpoint, and waits for its run.

`baton.pipelines.kubeflow.endpoint` connects; whatever the endpoint does wrong arrives here as a `BatonError`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.core.patience import Attempt, attempts, insist
from baton.pipelines.kubeflow import registry
from baton.pipelines.kubeflow.api import Run
from baton.pipelines.kubeflow.compiled import Package
from baton.pipelines.kubeflow.endpoint import Client, Token, connect, page, quiet
from baton.pipelines.kubeflow.registry import Registered
from baton.pipelines.kubeflow.transport import (
    ENDPOINT_REMEDY,
    NameClashError,
    RefusedError,
    TransientError,
    one_line,
)

FINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"})
MAX_TRANSIENT_FAILURES = 5
"""Polls in a row that may fail before `wait` gives up; the pauses between them double."""

POLL_S = 5.0
"""Seconds between two polls of a run that somebody waits for."""

_MAX_PAUSE_S = 60.0
RESUMES_IN_S = 30.0
"""Seconds for which a run that was started again may be shown as the one that has ended."""


@dataclass(frozen=True)
class Submission:
    """A run that the endpoint has accepted."""

    run_id: str
    run_name: str
    url: str
    """Where the run is shown in the Kubeflow Pipelines UI."""
    registered: Registered | None = None
    """The version of the pipeline that it was started from; None where it carries its specification itself."""


def submit(
    package_path: str,
    endpoint: str,
    *,
    experiment: str,
    run_name: str,
    arguments: dict[str, object],
    token: Token = None,
    namespace: str | None = None,
    service_account: str | None = None,
    cache: bool = True,
    registers: bool = True,
) -> Submission:
    """Creates a run of a compiled pipeline, and its experiment where there is none yet, and returns it.

    It is given every parameter, as Kubeflow's pages show only those.

    Args:
        package_path: The compiled pipeline, a `.yaml` file.
        endpoint: Address of the Kubeflow Pipelines API.
        experiment: Experiment in which the run is listed.
        run_name: Name shown for the run; it need not be unique.
        arguments: The pipeline's parameters, by name.
        token: Bearer token, or None where the endpoint asks for none.
        namespace: The user's namespace on a multi-user Kubeflow.
        service_account: Account that the pods run under; the endpoint's own choice when left out.
        cache: Whether finished stages may be taken from Kubeflow's cache, as the package says. Where not, the run
            carries its specification itself: that of a version cannot be changed for one run.
        registers: Whether the pipeline is registered, and the run started from its version.

    Raises:
        UserError: The package, an argument, the address, the token or a name is at fault.
        BatonError: The endpoint cannot be reached or fails.
    """
    package = Package.read(package_path)
    _check_arguments(arguments)
    client = connect(endpoint, token=token, namespace=namespace)
    registered = registry.register(client, package, namespace) if registers and cache else None
    with quiet(io.StringIO()):
        run = client.run_pipeline(
            experiment_id_of(client, endpoint, experiment, namespace),
            run_name,
            params={**package.defaults, **arguments},
            enable_caching=None if cache else False,  # True would turn it on for every stage
            service_account=service_account,
            **source(package, registered),
        )
    run_id = required(run.run_id, "the run", endpoint)
    return Submission(run_id, run_name, run_url(endpoint, run_id), registered)


def source(package: Package, registered: Registered | None) -> dict[str, str]:
    """Returns what a run is started from, as kfp's client takes it: the registered version, else the file."""
    if registered is None:
        return {"pipeline_package_path": package.path}
    return {"pipeline_id": registered.pipeline_id, "version_id": registered.version_id}


def wait(
    endpoint: str,
    run_id: str,
    *,
    timeout_s: float,
    on_state: Callable[[str, str], None],
    on_run: Callable[[Client, Run], None] = lambda client, run: None,
    token: Token = None,
    namespace: str | None = None,
    poll_s: float = POLL_S,
) -> str:
    """Polls a run until it ends. A few failed polls in a row are survived.

    Args:
        endpoint: Address of the Kubeflow Pipelines API.
        run_id: The run, as in `Submission.run_id`.
        timeout_s: How long to wait; the run itself continues after that.
        on_state: Called with the run's name and its state, at first and upon each change.
        on_run: Called with kfp's client and the run as the client returns it, after each poll.
        token: Bearer token, or None where the endpoint asks for none.
        namespace: The user's namespace on a multi-user Kubeflow.
        poll_s: Seconds between two polls.

    Returns:
        The final state: SUCCEEDED, FAILED, CANCELED or SKIPPED.

    Raises:
        UserError: The address, the token or the run's id is at fault.
        BatonError: The endpoint fails time after time, or the run outlasts `timeout_s`.
    """
    client = insist(
        lambda: connect(endpoint, token=token, namespace=namespace), TransientError, _tries(poll_s), lambda *_: None
    )
    state = ""
    for _ in attempts(timeout_s, pause=poll_s):
        run = _asked(client, run_id, poll_s)
        previous, state = state, run.state or "PENDING"
        if state != previous:
            on_state(run.display_name or run_id, state)
        on_run(client, run)
        if state in FINAL_STATES:
            return state
    raise BatonError(
        f"Run {run_id} is {state} after {timeout_s:g} s; expected it to have ended.",
        remedy=f"It continues without us: {run_url(endpoint, run_id)}",
    )


def resume(client: Client, run_id: str) -> None:
    """Starts the failed stages of a run again, and waits until it is no longer shown as ended.

    Raises:
        BatonError: the backend cannot: its workflow is gone, or too large.
    """
    client.retry_run(run_id)
    for _ in attempts(RESUMES_IN_S, pause=min(1.0, POLL_S)):
        with contextlib.suppress(TransientError, RefusedError):  # it has been started
            if client.get_run(run_id).state not in FINAL_STATES:
                return


def _asked(client: Client, run_id: str, poll_s: float) -> Run:
    """Returns a run, asked for again where the endpoint fails for a while, or a token that is renewed has ended."""

    def ask() -> Run:
        try:
            run: Run = client.get_run(run_id)
        except RefusedError as error:
            if client.renews:
                raise TransientError(error.message, remedy=error.remedy) from error
            raise
        return run

    return insist(ask, TransientError, _tries(poll_s), lambda *_: None)


def _tries(poll_s: float) -> Iterator[Attempt]:
    tries = attempts(math.inf, pause=2 * poll_s, growth=2.0, longest=_MAX_PAUSE_S)
    return itertools.islice(tries, MAX_TRANSIENT_FAILURES + 1)


def experiment_id_of(client: Client, endpoint: str, name: str, namespace: str | None) -> str:
    """Returns the id of an experiment, which is created where there is none of that name."""
    try:
        experiment = client.create_experiment(name, namespace=namespace)
    except NameClashError:
        # Somebody created it between kfp's look-up and its creation: look again, once.
        experiment = client.create_experiment(name, namespace=namespace)
    except ValueError as error:
        raise NameClashError(
            f"Experiment '{name}' exists more than once ({one_line(error)}); expected one of that name.",
            remedy="Name another experiment.",
        ) from error
    return required(experiment.experiment_id, f"experiment '{name}'", endpoint)


def _check_arguments(arguments: dict[str, object]) -> None:
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"Argument '{name}' is {value!r}; expected a JSON value ({one_line(error)}).",
                remedy="Give a number, text, true or false, a list or a mapping.",
            ) from error


def required(identifier: str | None, what: str, endpoint: str) -> str:
    """Returns an id.

    Raises:
        BatonError: the endpoint gave none.
    """
    if not identifier:
        raise BatonError(f"'{endpoint}' gave no id for {what}; expected one.", remedy=ENDPOINT_REMEDY)
    return identifier


def run_url(endpoint: str, run_id: str) -> str:
    """Returns where a run is shown in the Kubeflow Pipelines UI."""
    return f"{page(endpoint)}/#/runs/details/{run_id}"
