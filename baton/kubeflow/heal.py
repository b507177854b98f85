"""Heals runs on Kubeflow: starts those again that ended for lost pods alone, or that wait too long for spot nodes.

`baton kfp heal` heals all runs of a namespace, `baton kfp submit --wait --retries` its own; both decide here.
A pod that waits keeps its node selector. So a run that gives way to on-demand nodes is submitted again, then canceled.
Healers need not know of each other. Each start has a number, the times that Kubeflow's run has ended; the healer that
puts that number's object first starts it:

    heals/<Kubeflow's run>/003-01.json   the claim on the start after the third end
    heals/<Kubeflow's run>/003-02.json   a later claim, as nothing came of the first
    heals/<Kubeflow's run>/from.json     this run replaces another, which Kubeflow could not retry
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from baton.documents import NamedDocument
from baton.errors import BatonError
from baton.kubeflow import run_status, submit
from baton.kubeflow.connection import AwayError, KubeflowClient, KubeflowRun, RefusedError, Spec, TransientError
from baton.kubeflow.run_status import BROKEN, ENDED, GOING_ON, OWN, PATIENCE_S, RunStatus, StageStatus
from baton.retrain import RetrainLock
from baton.runs import capacity
from baton.runs.documents import NodeChoice, PodLoss, Progress
from baton.runs.plan import Plan
from baton.runs.run import DocumentFolder, Run, Sweep, chosen_name, now
from baton.runtime import retry
from baton.store.storage import Storage

PAUSE_S = 60.0  # before the second start; each later pause is twice as long
LONGEST_PAUSE_S = 1800.0
CLAIM_S = 300.0  # after which a claim that nothing has come of no longer counts
MOST_RUNS = 400  # of a namespace, the newest
NODES = "nodes"  # parameter of a pipeline with `capacity: spot-first`: labels of the first chunk's nodes
WAITS = re.compile("Unschedulable|Kueue: waits")
SHORTEST_WAIT_S = 120.0  # for spot nodes, however late the run is: one may be booting
FIRST_WAIT_S = 900.0  # for spot nodes before the run's first step, which tells how long the rest takes


class Action(StrEnum):
    LEFT = "left alone"
    WAITS = "waits"
    REPLACED = "replaced"
    RETRIED = "started again"
    RESUBMITTED = "submitted again"
    GAVE_WAY = "continues on demand"


@dataclass(frozen=True)
class Policy:
    starts: int  # times that a run is started again, at most
    within_s: float = float("inf")  # a run that ended longer ago is left alone
    needs_store: bool = True  # for its claims; one that watches a run of its own may do without


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    run_id: str  # of the run that goes on: the new one's where it was submitted again
    wait_s: float = 0.0  # until the next look, where it waits
    error: str | None = None  # what kept a lost run from being started


class _Claim(NamedDocument, name="{:03d}-{:02d}.json"):
    at: str


class _Origin(NamedDocument, name="from.json"):
    run_id: str  # that this one replaces
    starts: int  # of all its predecessors, this one's included
    began: str  # creation of the first


class _Starts(DocumentFolder):
    """Notes of healers about one run of Kubeflow."""

    KIND = "heal"

    def claims(self) -> dict[tuple[int, int], _Claim]:
        keys = [match for name in self.storage.list(self.path()) if (match := re.fullmatch(r"(\d+)-(\d+)\.json", name))]
        return {(int(key[1]), int(key[2])): self.need(_Claim, int(key[1]), int(key[2])) for key in keys}

    def claim(self, claims: dict[tuple[int, int], _Claim], end: int) -> float:
        """Claims the start after an end; returns the seconds that another healer's claim holds, 0 where it is ours."""
        tries = sorted(number for at, number in claims if at == end)
        last = claims[end, tries[-1]] if tries else None
        held_s = CLAIM_S - (_now() - datetime.datetime.fromisoformat(last.at)).total_seconds() if last else 0.0
        is_ours = held_s <= 0 and self.write_new(_Claim(at=now()), end, len(tries) + 1)
        return 0.0 if is_ours else max(held_s, submit.POLL_S)


