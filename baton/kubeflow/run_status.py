"""Status of a run on Kubeflow, by id or name: its stages in order, and why one failed or waits.

A node is named by its path, `WF.root.GROUP.TASK.executor`. Stock Kubeflow 2.17 adds the number of each attempt:
`WF(0).root(0).GROUP(0).TASK(0).executor(0)`. The API lists the last part alone, and no message. Messages and pods are
in the Argo workflow, if the endpoint serves it. Once Kubeflow's record stops, the store has the later stages.

If a run ended without its own record, the next reader writes its failure and page, and ends its runs in
MLflow, found by the Kubeflow run's id; Kubeflow's own MLflow needs none of it. A stage's own record wins.
"""

import contextlib
import datetime
import graphlib
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton import events
from baton.errors import BatonError, UserError
from baton.kubeflow import pods
from baton.kubeflow.connection import KubeflowClient, KubeflowRun, Node, Spec, TaskDetail, Workflow, one_line
from baton.kubeflow.submit import FINAL_STATES
from baton.runs import ref
from baton.runs.documents import Progress, RunInfo
from baton.runs.outcomes import EvaluationResult, RunFailure
from baton.runs.plan import Plan
from baton.runs.run import Run, chosen_name, now, record_failure
from baton.store.storage import Storage
from baton.tracking import tracking_run

PODS = frozenset({"Pod", "Container", "HTTP", "Plugin"})  # types of the nodes that run something
TELLING = ("FAILED", "CANCELED", "PENDING", "RUNNING", "SUCCEEDED", "SKIPPED")
"""States of a loop's turns: the first that one of them has counts for all."""
ATTEMPTS = range(3)  # stock Kubeflow makes three at most


def node_id(workflow: str, name: str) -> str:
    """Returns the id of a node: its workflow's name and the 32-bit FNV-1a hash of its own, as Argo's `NodeID` does."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = (value ^ byte) * 0x01000193 % 2**32
    return f"{workflow}-{value}"


def node_path(name: str) -> list[str]:
    """Returns the parts of a node's name, without the numbers of attempts."""
    return re.sub(r"\([\d:]+\)", "", name).split(".")


class TaskNodes:
    """Tasks among the nodes of a run; `places` holds keys, and those of the graphs around each, outermost first."""

    def __init__(self, places: Iterable[tuple[str, tuple[str, ...]]], details: Sequence[TaskDetail]) -> None:
        count = Counter(key for key, _ in places)
        self._repeated = {key for key in count if count[key] > 1}
        self._details: dict[str, list[TaskDetail]] = {}
        for detail in details:
            self._details.setdefault(detail.key, []).append(detail)
        ids = (child for detail in details for child in detail.children)
        self._workflow = next((identifier.rpartition("-")[0] for identifier in ids), "")

    def detail(self, key: str, parents: tuple[str, ...]) -> TaskDetail | None:
        candidates = self._details.get(key, ())
        if key.removesuffix("-driver") not in self._repeated:  # several are the turns of a loop
            return min(candidates, key=_rank, default=None)
        if any(detail.path for detail in candidates):
            return min((x for x in candidates if x.path == (*parents, key)), key=_rank, default=None)
        ids = set(self._ids_inside(key, parents))
        return next((x for x in candidates if not ids.isdisjoint(x.children)), None)

    def _ids_inside(self, key: str, parents: tuple[str, ...]) -> Iterator[str]:
        parts = (self._workflow, "root", *parents, key)
        yield node_id(self._workflow, ".".join((*parts, "executor")))
        for numbers in itertools.product(ATTEMPTS, repeat=len(parts)):
            name = ".".join(f"{part}({number})" for part, number in zip(parts, numbers, strict=True))
            yield node_id(self._workflow, name)

    def pods(self, key: str, parents: tuple[str, ...], nodes: Iterable[Node]) -> list[Node]:
        """Returns the pods of a task in their order, its driver's and those of earlier attempts among them."""
        own = [node for node in nodes if self._is_of(node, key, parents)]
        return sorted(own, key=lambda node: node.get("startedAt") or "")

    def _is_of(self, node: Node, key: str, parents: tuple[str, ...]) -> bool:
        # If Kubeflow's cache had the answer, a skipped node replaces the pod.
        is_task = node.get("type") == "Skipped" and node.get("displayName") == "executor"
        if node.get("type") not in PODS and not is_task:
            return False
        parts = node_path(node["name"])
        if key not in self._repeated:  # the graph of an exit handler has a name that the specification does not know
            return key in parts or f"{key}-driver" in parts
        return parts[2:] in ([*parents, key, "executor"], [*parents, f"{key}-driver"])


def _rank(detail: TaskDetail) -> int:
    return TELLING.index(detail.state) if detail.state in TELLING else len(TELLING)


