"""Runs on Kubeflow, for commands. A module of its own, as kfp's client is slow to import."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Container
from dataclasses import replace
from types import TracebackType

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton.cli.display import console, print_table
from baton.cli.options import EXIT_CODES, INTERRUPTED, UNKNOWN, RunAnswer
from baton.errors import BatonError, UserError
from baton.kubeflow import connection, heal, run_status, submit
from baton.kubeflow import namespace as namespaces
from baton.kubeflow.connection import AwayError, KubeflowClient, KubeflowRun, RefusedError
from baton.kubeflow.run_status import BROKEN, GOING_ON, RunStatus, StageStatus
from baton.pages.html import duration
from baton.terminal import Terminal, visible

EXPLAIN_EVERY_S = 30.0  # between two checks of the pods of a running run
MARKS = {"SUCCEEDED": "[green]✓[/]", "FAILED": "[red]✗[/]", "CANCELED": "[red]✗[/]", "SKIPPED": "[dim]–[/]"}


def describe_run(endpoint: str, run: KubeflowRun, state: str) -> RunAnswer:
    """Returns the facts with which every answer about a run begins."""
    url = submit.run_url(endpoint, run.run_id)
    return {"run": run.display_name, "run_id": run.run_id, "url": url, "state": state}


def find_run(endpoint: str, run: str, namespace: str | None) -> tuple[KubeflowClient, KubeflowRun]:
    """Returns kfp's client and the newest run of that name, with a line where several have it."""
    client = connection.connect(endpoint, namespace)
    newest, count = run_status.find_run(client, endpoint, run, namespace)
    if count > 1:
        console.print(f"{count} runs are named {run}; this is the newest, {newest.run_id}", soft_wrap=True)
    return client, newest


def status(run: str, endpoint: str, namespace: str | None, hours: float | None, out: Terminal) -> RunAnswer:
    """Prints the stages of a run, or follows it for `hours`, and returns the answer."""
    client, remote = find_run(endpoint, run, namespace)
    if hours is not None:
        shown = describe_run(endpoint, remote, remote.state or "pending")
        return shown | to_end(endpoint, remote.run_id, run, namespace, hours)[0]
    view = run_status.explained_by_store(client, remote, run_status.stages(client, remote))
    shown = describe_run(endpoint, remote, run_status.outcome(remote.state, view.stages))
    is_over = remote.state in submit.FINAL_STATES
    if out is not console:
        out.print(f"[bold]{escape(remote.display_name)}[/]: {shown['state']}", soft_wrap=True)
        print_table(table(view.stages, is_over=is_over))
    shown["stages"] = [
        {"name": s.name, "state": s.state.lower(), "seconds": s.seconds, "message": s.message} for s in view.stages
    ]
    if view.is_frozen:
        out.print(run_status.FROZEN, soft_wrap=True)
    advise(view, remote.run_id, out)
    if is_over:
        conclude(client, remote, view.stages, shown["state"])
    return shown


def runs(endpoint: str, namespace: str | None, count: int) -> list[namespaces.RunRow]:
    """Returns Baton's newest runs of a namespace."""
    return list(namespaces.rows(connection.connect(endpoint, namespace), endpoint, namespace, count))


def print_runs(rows: list[namespaces.RunRow], out: Terminal) -> None:
    """Prints runs as a table, and a line for each that waits."""
    table = Table("run", "state", "stage", "step", "loss", "starts", "left", box=None, pad_edge=False)
    for row in rows:
        loss = f"{row.loss:.4g}" if row.loss is not None else ""
        left = duration(row.seconds_left) if row.seconds_left is not None else ""
        table.add_row(escape(row.run), row.state, escape(row.stage or ""), row.steps, loss, str(row.starts), left)
    print_table(table)
    for row in rows:
        if row.waits:
            out.print(f"{row.run}: {row.waits}", soft_wrap=True, markup=False)