def round_of(client: KubeflowClient, namespace: str | None, policy: Policy) -> Iterator[tuple[KubeflowRun, Decision]]:
    """Starts the runs of a namespace again that lost pods alone have ended.

    Yields each failed run of Baton that ended within `Policy.within_s`, and each that gives way to on-demand nodes,
    with the decision about it.

    Raises:
        BatonError: the runs cannot be listed.
    """
    # Without their pipelines, which are most of an answer: hundreds would not fit into a small pod.
    listed = [replace(run, posted={}) for run in client.runs_of(namespace, MOST_RUNS)]
    for run in listed:
        age_s = (_now() - run.ended_at).total_seconds() if run.ended_at else 0.0
        if run.state not in (*BROKEN, *GOING_ON) or run.is_archived or age_s > policy.within_s:
            continue
        try:
            whole = client.get_run(run.run_id)
            if run.state in GOING_ON:
                if decision := give_way(client, whole, namespace):
                    yield run, decision
                continue
            specification = client.specification(whole)
            if not run_status.is_batons(specification):
                continue
            if newer := _successor(client, whole, specification, listed):
                yield run, Decision(Action.REPLACED, f"run {newer} has taken its place", newer)
            else:
                yield run, look(client, whole, namespace, policy)
        except BatonError as error:
            words = "not known whether it was started again" if isinstance(error, AwayError) else "cannot be judged now"
            yield run, Decision(Action.WAITS, f"{words}: {error.message}", run.run_id, error=str(error))


def give_way(client: KubeflowClient, run: KubeflowRun, namespace: str | None) -> Decision | None:
    """Submits a run again with on-demand nodes if its chunk waits for spot nodes longer than `budget.by` allows.

    Args:
        client: Of the endpoint.
        run: The run with its stages, as just asked for.
        namespace: Kubeflow profile, where there are several.

    Returns:
        The decision, with the new run's id; None for a run that does not give way.

    Raises:
        BatonError: the endpoint fails, or the run's store.
    """
    specification = client.specification(run)
    if run.state not in GOING_ON or NODES not in run_status.parameters_of(specification):
        return None
    view = run_status.explained(client, run, run_status.stages(client, run))
    chunk = next((x for x in view.stages if x.trains and x.state in GOING_ON and WAITS.search(x.message or "")), None)
    if chunk is None or chunk.started is None:
        return None
    training = run_status.training_run(run, specification, "")
    recipe, note = training.recipe(), training.read(Progress) or Progress(step=0)
    choice, on_demand = training.read(NodeChoice), recipe.resources.nodes_of(capacity.ON_DEMAND)
    is_first = chunk.name.endswith(" 1")
    if (run.parameters.get(NODES) if is_first else choice and choice.nodes) == on_demand:
        return None
    since = max(chunk.started.timestamp(), datetime.datetime.fromisoformat(note.at).timestamp() if note.at else 0.0)
    course = capacity.Course.of(recipe, training.need(Plan), note)
    until = since + FIRST_WAIT_S
    if course:
        until = max(note.started + course.spot_until(note.step * note.seconds_per_step), since + SHORTEST_WAIT_S)
    if time.time() < until:
        return None
    moment = datetime.datetime.fromtimestamp(until, datetime.UTC)
    told = f"{chunk.name} waits for spot nodes, and had time for that until {moment:%H:%M} UTC"
    # Of a healer that ended between the two requests.
    newer = _successor(client, run, specification, client.runs_of(namespace, MOST_RUNS))
    if newer is None:
        starts_of = _Starts(training.storage, run.run_id)
        if held_s := starts_of.claim(starts_of.claims(), run.num_ends + 1):
            return Decision(Action.WAITS, f"{told}; another healer starts it", run.run_id, held_s)
        newer = client.start_again(run, {**_parameters(run, specification), NODES: on_demand})
    client.terminate_run(run.run_id)
    return Decision(Action.GAVE_WAY, told, newer)


def successor(client: KubeflowClient, run_id: str, namespace: str | None) -> str | None:
    """Returns the id of a newer run of Kubeflow that continues the same training, None for none."""
    run = client.get_run(run_id)
    return _successor(client, run, client.specification(run), client.runs_of(namespace, MOST_RUNS))


def until_decided(client: KubeflowClient, run_id: str, namespace: str | None, policy: Policy, starts: int) -> Decision:
    """Decides about a run until it goes on or stays as it is; `starts` are those that the caller knows of.

    Raises:
        TransientError: the endpoint fails or does not answer for minutes, and may have started the run.
        RefusedError: the endpoint lets the caller in no longer.
    """

    def ask() -> Decision:
        return look(client, client.get_run(run_id), namespace, policy, starts)

    while (decision := retry(ask, TransientError, submit.tries(), lambda *_: None)).action is Action.WAITS:
        time.sleep(min(decision.wait_s, submit.POLL_S))
    return decision