BROKEN = frozenset({"FAILED", "CANCELED"})
ENDED = BROKEN | {"SUCCEEDED", "SKIPPED"}
GOING_ON = ("PENDING", "RUNNING")
PHASES = {"Succeeded": "SUCCEEDED", "Failed": "FAILED", "Error": "FAILED", "Skipped": "SUCCEEDED"}
"""Phase of a stage's last pod → the stage's state; a skipped one was answered by the cache."""
WAITING, UNKNOWN = "WAITING", "UNKNOWN"
PLACED = "-placed"  # end of the component's name of a chunk with `capacity: spot-first`
FROZEN = (
    "Kubeflow's record of this run has stopped, as its workflow is larger than 1 MiB. The store has later states, "
    "if any; Kubeflow's own page is up to date."
)
OMITTED = "RUNTIME_STATE_UNSPECIFIED"  # the backend's word for a node that will not run
APPLY = "Apply k8s/components/retry-lost-pods (docs/guides/cluster-setup.md)"
IDLE = datetime.timedelta(minutes=10)  # in which a running run starts its next stage
LAG_S = 5.0  # the record of the stages may be behind the run's: between two readings
OWN = "Kubeflow's own pod of the pipeline"  # failed nodes that are no stage: the driver of a graph
LOST = "The machine was preempted: "
LAUNCHER = (
    "Kubeflow's launcher ended, not the stage, as there is no message. Usually the API server, ML Metadata "
    "or the bucket of artifacts was out of reach. "
)
DRIVER = "Kubeflow's own pod before it ended, so it had not begun: "
OWN_LOST = "It starts the stages and is not a stage itself: `baton retry` starts it again."
INSTALLATION = "This pod is Kubeflow's own: ask the administrator of the installation."
RESUMES = "`baton retry` resumes from the newest checkpoint, chunks.extra does so by itself."
AGAIN = "`baton retry` runs it again, and what has ended stays."
LOSS = re.compile(  # Kubernetes' words for a pod whose machine was lost
    r"pod deleted|Evicted|[Pp]reempt|low on resource|[Nn]ode ?[Ss]hutdown|[Nn]ode (is )?(not ready|lost)|NodeLost"
    r"|exit code (137|143)"
)
BARE = re.compile(r"main: Error \(exit code 1\)|(?!main\b)[\w-]+: .*\(exit code \d+\).*")
"""Message of a pod whose stage left no word, or of another container than the stage's."""
HINTS = (  # message of a pod → remedy
    (r"OOMKilled", "The pod ran out of memory: raise resources.memory{smaller}."),
    (
        r"ImagePullBackOff|ErrImagePull|InvalidImageName|ErrImageNeverPull",
        "The image cannot be pulled: check resources.image and resources.image_pull_secret.",
    ),
    (
        r"runAsNonRoot|will run as root|PodSecurity",
        "The image runs as root, which the namespace or resources.run_as_non_root forbids.",
    ),
    (
        r"secret \S+ not found|couldn't find key",
        "A Secret is missing in the run's namespace: see resources.secret and resources.secret_env.",
    ),
    (r"Kueue: waits", "Kueue has not admitted it yet: ask for less in resources, or wait for the queue."),
    (r"exceeded quota", "The namespace's quota is used up: ask for less in resources, or wait."),
    (
        r"Unschedulable|Insufficient|didn't match|untolerated taint",
        "No node fits: check resources.gpus, cpu, memory, node_selector and tolerations.",
    ),
    (r"persistentvolumeclaim .* not found", "The volume claim is missing: see resources.cache_claim."),
    (r"exceeded its deadline|DeadlineExceeded", "Its time was over: see resources.deadline."),
)

SAID = re.compile(r"^(?:\[KFP Executor [^]]* ERROR\]:|.* ERROR baton:) (.+)$", re.MULTILINE)  # a stage's error log
Path = tuple[str, ...]  # keys of the graphs around a task, outermost first, and its own


@dataclass(frozen=True)
class StageStatus:
    key: str  # name of the task in the compiled pipeline
    name: str  # on the page
    state: str  # as in the API; `WAITING` where there is none yet, `UNKNOWN` where the record has stopped
    parents: tuple[str, ...] = ()  # keys of the graphs around it, outermost first
    started: datetime.datetime | None = None
    ended: datetime.datetime | None = None
    message: str | None = None  # of Kubernetes or the stage itself
    exit_code: int | None = None  # of Baton's stage itself, where it tells one
    pod: str | None = None
    hint: str | None = None
    component: str = ""  # in the compiled pipeline
    after: frozenset[Path] = frozenset()  # paths of the stages that must have ended before it begins
    is_own: bool = False  # its state is that of a pod of Kubeflow's own, a driver
    is_lost: bool = False  # it failed as a pod was lost, and may go well the next time

    @property
    def path(self) -> Path:
        return (*self.parents, self.key)

    @property
    def component_name(self) -> str:
        """Name on the label of its pods: without the number of a chunk."""
        name = re.sub(r"(-\d+)+$", "", self.component.removeprefix("comp-") or self.key)
        return name.removesuffix(PLACED)

    @property
    def trains(self) -> bool:
        return self.component_name in ("train-chunk", "train-turns")

    @property
    def seconds(self) -> float | None:
        return (self.ended - self.started).total_seconds() if self.started and self.ended else None