def logs(run: str, endpoint: str, namespace: str | None, wanted: str | None) -> tuple[str, str]:
    """Returns the name and output of a stage: the wanted one, else one that failed, runs or was the last to start."""
    client, remote = find_run(endpoint, run, namespace)
    stages = run_status.explained_by_store(client, remote, run_status.stages(client, remote)).stages
    begun = [stage for stage in stages if stage.pod or stage.started]
    known = [x for x in begun if wanted is None or wanted.lower() in (x.name.lower(), x.key.lower())]
    order = ("FAILED", *GOING_ON)
    known.sort(key=lambda stage: order.index(stage.state) if stage.state in order else len(order))
    if not known:
        names = ", ".join(stage.name for stage in begun) or "none"
        which = f"stage {wanted!r}" if wanted else "any stage"
        raise UserError(f"run '{remote.display_name}' has no pod of {which} with a log.", remedy=f"Stages: {names}.")
    stage = known[0] if known[0].state in order else known[-1]
    return stage.name, run_status.log(client, remote, stage)


def page(run: str, endpoint: str, namespace: str | None) -> str:
    """Returns the address of a run's page on Kubeflow."""
    _, remote = find_run(endpoint, run, namespace)
    return submit.run_url(endpoint, remote.run_id)


def cancel(run: str, endpoint: str, namespace: str | None) -> RunAnswer:
    """Ends a running run."""
    client, remote = find_run(endpoint, run, namespace)
    if remote.state in submit.FINAL_STATES:
        raise UserError(f"run '{remote.display_name}' is {remote.state.lower()} already; expected one that still runs.")
    stages = run_status.stages(client, remote)
    client.terminate_run(remote.run_id)
    conclude(client, remote, stages, "canceled")
    return describe_run(endpoint, remote, "canceling")


def retry(run: str, endpoint: str, namespace: str | None, hours: float | None) -> RunAnswer:
    """Starts the failed stages of a run again, and follows it for `hours`, if given."""
    client, remote = find_run(endpoint, run, namespace)
    name = remote.display_name
    if remote.state not in ("FAILED", "CANCELED"):
        state = (remote.state or "pending").lower()
        raise UserError(f"run '{name}' is {state}; expected one that has failed or was canceled.")
    try:
        submit.resume(client, remote.run_id)
    except (AwayError, RefusedError):  # whether it resumes is not known
        raise
    except BatonError as error:
        stages = run_status.explained_by_store(client, remote, run_status.stages(client, remote)).stages
        conclude(client, remote, stages, run_status.outcome(remote.state, stages))
        raise BatonError(
            f"Kubeflow cannot retry run '{name}': {error}",
            remedy=f"`baton kfp submit RECIPE --run {name}` starts it again from its newest checkpoint.",
        ) from None
    console.print(f"[bold]{name}[/] resumes")
    shown = describe_run(endpoint, remote, "retried")
    return shown if hours is None else shown | to_end(endpoint, remote.run_id, name, namespace, hours)[0]


def to_end(
    endpoint: str, run_id: str, name: str, namespace: str | None, hours: float, *, gives_way: bool = False
) -> tuple[RunAnswer, RunStatus]:
    """Waits for a run; returns its state with what failed, `UNKNOWN` where it cannot be followed, and its status.

    With `gives_way` it is submitted again where it waits too long for spot nodes, and ends as canceled.
    """

    def seen(client: KubeflowClient, run: KubeflowRun) -> None:
        follow.seen(client, run)
        if gives_way:
            with contextlib.suppress(BatonError):  # a healer in the cluster may use a store that is out of reach here
                if decision := heal.give_way(client, run, namespace):
                    console.print(f"{name}: {decision.action}: {decision.reason}", soft_wrap=True, markup=False)

    try:
        with Follow() as follow:
            state = submit.wait(
                endpoint,
                run_id,
                timeout_s=hours * 3600,
                on_state=lambda run, now: console.print(f"{run}: {now.lower()}"),
                on_run=seen,
                namespace=namespace,
                poll_s=submit.POLL_S,
            )
    except KeyboardInterrupt:
        return _unfollowed("interrupted", name, namespace, INTERRUPTED), follow.view
    except BatonError as error:
        return _unfollowed(str(error), name, namespace), follow.view
    advise(follow.view, run_id)
    ended: RunAnswer = {"state": run_status.outcome(state, follow.view.stages)}
    if ended["state"] in ("failed", "canceled"):
        try:
            client = connection.connect(endpoint, namespace)
            conclude(client, client.get_run(run_id), follow.view.stages, ended["state"])
        except BatonError as error:  # how it ended is known
            console.print(f"cleanup failed: {error}", soft_wrap=True, markup=False)
    if failed := [stage for stage in follow.view.stages if stage.state == "FAILED"]:
        ended["failed"] = [
            {"stage": stage.name, "message": stage.message, "exit_code": stage.exit_code} for stage in failed
        ]
    return ended, follow.view


