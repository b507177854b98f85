"""Predicts how large a compiled pipeline's workflow grows, and whether it then still fits Kubernetes and Kubeflow.

Argo keeps a workflow, its specification and the state of all its nodes, as one object of at most 1 MiB. Beyond that it
compresses the nodes, which Kubeflow's API cannot read; where even that does not fit, the run fails.

The sizes are sums over the texts of the compiled file, each times its copies in a workflow. Constants are bytes,
measured on workflows that Kubeflow Pipelines 2.17 made and ran; no prediction is below a recording.
"""

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Spec: TypeAlias = Mapping[str, Any]  # part of a compiled file, as YAML has it
MAX_WORKFLOW_BYTES = 1_048_576  # Argo's limit for one workflow
REST = 1_000  # metadata and the rest of the status
FIXED, ARGUMENT, DAG = 5_950, 100, 210
"""Of a specification; around the text of a component, container or Kubernetes settings; of a graph's template."""
STAGE, KUBERNETES, BOX, LOOP, DEPENDENCY = 795, 80, 545, 1_300, 24
"""Of a template: a stage, what Kubernetes settings, being a graph and being a loop add, each task to wait for."""
EXECUTOR, EXECUTOR_LABEL, EXECUTOR_RETRY = 2_510, 465, 986  # templates, one pair for all stages with as many labels
LABEL, RETRY = 94, 190  # arguments that a label and a retry policy add to an executor
STAGE_NODES, ARTIFACT_NODES, BOX_NODES, ROOT_NODES = 13_900, 1_400, 8_500, 8_000
"""Of the nodes: six a stage, links of its artifacts, those around a graph or a loop's iteration, around the root."""

COMPRESSED, COMPRESSED_BOX, COMPRESSED_LARGE = 0.054, 1_600, 1.6
"""Compressed bytes: of a byte of the nodes, of a graph or iteration in addition, of a byte of a large value."""
MARGIN = 1.2  # of compressed nodes alone: their random order decides what repeats near enough to be compressed
LARGE = 400  # characters from which on each copy of a value is compressed alone: the recipe, as data-split takes it
ADDRESS = "s3://bucket/folder/runs/name-0f9e8d7c-6b5a-4938-8271-605f4e3d2c1b#2026-01-02T03:04:05.678Z.0"
"""A text that one stage hands to the next."""
TRIALS = 8  # iterations of a loop over the items of an earlier stage, where the number is unknown
CONDITION_BRANCHES = "condition-branches-"  # Kubeflow's box around an If and its Else; only one runs


@dataclass(frozen=True)
class WorkflowSize:
    """Bytes of a workflow whose stages have all ended."""

    spec: int
    nodes: int
    compressed: int  # the nodes at most, once Argo has compressed them
    pods: int  # number of stages
    limit: int = MAX_WORKFLOW_BYTES  # of the cluster for one workflow, compressed

    @property
    def readable(self) -> bool:
        """Whether Kubeflow's API shows the stages to the end."""
        return self._share(self.nodes, MAX_WORKFLOW_BYTES) >= 1

    @property
    def ends(self) -> bool:
        """Whether the run can end at all."""
        return self.readable or self._share(self.compressed, self.limit) >= 1

    @property
    def readable_stages(self) -> int:
        """About how many stages end before Kubeflow's API stops showing them."""
        return max(0, min(self.pods, int(self.pods * self._share(self.nodes, MAX_WORKFLOW_BYTES))))

    @property
    def possible_stages(self) -> int:
        """About how many stages end before the run fails, its workflow too large."""
        return max(0, min(self.pods, int(self.pods * self._share(self.compressed, self.limit))))

    def _share(self, status: int, limit: int) -> float:
        return (limit - self.spec - REST) / status


def predict(
    documents: Sequence[Any], loops: Mapping[str, int] | None = None, items: Mapping[str, str] | None = None
) -> WorkflowSize:
    """Predicts a compiled file's workflow.

    Args:
        documents: Pipeline and Kubernetes settings, as the file has them.
        loops: Iterations, by name, of loops over items from a stage.
        items: Texts as long as such an item, by the input that takes it.
    """
    compiled = _Compiled(documents, loops or {}, items or {})
    run = compiled.run_nodes()
    compressed = (
        COMPRESSED * (run["bytes"] - run["large"]) + COMPRESSED_BOX * run["boxes"] + COMPRESSED_LARGE * run["packed"]
    )
    return WorkflowSize(compiled.spec_bytes(), run["bytes"], int(MARGIN * compressed), run["stages"])