@dataclass(frozen=True)
class RunStatus:
    stages: list[StageStatus]
    message: str | None = None  # on the run as a whole
    is_frozen: bool = False  # the record has stopped: stages that had not ended then are `UNKNOWN`
    is_stopped: bool = False  # somebody, a deadline or the size of its workflow has ended the run
    has_no_word: bool = False  # frozen, and the store could be asked and knows of no failed stage

    @property
    def is_lost(self) -> bool:
        """Whether lost pods alone ended the run: no stage has failed by itself."""
        failed = [stage for stage in self.stages if stage.state == "FAILED"]
        if self.is_frozen and not failed:
            return self.has_no_word and not self.is_stopped
        return bool(failed) and all(stage.is_lost for stage in failed)


def stages(client: KubeflowClient, run: KubeflowRun) -> list[StageStatus]:
    """Returns the stages of a run, in the order of their dependencies."""
    names = {detail.key for detail in run.details}
    tasks = list(_tasks(client.specification(run))) or [
        StageStatus(key, key, WAITING)
        for key in sorted(filter(None, names), key=_natural)
        if key != "root" and f"{key}-driver" in names
    ]
    known = TaskNodes([(stage.key, stage.parents) for stage in tasks], run.details)
    drivers = {f"{stage.key}-driver" for stage in tasks}
    own = {
        name: detail
        for detail in run.details
        if (name := node_path(detail.key)[0]).endswith("-driver") and name not in drivers and detail.state == "FAILED"
    }
    failed = [_listed(StageStatus(name, OWN, WAITING, is_own=True), own[name]) for name in own]
    return [*failed, *(_seen(known, stage) for stage in tasks)]


def outcome(state: str | None, stages: list[StageStatus]) -> str:
    """Returns the state of a run in lower case, `rejected` where the gate refused the model."""
    if state == "SUCCEEDED" and any(x.component_name == "reject" and x.state == "SUCCEEDED" for x in stages):
        return "rejected"
    ended = {stage.state for stage in stages} & BROKEN
    if state == "FAILED" and ended == {"CANCELED"}:  # the backend calls a cancelled run a failed one
        return "canceled"
    return (state or "pending").lower()


def explained(client: KubeflowClient, run: KubeflowRun, listed: list[StageStatus]) -> RunStatus:
    """Returns the status of a run, with all that is known of stages that failed or cannot start."""
    workflow = _workflow(client, run)
    known = _caught_up(run, workflow, listed)
    if not workflow.is_compressed and _lags(run, known):
        time.sleep(LAG_S)
        with contextlib.suppress(BatonError):  # the first answers will do
            run = client.get_run(run.run_id)
            workflow = _workflow(client, run)
            known = _caught_up(run, workflow, stages(client, run))
    is_cancelled = workflow.is_cancelled or run.was_cancelled
    message = f"Argo says: {one_line(workflow.message)}" if workflow.message and not is_cancelled else None
    if workflow.is_compressed or (not workflow.nodes and (_lags(run, known) or _is_behind(run, known))):
        # Without the workflow, a lost pod and a workflow that has grown too large look alike.
        ends = r"(?i)deadline|duration|too large"
        is_stopped = is_cancelled or not workflow.name or bool(re.search(ends, message or ""))
        return RunStatus([_since(stage, run) for stage in known], message, is_frozen=True, is_stopped=is_stopped)
    if _lags(run, known):
        known = [_since(stage, run) if stage.state in GOING_ON else stage for stage in known]
    attempts, drivers = _pods(workflow, known)
    own = [_of_own(workflow, nodes) for nodes in drivers]
    if own:  # the workflow knows more of them than the list
        attempts = [nodes for stage, nodes in zip(known, attempts, strict=True) if stage.name != OWN]
        known = [stage for stage in known if stage.name != OWN]
    if is_cancelled:
        known, own = ([replace(x, state="CANCELED") if x.state == "FAILED" else x for x in y] for y in (known, own))
    is_ours = "store" in run.parameters or "store" in parameters_of(client.specification(run))
    told = [
        _explained(client, run.run_id, workflow, *both, is_ours=is_ours) for both in zip(known, attempts, strict=True)
    ]
    told = [*own, *told]
    is_loss = any(stage.state == "FAILED" and LOSS.search(stage.message or "") for stage in told)
    if is_loss and (loss := lost_pods_end_run(workflow)):
        message = f"{loss}. {APPLY}"
    return RunStatus(told, message)


def lost_pods_end_run(workflow: Workflow) -> str | None:
    """Returns in one line which losses of a pod end a run there, None where none does."""
    # Kubeflow merges `workflowDefaults.templateDefaults.retryStrategy` into every template, over all of a task's own
    # `set_retry` but its limit.
    if workflow.retry_strategy is None:
        return None
    policy = workflow.retry_strategy.get("retryPolicy", "OnFailure")
    expression = workflow.retry_strategy.get("expression", "")
    if policy == "Always" and (not expression or ("143" in expression and "137" in expression)):
        return None
    if policy == "OnFailure":
        return "a pod that was deleted ends the run there, as Argo's retryPolicy is OnFailure for every stage"
    return (
        "a killed or evicted pod, or a shut-down node, ends the run there, and often a deleted pod: "
        f"Argo's retryPolicy is {policy} for every stage"
    )