def _unfollowed(reason: str, name: str, namespace: str | None, exit_code: int = EXIT_CODES[UNKNOWN]) -> RunAnswer:
    """Prints how to follow a running run, and returns the answer."""
    where = f" --namespace {namespace}" if namespace else ""
    typer.secho(f"baton: {visible(reason)}", err=True, fg=typer.colors.RED)
    typer.secho(f"baton: the run continues; `baton status {name}{where} --wait` follows it again", err=True)
    return {"state": UNKNOWN, "error": reason, "exit_code": exit_code}


def with_retries(
    endpoint: str, namespace: str | None, submission: submit.Submission, hours: float, retries: int
) -> RunAnswer:
    """Waits for a run, starts it again where a pod was lost, and returns how the last attempt ended."""
    name, run_id = submission.run_name, submission.run_id
    policy = heal.Policy(retries, needs_store=False)
    starts = 0
    while True:
        ended, view = to_end(endpoint, run_id, name, namespace, hours, gives_way=bool(retries))
        is_lost = ended["state"] == "failed" and view.is_lost
        if not retries or not (is_lost or ended["state"] == "canceled"):
            break
        try:
            client = connection.connect(endpoint, namespace)
            if not is_lost:
                if newer := heal.successor(client, run_id, namespace):
                    run_id = newer
                    console.print(f"started [bold]{name}[/]: {submit.run_url(endpoint, run_id)}", soft_wrap=True)
                    continue
                break
            decision = heal.until_decided(client, run_id, namespace, policy, starts)
        except KeyboardInterrupt:
            ended = _unfollowed("interrupted", name, namespace, INTERRUPTED)
            break
        except BatonError as error:  # it may have been started
            ended = _unfollowed(str(error), name, namespace)
            break
        console.print(f"{name}: {decision.action}: {decision.reason}", soft_wrap=True, markup=False)
        if decision.action is heal.Action.LEFT:
            if decision.error:
                ended["error"] = decision.error
            break
        starts += 1
        if decision.run_id != run_id:
            run_id = decision.run_id
            console.print(f"started [bold]{name}[/]: {submit.run_url(endpoint, run_id)}", soft_wrap=True)
    return {**ended, "run_id": run_id, "url": submit.run_url(endpoint, run_id)}


def advise(view: RunStatus, run_id: str, out: Terminal = console) -> None:
    """Prints the message of a run, and what helps each stage that failed or cannot start."""
    if view.message:
        out.print(view.message, soft_wrap=True, markup=False)
    for stage in view.stages:
        if stage.hint:
            out.print(f"{stage.name}: {stage.hint}", soft_wrap=True, markup=False)
        if stage.state == "FAILED":
            label = "" if stage.is_own else f",app.kubernetes.io/component={stage.component_name}"
            log = stage.pod or f"-l pipeline/runid={run_id}{label}"
            out.print(f"{stage.name}: its log: kubectl logs {log} -c main", soft_wrap=True, markup=False)


def conclude(client: KubeflowClient, run: KubeflowRun, stages: list[StageStatus], state: str) -> None:
    """Ends what a failed or cancelled run has left running in MLflow, and records its failure."""
    ended = run_status.end_mlflow_runs(client, run, state)
    for line in (*ended, run_status.record_end(client, run, stages, state)):
        if line:
            console.print(line, soft_wrap=True, markup=False)