def look(client: KubeflowClient, run: KubeflowRun, namespace: str | None, policy: Policy, starts: int = 0) -> Decision:
    """Decides about a run, and starts it again where lost pods alone have ended it.

    Args:
        client: Of the endpoint.
        run: The run with its stages, as just asked for.
        namespace: Kubeflow profile, where there are several.
        policy: See there.
        starts: Starts after losses that the caller knows of; the store may know of more.

    Raises:
        AwayError: the endpoint does not answer, and may have started the run.
        RefusedError: the endpoint lets the caller in no longer.
        BatonError: the endpoint fails.
    """
    run_id, specification = run.run_id, client.specification(run)
    if run.state not in submit.FINAL_STATES:
        return Decision(Action.RETRIED, "it runs", run_id)
    view = run_status.explained_by_store(client, run, run_status.stages(client, run))
    if reason := _why_not(run, view):
        if _goes_on(client, run):
            return Decision(Action.RETRIED, "somebody has started it", run_id)
        return Decision(Action.LEFT, reason, run_id)
    lost = _lost(view)
    told = f"{lost.name} was lost ({lost.message or 'no message'})"
    known: _Starts | None = None
    claims: dict[tuple[int, int], _Claim] = {}
    origin: _Origin | None = None
    try:
        store = Storage(run_status.store_of(run, specification), patience=PATIENCE_S)
        starts_of = _Starts(store, run_id)
        claims, origin, known = starts_of.claims(), starts_of.read(_Origin), starts_of
    except (BatonError, KeyError, ValueError) as error:
        if policy.needs_store:
            return Decision(Action.LEFT, f"{told}; its store cannot be used: {error}", run_id, error=str(error))
    began = datetime.datetime.fromisoformat(origin.began) if origin else run.created_at
    deadline_s = client.deadline_s(run)
    if deadline_s and (_now() - began).total_seconds() >= deadline_s:
        return Decision(Action.LEFT, f"{told}; resources.deadline is over ({deadline_s} s)", run_id)
    # Without the API's history every claim counts as a start.
    end = run.num_ends or len(claims) + 1
    done = max(starts, (origin.starts if origin else 0) + len({at for at, _ in claims if at < end}))
    if done >= policy.starts:
        return Decision(Action.LEFT, f"{told}; it was started again {done} of {policy.starts} times", run_id)
    pause_s = min(PAUSE_S * 2 ** (done - 1), LONGEST_PAUSE_S) if done else 0.0
    wait_s = pause_s - (_now() - run.ended_at).total_seconds() if run.ended_at else 0.0
    if wait_s > 0:
        return Decision(Action.WAITS, f"{told}; it starts again in {wait_s:.0f} s", run_id, wait_s)
    if known:
        # Whoever had an earlier claim may have submitted the run again.
        if any(at == end for at, _ in claims) and (
            newer := _successor(client, run, specification, client.runs_of(namespace, MOST_RUNS))
        ):
            return Decision(Action.REPLACED, f"run {newer} has taken its place", newer)
        try:
            held_s = known.claim(claims, end)
        except BatonError:
            if policy.needs_store:
                raise
            held_s, known = 0.0, None
        if held_s:
            return Decision(Action.WAITS, f"{told}; another healer starts it", run_id, held_s)
    if _goes_on(client, run):
        return Decision(Action.RETRIED, "somebody has started it", run_id)
    action, goes_on = Action.RETRIED, run_id
    try:
        submit.resume(client, run_id)
    except (AwayError, RefusedError):  # it may have been started
        raise
    except BatonError as refusal:
        if client.get_run(run_id).state in submit.FINAL_STATES:  # an answer of 500 may come after the deed
            if newer := _successor(client, run, specification, client.runs_of(namespace, MOST_RUNS)):
                return Decision(Action.REPLACED, f"run {newer} has taken its place", newer)
            try:
                goes_on = client.start_again(run, _parameters(run, specification))
            except AwayError:
                raise
            except BatonError as error:
                reason = f"{told}; Kubeflow can neither retry it ({refusal.message}) nor submit it again"
                return Decision(Action.LEFT, f"{reason}: {error.message}", run_id, error=str(error))
            action = Action.RESUBMITTED
            if known:
                _Starts(known.storage, goes_on).write(_Origin(run_id=run_id, starts=done + 1, began=began.isoformat()))
    loss = PodLoss(
        stage=lost.name,
        reason=lost.message or run_status.UNSAID,
        at=now(),
        number=done + 1,
        of=policy.starts,
        kubeflow_run=goes_on,
    )
    # Kubeflow's own pods belong to the phase that did not begin.
    at = next((x for x in view.stages if x.state not in ENDED), lost) if lost.name == OWN else lost
    with contextlib.suppress(BatonError, LookupError, ValueError):  # it has not begun, or its store is elsewhere
        _trained(run, specification, at.name.rpartition(": ")[0]).note_lost_pod(loss)
    return Decision(action, f"{told}; start {done + 1} of {policy.starts}", goes_on)