def _workflow(client: KubeflowClient, run: KubeflowRun) -> Workflow:
    """Returns the Argo workflow of a run; from its pods where the first version of the API is not served."""
    with contextlib.suppress(BatonError, ValueError):
        if (workflow := client.workflow(run.run_id)).name:
            # Queue and priority are the pod's alone.
            if run.state not in FINAL_STATES and any(node.get("phase") == "Pending" for node in workflow.nodes):
                told = {node["id"]: node["message"] for node in pods.workflow(run.run_id, client.pods_namespace).nodes}
                nodes = (
                    {**node, "message": told.get(node["id"]) or node.get("message", "")} for node in workflow.nodes
                )
                workflow = replace(workflow, nodes=tuple(nodes))
            return workflow
    return pods.workflow(run.run_id, client.pods_namespace)


def _lags(run: KubeflowRun, stages: list[StageStatus]) -> bool:
    """Tells whether the record of the stages is behind that of the run, which has ended."""
    return run.state in FINAL_STATES and any(stage.state in GOING_ON for stage in stages)


def _is_behind(run: KubeflowRun, stages: list[StageStatus]) -> bool:
    """Tells whether the record of the stages has stopped, where no workflow tells."""
    if run.state == "SUCCEEDED":
        return any(stage.state == WAITING and not _may_be_left_out(stage) for stage in stages)
    if run.state == "FAILED":
        return not any(stage.state in BROKEN for stage in stages)
    times = [time for stage in stages for time in (stage.started, stage.ended) if time]
    since = max(times, default=None)
    is_idle = not any(stage.state in (*GOING_ON, *BROKEN) for stage in stages)
    return bool(is_idle and since and datetime.datetime.now(datetime.UTC) - since > IDLE)


def _may_be_left_out(stage: StageStatus) -> bool:
    return any(parent.startswith("condition-") for parent in stage.parents)


def _caught_up(run: KubeflowRun, workflow: Workflow, stages: list[StageStatus]) -> list[StageStatus]:
    """Returns the stages of an ended run as the workflow has them, where the API's list is behind."""
    if run.state not in FINAL_STATES:
        return stages
    return [
        replace(stage, state=state)
        if stage.state in (*GOING_ON, WAITING) and nodes and (state := _state(nodes[-1]))
        else stage
        for stage, nodes in zip(stages, _pods(workflow, stages)[0], strict=True)
    ]


def _state(last: Node) -> str | None:
    state = PHASES.get(last.get("phase", ""))
    return None if state == "SUCCEEDED" and _is_driver(last) else state


def _is_driver(node: Node) -> bool:
    """Tells whether a pod is Kubeflow's own, which starts a stage or a graph."""
    return node_path(node["name"])[-1].endswith("-driver")


def _pods(workflow: Workflow, stages: list[StageStatus]) -> tuple[list[list[Node]], list[list[Node]]]:
    """Returns the pods of each stage, and the attempts at every other pod that failed or does not start."""
    tasks = TaskNodes([(stage.key, stage.parents) for stage in stages if stage.name != OWN], ())
    found = [[] if stage.name == OWN else tasks.pods(stage.key, stage.parents, workflow.nodes) for stage in stages]
    claimed = {node["id"] for of_stage in found for node in of_stage}
    own: dict[str, list[Node]] = {}
    for node in sorted(workflow.nodes, key=lambda node: node.get("startedAt") or ""):
        if node.get("type") in PODS and node["id"] not in claimed:
            own.setdefault(_attempted(node), []).append(node)
    stuck = ("Failed", "Error", "Pending")
    return found, [of_one for of_one in own.values() if of_one[-1].get("phase") in stuck and of_one[-1].get("message")]


def _attempted(node: Node) -> str:
    return re.sub(r"\(\d+\)$", "", node["name"])


def _since(stage: StageStatus, run: KubeflowRun) -> StageStatus:
    """Returns a stage of a stopped record: ended since, where the run tells, else unknown."""
    if stage.state in ENDED:
        return stage
    has_ended = run.state == "SUCCEEDED" and not _may_be_left_out(stage)
    return replace(stage, state="SUCCEEDED" if has_ended else UNKNOWN)


def _of_own(workflow: Workflow, nodes: list[Node]) -> StageStatus:
    *parents, key = node_path(nodes[-1]["name"])
    state = "PENDING" if nodes[-1].get("phase") == "Pending" else "FAILED"
    stage = StageStatus(key, OWN, state, tuple(parents[2:]), is_own=True)
    return _with_reason(stage, _words(nodes[-1]), _pod_name(workflow, nodes[-1]), is_driver=True)