class _Compiled:
    """A compiled file.

    Nodes are counts of `bytes`, of bytes in `large` values, of these `packed`, of `stages`, and of `boxes`: graphs and
    iterations of loops.
    """

    def __init__(self, documents: Sequence[Any], loops: Mapping[str, int], items: Mapping[str, str]) -> None:
        self.loops = loops
        self.root, self.components = documents[0]["root"], documents[0]["components"]
        executors = documents[0]["deploymentSpec"]["executors"]
        self.containers = {label: _text(executor["container"]) for label, executor in executors.items()}
        platforms = documents[1]["platforms"] if len(documents) > 1 else {}
        self.settings = platforms.get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {})
        self.dags = [graph["dag"]["tasks"] for graph in (self.root, *self.components.values()) if "dag" in graph]
        declared = self.root.get("inputDefinitions", {}).get("parameters", {})
        self.defaults = {key: entry["defaultValue"] for key, entry in declared.items() if "defaultValue" in entry}
        self.config = _quoted(_text({"parameterValues": self.defaults}))
        self.longest = dict(items)  # of the texts that tasks pass to an input, by its name
        for key, source in (each for tasks in self.dags for task in tasks.values() for each in _inputs(task).items()):
            if isinstance(constant := _constant(source), str):
                self.longest[key] = max(self.longest.get(key, ""), constant, key=len)

    def spec_bytes(self) -> int:
        """Returns the size of the specification: each component and container once, each task with its driver."""
        texts = {"": _text(self.root)}
        for name, component in self.components.items():
            label = component.get("executorLabel")
            if label is None:
                texts[name] = _text(component)
                continue
            container = self.containers[label]
            texts[container] = container
            texts.setdefault(f"component of {container}", _text(component))
            if label in self.settings:
                texts[f"settings of {name}"] = _text(self.settings[label])
        total = FIXED + self.config + sum(ARGUMENT + _quoted(text) for text in texts.values()) + DAG * len(self.dags)
        executors = set()
        for name, task in (each for tasks in self.dags for each in tasks.items()):
            reference, text = task["componentRef"]["name"], _quoted(_text(task))
            total += text + sum(DEPENDENCY + len(each) for each in task.get("dependentTasks", ()))
            label = self.components[reference].get("executorLabel")
            if label is None:
                total += BOX + 7 * len(name) + 2 * len(reference) + (LOOP + text if "parameterIterator" in task else 0)
                continue
            total += STAGE + 6 * len(name) + self.passed(label, task)
            total += KUBERNETES + len(reference) if label in self.settings else 0
            executors.add((len(self.labels(label)), "retryPolicy" in task))
        return total + sum(EXECUTOR + EXECUTOR_LABEL * labels + EXECUTOR_RETRY * retry for labels, retry in executors)

    def labels(self, label: str) -> list[tuple[str, str]]:
        metadata = self.settings.get(label, {}).get("podMetadata", {})
        return [pair for pairs in metadata.values() for pair in pairs.items()]

    def passed(self, label: str, task: Spec) -> int:
        """Returns the bytes that labels and a retry policy add to an executor's arguments."""
        return sum(LABEL + len(key) + len(value) for key, value in self.labels(label)) + RETRY * ("retryPolicy" in task)

    def run_nodes(self) -> Counter[str]:
        driver = 2 * (_quoted(_text(self.root)) + self.config)
        return Counter(bytes=ROOT_NODES + driver, boxes=1) + self.graph_nodes(self.root["dag"]["tasks"])

    def graph_nodes(self, tasks: Spec, *, branches: bool = False) -> Counter[str]:
        """Returns the nodes of a graph's tasks; of the branches of a condition, those of the largest."""
        parts = [self.task_nodes(name, task) for name, task in tasks.items()]
        constants = (_constant(source) for task in tasks.values() for source in _inputs(task).values())
        inside = max(parts, key=lambda part: part["bytes"]) if branches else sum(parts, Counter[str]())
        return inside + _large(4, constants)  # in the task twice, in the component of the graph twice

    def task_nodes(self, name: str, task: Spec) -> Counter[str]:
        component = self.components[task["componentRef"]["name"]]
        text = _quoted(_text(component)) + _quoted(_text(task))
        if "dag" not in component:
            return self.stage_nodes(task, component, 2 * text)
        own = Counter(bytes=BOX_NODES + 2 * text, boxes=1)
        inside = own + self.graph_nodes(component["dag"]["tasks"], branches=name.startswith(CONDITION_BRANCHES))
        if "parameterIterator" not in task:
            return inside
        items = task["parameterIterator"].get("items", {}).get("raw")
        iterations = len(json.loads(items)) if items else self.loops.get(task["taskInfo"]["name"], TRIALS)
        return own + Counter({key: iterations * number for key, number in inside.items()})

    def stage_nodes(self, task: Spec, component: Spec, texts: int) -> Counter[str]:
        """Returns a stage's nodes: six hold the patch of its pod, two the texts that it is made of, four the labels."""
        label = component["executorLabel"]
        settings = {key: value for key, value in self.settings.get(label, {}).items() if key != "podMetadata"}
        values = {key: self.value(key, source) for key, source in _inputs(task).items()}
        patch = _quoted(_text(_text(component))) + _quoted(_text(_text(values)))
        total = STAGE_NODES + texts + 6 * patch + 8 * (_quoted(self.containers[label]) + _quoted(_text(settings)))
        total += 4 * self.passed(label, task)
        total += ARTIFACT_NODES * len(component.get("outputDefinitions", {}).get("artifacts", {}))
        return Counter(bytes=total, stages=1) + _large(6, values.values())

    def value(self, key: str, source: Spec) -> object:
        """Returns a value about as long as the stage's own."""
        if "runtimeValue" in source:
            return _constant(source)
        return self.longest.get(key) or self.defaults.get(source.get("componentInputParameter", ""), ADDRESS)


def _large(copies: int, values: Iterable[object]) -> Counter[str]:
    texts = [_text(_text(value)) for value in values if isinstance(value, str) and len(value) > LARGE]
    packed = sum(len(zlib.compress(text.encode())) * 4 // 3 for text in texts)  # Argo's is in base64
    return Counter(large=copies * sum(map(len, texts)), packed=copies * packed)


def _inputs(task: Spec) -> Spec:
    return task.get("inputs", {}).get("parameters", {})  # type: ignore[no-any-return]


def _constant(source: Spec) -> object:
    return source.get("runtimeValue", {}).get("constant")


def _text(value: object) -> str:
    """Returns JSON as Go writes it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"})


def _quoted(text: str) -> int:
    """Returns the bytes of a text in JSON."""
    return len(json.dumps(text, ensure_ascii=False).encode())