def _trained(run: KubeflowRun, specification: Spec, phase: str) -> DocumentFolder:
    """Returns the run, or the sweep, that a run of Kubeflow trains.

    Raises:
        BatonError: Its store is a folder of the pod's own.
        IndexError: A retraining whose runs are not in the store.
    """
    inputs = run_status.parameters_of(specification)
    if "run_name" in inputs:
        return run_status.training_run(run, specification, phase)
    store = Storage(run_status.store_of(run, specification), patience=PATIENCE_S)
    if "sweep_name" in inputs:
        return Sweep(store, str(_parameters(run, specification)["sweep_name"]))
    model = _pipeline(specification).removesuffix("-retrain")
    named = [x for x in RetrainLock(store, model, run.run_id).runs() if not phase or x.endswith(f"-{phase}")]
    return Run(store, named[0])


def _goes_on(client: KubeflowClient, run: KubeflowRun) -> bool:
    """Tells whether somebody has started a run since it was asked for."""
    again = client.get_run(run.run_id)
    return again.state not in submit.FINAL_STATES or again.num_ends != run.num_ends


def _why_not(run: KubeflowRun, view: RunStatus) -> str | None:
    """Returns why a run that has ended is not healed, None for one that lost pods alone have ended."""
    ended = run_status.outcome(run.state, view.stages)
    if run.was_cancelled or ended != "failed":
        return "it was canceled" if run.was_cancelled else f"it is {ended}"
    if run.is_archived:
        return "it is archived"
    if view.is_lost:
        return None
    failed = [stage for stage in view.stages if stage.state == "FAILED" and not stage.is_lost]
    if failed:
        return f"{failed[0].name} failed by itself: {failed[0].message or 'for no known reason'}"
    return view.message or "its failure has no known cause"


def _lost(view: RunStatus) -> StageStatus:
    """Returns the stage whose pod was lost; of a record that has stopped the first that may have run."""
    order = ("FAILED", run_status.UNKNOWN)
    return min(view.stages, key=lambda stage: order.index(stage.state) if stage.state in order else len(order))


def _successor(
    client: KubeflowClient, run: KubeflowRun, specification: Spec, listed: Iterable[KubeflowRun]
) -> str | None:
    """Returns the id of a newer run of Kubeflow that continues the same training; retrainings share their model."""
    names = _parameters(run, specification)
    for newer in listed:
        if newer.created_at <= run.created_at:
            break
        # Few are asked for their pipeline.
        if all(newer.parameters.get(name) == names.get(name) for name in ("run_name", "sweep_name")):
            newer = client.get_run(newer.run_id)
            theirs = client.specification(newer)
            if theirs and _key(newer, theirs) == _key(run, specification):
                return newer.run_id
    return None


def _key(run: KubeflowRun, specification: Spec) -> tuple[object, ...]:
    inputs, given = run_status.parameters_of(specification), _parameters(run, specification)
    store = given.get("store") or inputs.get("store", {}).get("defaultValue")
    return store, _pipeline(specification), given.get("run_name"), given.get("sweep_name")


def _parameters(run: KubeflowRun, specification: Spec) -> dict[str, object]:
    """Returns the parameters by which another run of Kubeflow continues this one."""
    inputs, recipe = run_status.parameters_of(specification), _pipeline(specification)
    given = dict(run.parameters)
    for name, new in (("run_name", recipe), ("sweep_name", recipe.removesuffix("-sweep"))):
        if name in inputs:
            given[name] = chosen_name(str(given.get(name) or inputs[name].get("defaultValue", "")), new, run.run_id)
    return given


def _pipeline(specification: Spec) -> str:
    return str(specification.get("pipelineInfo", {}).get("name", ""))


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