def _explained(
    client: KubeflowClient, run_id: str, workflow: Workflow, stage: StageStatus, nodes: list[Node], *, is_ours: bool
) -> StageStatus:
    failed = [node for node in nodes if node.get("phase") in ("Failed", "Error")]
    if not nodes or (workflow.has_all_pods and stage.state == "FAILED" and not failed):
        message = stage.message or ("pod deleted" if workflow.has_all_pods and stage.state == "FAILED" else None)
        # A driver that failed did so before any stage could.
        is_told = stage.is_own or (stage.state == "FAILED" and message)
        return _with_reason(stage, message, None, is_driver=stage.is_own) if is_told else stage
    if stage.state == "CANCELED":
        return stage
    attempts = [node for node in nodes if _attempted(node) == _attempted(nodes[-1])]
    is_lost = [node for node in attempts[:-1] if node.get("phase") in ("Failed", "Error")]
    before = f"attempt {len(is_lost) + 1}; before: {_words(is_lost[-1])}" if is_lost else None
    if stage.state == "SUCCEEDED":
        if nodes[-1].get("type") == "Skipped":
            return replace(stage, message="taken from Kubeflow's cache")
        return replace(stage, message=before, pod=_pod_name(workflow, nodes[-1]))
    node = failed[-1] if stage.state == "FAILED" and failed else nodes[-1]  # of a loop the last need not be the one
    if not node.get("message"):
        return replace(stage, message=before or stage.message, pod=_pod_name(workflow, node))
    stage = replace(stage, state="PENDING" if node.get("phase") == "Pending" else stage.state)
    pod = _pod_name(workflow, node)
    message, code = events.read_termination_message(_words(node))
    is_driver = _is_driver(node)
    if code is not None:
        return replace(stage, message=message, exit_code=code, pod=pod)
    shown = _with_reason(stage, message, pod, is_driver=is_driver)
    if stage.state not in BROKEN:
        return replace(shown, message=f"{before}; now: {message}" if before else message)
    if not is_driver and (shown.hint is None or shown.hint.startswith(LAUNCHER)):
        if said := _said(client, run_id, pod):
            return replace(shown, message=said, hint=None, is_lost=False)
        if not is_ours:  # the last words of another's stage are not known
            return replace(shown, hint=None, is_lost=False)
    return shown


def _with_reason(stage: StageStatus, message: str | None, pod: str | None, *, is_driver: bool) -> StageStatus:
    """Returns a stage with the message of its pod, a remedy, and whether the pod was lost."""
    text = message or ""
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, text)), None)
    if hint and is_driver:
        hint = INSTALLATION
    elif hint:
        hint = hint.format(smaller=", or lower training.micro_batch_size" if stage.trains else "")
    is_broken, is_loss = stage.state in BROKEN, bool(LOSS.search(text))
    is_lost = hint is None and (is_loss or (is_broken and (is_driver or bool(BARE.fullmatch(text)))))
    if is_lost and stage.name == OWN:
        hint = OWN_LOST
    elif is_lost:
        reason = DRIVER if is_driver else LOST if is_loss else LAUNCHER
        hint = reason + (RESUMES if stage.trains else AGAIN)
    is_lost = is_lost and is_broken
    return replace(stage, message=message, pod=pod, hint=hint, is_lost=is_lost, is_own=is_driver)


def _words(node: Node) -> str:
    """Returns the message of a node: the stage's last words where it left some, else Kubernetes'."""
    return " ".join(re.sub(r"^main: Error \(exit code \d+\): ", "", node.get("message") or "lost").split())


def _said(client: KubeflowClient, run_id: str, pod: str) -> str | None:
    try:
        messages = SAID.findall(client.log(run_id, pod))
    except BatonError:
        return None
    return one_line(messages[-1]) if messages else None


def _pod_name(workflow: Workflow, node: Node) -> str:
    """Returns the name that Argo makes of the workflow's, the template's and a hash."""
    if workflow.pods_have_ids:
        return node["id"]
    if name := node.get("podName"):
        return name
    return f"{workflow.name}-{node.get('templateName')}-{node['id'].rpartition('-')[2]}"


def _seen(tasks: TaskNodes, stage: StageStatus) -> StageStatus:
    detail, driver = tasks.detail(stage.key, stage.parents), tasks.detail(f"{stage.key}-driver", stage.parents)
    if detail is not None and detail.state not in (None, OMITTED):
        return _listed(stage, detail)
    if driver is not None and driver.state == "FAILED":
        return _listed(replace(stage, is_own=True), driver)
    around = (tasks.detail(parent, stage.parents[:depth]) for depth, parent in enumerate(stage.parents))
    passed_by = any(graph is not None and graph.state == "SKIPPED" for graph in around)
    return replace(stage, state="SKIPPED" if passed_by else WAITING)


def _listed(stage: StageStatus, detail: TaskDetail) -> StageStatus:
    return replace(
        stage,
        state=detail.state or WAITING,
        started=detail.started,
        ended=detail.ended,
        message=detail.message,
        pod=detail.pod,
    )


def _parameters(component: Spec) -> Spec:
    found: Spec = component.get("inputDefinitions", {}).get("parameters", {})
    return found


def parameters_of(specification: Spec) -> Spec:
    """Returns the declarations of a compiled pipeline's parameters, by name."""
    return _parameters(specification.get("root", {}))