class Follow:
    """Follows a run; a terminal gets a live line, a log file gets the lines of the stages alone."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("stages"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._line = self._progress.add_task("waiting for the first stage", total=None)
        self._told: set[tuple[tuple[str, ...], str]] = set()
        self._explained_at = -EXPLAIN_EVERY_S
        self.view = RunStatus([])  # as last explained

    def __enter__(self) -> Follow:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._progress.stop()

    def seen(self, client: KubeflowClient, run: KubeflowRun) -> None:
        stages = run_status.stages(client, run)
        now = time.monotonic()
        is_due = now - self._explained_at >= EXPLAIN_EVERY_S or run.state in submit.FINAL_STATES
        if is_due or any(self._is_new(stage, BROKEN) for stage in stages):
            self._explained_at = now
            was_frozen = self.view.is_frozen
            self.view = run_status.explained_by_store(client, run, stages)
            stages = self.view.stages
            if self.view.is_frozen and not was_frozen:
                console.print(f"[yellow]{run_status.FROZEN}[/]", soft_wrap=True)
        elif self.view.is_frozen:  # the list has stopped too
            stages = self.view.stages
        for stage in stages:
            if self._is_new(stage, MARKS):
                self._told.add((stage.path, stage.state))
                console.print(line(stage), soft_wrap=True)
            elif stage.state in GOING_ON and stage.hint and (stage.path, stage.hint) not in self._told:
                self._told.add((stage.path, stage.hint))
                console.print(f"[yellow]{escape(f'{stage.name}: {stage.message}. {stage.hint}')}[/]", soft_wrap=True)
        running = ", ".join(stage.name for stage in stages if stage.state in GOING_ON)
        ended = sum(stage.state in MARKS for stage in stages)
        self._progress.update(self._line, description=running or "waiting", completed=ended, total=len(stages) or None)

    def _is_new(self, stage: StageStatus, states: Container[str]) -> bool:
        return stage.state in states and (stage.path, stage.state) not in self._told


def line(stage: StageStatus) -> str:
    """Returns an ended stage on one line, in rich's markup."""
    took = f" ({stage.seconds:.0f} s)" if stage.seconds is not None and stage.state != "SKIPPED" else ""
    reason = f": {stage.message}" if stage.message and stage.state in BROKEN else ""
    skipped = " (skipped)" if stage.state == "SKIPPED" else ""
    return f"{MARKS[stage.state]} {escape(f'{stage.name}{took}{skipped}{reason}')}"


def table(stages: list[StageStatus], *, is_over: bool) -> Table:
    """Returns the stages of a run as a table, in which equal neighbours share a row."""
    shown = Table("stage", "state", "time", "message", box=None, pad_edge=False)
    for stage in _folded(stages):
        state = ("not run" if is_over else "waiting") if stage.state == "WAITING" else stage.state.lower()
        took = f"{stage.seconds:.0f} s" if stage.seconds is not None and stage.state != "SKIPPED" else ""
        colour = "red" if stage.state in BROKEN else "green" if stage.state == "SUCCEEDED" else ""
        shown.add_row(
            escape(stage.name), f"[{colour}]{state}[/]" if colour else state, took, escape(stage.message or "")
        )
    return shown


def _folded(stages: list[StageStatus]) -> list[StageStatus]:
    """Joins equal stages with successive numbers: `train chunk 26–100`."""
    rows: list[StageStatus] = []
    newest: dict[str, tuple[int, StageStatus, str, int]] = {}
    for stage in stages:
        kind, _, text = stage.name.rpartition(" ")
        number = int(text) if text.isdecimal() and stage.seconds is None else None
        place, first = len(rows), text
        if number is not None:
            if (last := newest.get(kind)) and last[3] == number - 1 and _look(last[1]) == _look(stage):
                place, _, first, _ = last
            newest[kind] = place, stage, first, number
        if place < len(rows):
            rows[place] = replace(stage, name=f"{kind} {first}–{number}")
        else:
            rows.append(stage)
    return rows


def _look(stage: StageStatus) -> tuple[str, str | None, str | None]:
    return stage.state, stage.message, stage.hint