def is_batons(specification: Spec) -> bool:
    """Tells whether a compiled pipeline is one of Baton's own."""
    return "store" in parameters_of(specification) and any(stage.trains for stage in _tasks(specification))


def store_of(run: KubeflowRun, specification: Spec) -> str:
    """Returns the address of a run's store; KeyError where the pipeline has none.

    Raises:
        BatonError: it is a relative path: in a pod another folder than here.
    """
    store = str(run.parameters.get("store") or parameters_of(specification)["store"]["defaultValue"])
    if "://" not in store and not os.path.isabs(store):
        raise BatonError(f"{store} is a folder of the pod's own.")
    return store


def _tasks(spec: Spec) -> Iterator[StageStatus]:
    """Yields the tasks that become pods as waiting stages, those of inner graphs where the graphs are."""
    components = spec.get("components", {})

    def inside(dag: Spec, parents: Path, before: frozenset[Path], phase: str) -> Iterator[StageStatus]:
        tasks = dag.get("tasks", {})
        order = graphlib.TopologicalSorter({key: tasks[key].get("dependentTasks", []) for key in tasks})
        order.prepare()
        stages: dict[str, frozenset[Path]] = {}
        while order.is_active():
            ready = sorted(order.get_ready(), key=_natural)
            for key in ready:
                task = tasks.get(key, {})
                component = task.get("componentRef", {}).get("name", "")
                after = before.union(*(stages[name] for name in task.get("dependentTasks", [])))
                name, graph = task.get("taskInfo", {}).get("name", key), components.get(component, {})
                if inner := graph.get("dag"):
                    # A phase: its name begins those of its stages, as in its report and in older pipelines.
                    begins = "start_from" in _parameters(graph)
                    found = list(inside(inner, (*parents, key), after, f"{name}: " if begins else phase))
                else:
                    found = [StageStatus(key, f"{phase}{name}", WAITING, parents, component=component, after=after)]
                stages[key] = frozenset(stage.path for stage in found)
                yield from found
            order.done(*ready)

    yield from inside(spec.get("root", {}).get("dag", {}), (), frozenset(), "")


def _natural(text: str) -> list[tuple[int, str]]:
    """Returns a sorting key by which `chunk-10` comes after `chunk-9`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", text)]


PATIENCE_S = 3.0  # for a store that does not answer: somebody waits


def explained_by_store(client: KubeflowClient, remote: KubeflowRun, stages: list[StageStatus]) -> RunStatus:
    """Returns all that is known of a run: from Kubeflow, and from the store where Kubeflow's record has stopped."""
    view, specification = explained(client, remote, stages), client.specification(remote)
    if view.is_frozen:
        return _completed(view, remote, specification)
    return replace(view, stages=[_in_its_own_words(stage, remote, specification) for stage in view.stages])


def _in_its_own_words(stage: StageStatus, remote: KubeflowRun, specification: Spec) -> StageStatus:
    """Returns a stage without a message in Kubernetes with its message in the store, if any."""
    if stage.state != "FAILED" or not (str(stage.hint).startswith(LAUNCHER) or stage.message is None):
        return stage
    phase, _, name = stage.name.rpartition(": ")
    try:
        failure = training_run(remote, specification, phase).read(RunFailure)
    except (BatonError, KeyError, ValueError):  # no access, or a pipeline of several runs
        return stage
    if (
        failure is None
        or failure.stage != name
        or failure.exit_code is None
        or not is_failure_of(failure, remote, stage)
    ):
        return stage
    return replace(stage, message=failure.message, exit_code=failure.exit_code, hint=None, is_lost=False)


def _completed(view: RunStatus, remote: KubeflowRun, specification: Spec) -> RunStatus:
    """Returns the run with its unknown stages as the store has them; unchanged where it cannot be asked."""
    told: dict[str, list[StageStatus]] = {}
    for stage in view.stages:
        if stage.state == UNKNOWN:
            told.setdefault(stage.name.rpartition(": ")[0], []).append(stage)
    known: dict[tuple[str, ...], StageStatus] = {}
    for phase, unknown in told.items():
        try:
            run = training_run(remote, specification, phase)
            seen = _asked(unknown, run, remote)
            is_there = run.read(RunInfo) is not None
        except (BatonError, KeyError, ValueError):  # no access, or a pipeline that is none of ours
            continue
        known |= {stage.path: stage for stage in seen}
        view = replace(view, has_no_word=view.has_no_word or (is_there and all(x.exit_code is None for x in seen)))
    stages = [known.get(stage.path, stage) for stage in view.stages]
    if any(stage.message or stage.state != UNKNOWN for stage in known.values()):
        stages = _in_order(stages)
    return replace(view, stages=stages)


def _in_order(stages: list[StageStatus]) -> list[StageStatus]:
    """Completes unknown stages by their order."""
    before = {stage.path: stage.after for stage in stages}
    begun = [stage.path for stage in stages if stage.state in ("SUCCEEDED", "FAILED") or stage.message]
    ended = {stage.path for stage in stages if stage.state in ENDED}
    # Stages before one that has begun have ended; stages after one that has not ended wait.
    while begun:
        new = before.get(begun.pop(), frozenset()) - ended
        ended |= new
        begun += new
    told = []
    for stage in stages:
        if stage.state == UNKNOWN and stage.path in ended and not _may_be_left_out(stage):
            stage = replace(stage, state="SUCCEEDED", message="done, as what follows has begun")
        elif stage.state == UNKNOWN and stage.path not in ended and not stage.after <= ended:
            stage = replace(stage, state=WAITING, message=None)
        told.append(stage)
    return told


def is_failure_of(failure: RunFailure, remote: KubeflowRun, stage: StageStatus | None = None) -> bool:
    """Tells whether a failure is of this run on Kubeflow, and of this attempt at a stage."""
    since = (stage and stage.started) or remote.created_at
    return bool(failure.at) and datetime.datetime.fromisoformat(failure.at) >= since


def training_run(remote: KubeflowRun, specification: Spec, phase: str) -> Run:
    """Returns the training run of a phase as the data split names it.

    Raises:
        KeyError: The pipeline trains none.
        BatonError: Its store is a relative path: in a pod another folder than here.
    """
    inputs = parameters_of(specification)
    named = str(remote.parameters.get("run_name", inputs["run_name"].get("defaultValue", "")))
    name = chosen_name(named, specification["pipelineInfo"]["name"], remote.run_id, phase)
    return Run(Storage(store_of(remote, specification), patience=PATIENCE_S), name)


def _asked(stages: list[StageStatus], run: Run, remote: KubeflowRun) -> list[StageStatus]:
    # Younger than the run on Kubeflow: an earlier one may have trained the same run.
    recorded = run.recorded(remote.created_at)
    progress, plan, evaluation = run.read(Progress), run.read(Plan), run.read(EvaluationResult)
    failure = run.read(RunFailure)
    failed = failure.stage if failure and failure.exit_code is not None and is_failure_of(failure, remote) else None
    verdict: dict[str, bool] = {}
    if remote.state == "SUCCEEDED" and evaluation and evaluation.gate:
        verdict = {"export": evaluation.gate.passed, "reject": not evaluation.gate.passed}
    seen = []
    for stage in stages:
        kind = stage.component_name
        index = int(number[1]) if (number := re.search(r" (\d+)$", stage.name)) else None
        name = stage.name.rpartition(": ")[2].replace("spare chunk", "train chunk")  # a failure has the component's
        if failure and failed == name:
            seen.append(replace(stage, state="FAILED", message=failure.message, exit_code=failure.exit_code))
        elif kind in verdict:
            seen.append(replace(stage, state="SUCCEEDED" if verdict[kind] else "SKIPPED"))
        elif (kind if index is None else f"{kind}-{index:03d}") in recorded:
            seen.append(replace(stage, state="SUCCEEDED", message="done, by the store"))
        elif progress and plan and kind == "train-chunk" and progress.chunk == index:
            seen.append(replace(stage, message=f"step {progress.step} of {plan.num_steps} at {progress.at}"))
        else:
            seen.append(stage)
    return seen


DEFAULT_ROOT = "minio://mlpipeline/v2/artifacts"  # Kubeflow's own, of artifacts
ARCHIVED_LOG = re.compile(r"(^|/)executor-logs(-\d+)?$")  # a file for each attempt


def log(client: KubeflowClient, run: KubeflowRun, stage: StageStatus) -> str:
    """Returns the output of a stage: from its pod while that is there, else as Kubeflow has archived it.

    Raises:
        BatonError: none of the two is to be had.
    """
    reasons = []
    if stage.pod:
        try:
            return client.log(run.run_id, stage.pod)
        except BatonError as error:
            reasons.append(error.message)
        if (text := pods.log(stage.pod, client.pods_namespace)) is not None:
            return text
    root = run.pipeline_root or pods.pipeline_root(client.pods_namespace) or DEFAULT_ROOT
    folder = f"{client.specification(run).get('pipelineInfo', {}).get('name', '')}/{run.run_id}/{stage.key}"
    try:
        storage = Storage(re.sub("^minio://", "s3://", root), patience=PATIENCE_S)
        found = {path: at for path, (_, at) in storage.find(folder).items() if ARCHIVED_LOG.search(path)}
        if found:
            return storage.read(f"{folder}/{max(found, key=lambda path: found[path])}").decode("utf-8", "replace")
        reasons.append(f"{storage.uri(folder)} has no executor-logs.")
    except BatonError as error:
        reasons.append(error.message)
    raise BatonError(
        f"the log of {stage.name} cannot be had: {' '.join(reasons)}",
        remedy="Give the credentials of Kubeflow's artifacts (AWS_…), or a kubeconfig.",
    )


RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def find_run(client: KubeflowClient, endpoint: str, run: str, namespace: str | None) -> tuple[KubeflowRun, int]:
    """Returns a run by its id, or the newest by its name, and how many have that name."""
    if RUN_ID.fullmatch(run):
        return client.get_run(run), 1
    equals = {"operation": "EQUALS", "key": "display_name", "stringValue": run}
    runs, count = client.newest_runs(50, namespace, filter=json.dumps({"predicates": [equals]}))
    if not runs:
        raise UserError(
            f"'{endpoint}' has no run named '{run}'; expected one{f' in namespace {namespace}' if namespace else ''}.",
            remedy="Give the name or id that `baton kfp submit` printed; with several profiles --namespace too.",
        )
    newest = max(runs, key=lambda found: found.created_at)
    return client.get_run(newest.run_id), count  # the list lacks the stages


PLACES = {  # end of a run → states of the stage that it ended at, the surest first
    "failed": ("FAILED", "CANCELED", UNKNOWN, "RUNNING", "PENDING", WAITING),
    "canceled": ("CANCELED", "RUNNING", "PENDING", "FAILED", UNKNOWN, WAITING),
}
CANCELLED = "The run was canceled."
UNSAID = (
    "The pod ended without a message, as when its node is lost, memory runs out or the pod is deleted. "
    "The pod's log and the node's events have the cause."
)


def record_end(client: KubeflowClient, remote: KubeflowRun, stages: list[StageStatus], state: str) -> str | None:
    """Records why a run ended early, and writes its page; returns a line about it, or None."""
    if state not in PLACES or not stages:
        return None
    order = PLACES[state]
    stage = min(stages, key=lambda stage: order.index(stage.state) if stage.state in order else len(order))
    at = stage if stage.name != OWN else next((x for x in stages if x.state not in ENDED), stage)
    phase, name = at.name.rpartition(": ")[0], stage.name.rpartition(": ")[2]
    try:
        run = training_run(remote, client.specification(remote), phase)
        if run.storage.is_local and not os.path.isdir(run.storage.root):
            raise BatonError(f"{run.storage.root} is not a folder here.")
        failure = run.read(RunFailure)
        if failure and is_failure_of(failure, remote):
            return f"why it ended: {run.uri}/report.html"
        ends = [stage.ended for stage in stages if stage.ended]
        end = remote.finished_at or max(ends, default=None) or datetime.datetime.now(datetime.UTC)
        if run.recorded(end):
            return None  # it has been resumed since, by another run on Kubeflow
        return f"why it ended: {record_failure(run.uri, _failure(stage, name, remote, state), anew=True)}"
    except (KeyError, ValueError):  # a sweep, a retraining, or no pipeline of ours
        return None
    except BatonError as error:
        return f"no page has the reason, as its store cannot be used from here: {error.message}"


def _failure(stage: StageStatus, name: str, remote: KubeflowRun, state: str) -> RunFailure:
    again = f"`baton retry {remote.display_name}` resumes it."
    if state == "canceled":
        return RunFailure(stage=name, message=CANCELLED, remedy=again, is_cancelled=True, at=now())
    message, remedy = stage.message or UNSAID, stage.hint or again
    return RunFailure(stage=name, message=message, remedy=remedy, exit_code=stage.exit_code, at=now())


ENDS: dict[str, tracking_run.Ended] = {"failed": "FAILED", "canceled": "KILLED"}  # state of a run → MLflow's


@dataclass(frozen=True)
class _Place:
    mlflow: str
    page: str | None
    experiment: str


def end_mlflow_runs(client: KubeflowClient, run: KubeflowRun, state: str) -> list[str]:
    """Ends what a failed or cancelled run has left running in MLflow; returns lines about it."""
    if state not in ENDS:
        return []
    places = set(_places(client.specification(run)))
    lines = []
    for uri, page in {(place.mlflow, place.page) for place in places}:
        experiments = [place.experiment for place in places if place.mlflow == uri]
        lines += _closed(uri, page, experiments, run.run_id, ENDS[state])
    return lines


def _closed(uri: str, page: str | None, experiments: list[str], run_id: str, status: tracking_run.Ended) -> list[str]:
    """Ends the runs at the address for people, else at the one for pods."""
    for reached in filter(None, (page, uri)):
        try:
            ended = tracking_run.close_left(reached, experiments, run_id, status)
        except Exception:
            continue
        return [f"MLflow: run {name} is {status.lower()}" for name in ended]
    return [f"MLflow at {uri} cannot be reached from here: the run's entry there stays open until its next start"]


def _places(node: object) -> Iterator[_Place]:
    """Yields where the recipes in a compiled pipeline are tracked."""
    if isinstance(node, list):
        for entry in node:
            yield from _places(entry)
    if not isinstance(node, dict):
        return
    for key, entry in node.items():
        if key == "recipe" and isinstance(entry, dict):
            text = entry.get("runtimeValue", {}).get("constant")
            yield from _of_recipe(json.loads(ref.decode_texts(text))) if text else ()
        yield from _places(entry)


def _of_recipe(recipe: dict[str, object]) -> Iterator[_Place]:
    section = recipe.get("tracking")
    if isinstance(section, dict) and (uri := section.get("mlflow")):
        experiment = section.get("experiment") or recipe["name"]
        yield _Place(str(uri), section.get("mlflow_page"), str(experiment))
