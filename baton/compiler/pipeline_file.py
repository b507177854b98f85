"""Compiles a recipe to the file that Kubeflow and the local engine run, and checks that it fits.

Kubeflow's page finds tasks by ids that are unique over all graphs. The compiled workflow is limited to 1 MiB, so
identical components are written once.
"""

from __future__ import annotations

import contextlib
import graphlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import yaml

from baton import machine
from baton.compiler.workflow_size import WorkflowSize, predict
from baton.errors import UserError
from baton.recipe.cluster import Resources
from baton.recipe.recipe import Recipe
from baton.runs import ref
from baton.source import credentials
from baton.store.clouds import ANY_BUCKET, ANY_SOURCE
from baton.sweep.search import brackets

if TYPE_CHECKING:
    from kfp.dsl.base_component import BaseComponent


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML has it: ten times as fast
Spec = dict[str, Any]  # part of a compiled file, as YAML has it


class QuotingDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML, with quotes around texts that Kubeflow's reader takes for a number or a boolean."""


QuotingDumper.add_implicit_resolver(
    "tag:yaml.org,2002:other",
    re.compile(r"(?:[yn]|[-+]?(?:\.\d+|\d[\d_]*(?:\.\d*)?)(?:e[-+]?\d+)?|[-+]?0(?:o[0-7_]+|b[01_]+))$", re.I),
    list("yYnN+-.0123456789"),
)
CONTROL = ("condition-", "for-loop-", "exit-handler-")  # prefixes of kfp's own graphs


def _settings(platform: Spec | None) -> Spec:
    """Returns the settings of executors on Kubernetes."""
    found: Spec = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platform else {}
    return found


def name_tasks(spec: Spec, platform: Spec | None) -> None:
    """Gives each task of `spec` an id that no other graph of the pipeline holds; names on the page stay.

    An id is the component's name, with the number of the chunk from the second on: `train-chunk-17`. The tasks of a
    phase, of a later bracket and of a sweep's winner begin with its name: `two-evaluate`. Ids of conditions, loops and
    exit handlers end with it: Kubeflow recognises them by their beginning.
    """
    components, settings = spec["components"], _settings(platform)
    taken: set[str] = set()

    def name(graph: Spec, phase: str) -> None:
        tasks: Spec = graph["tasks"]
        ids: dict[str, str] = {}
        for key in sorted(tasks, key=_natural):
            inside = components[tasks[key]["componentRef"]["name"]].get("dag")
            ids[key] = next(each for each in _wanted(key, tasks[key], phase, inside) if each not in taken)
            taken.add(ids[key])
        graph["tasks"] = {ids[key]: task for key, task in tasks.items()}
        _refer(graph, ids)
        for task in graph["tasks"].values():
            component = components[task["componentRef"]["name"]]
            _refer(settings.get(component.get("executorLabel"), {}), ids)
            if inside := component.get("dag"):
                begins = "start_from" in component.get("inputDefinitions", {}).get("parameters", {})
                name(inside, task["taskInfo"]["name"] if begins else phase)

    name(spec["root"]["dag"], "")


def _wanted(key: str, task: Spec, phase: str, inside: Spec | None) -> Iterator[str]:
    """Yields the ids that a task may have, the best first."""
    if inside is not None:
        yield "-".join(filter(None, (key, phase) if key.startswith(CONTROL) else (phase, key)))
    else:
        around, _, shown = str(task["taskInfo"]["name"]).rpartition(": ")
        own = "-".join(filter(None, (phase, around.replace(" ", "-"), re.sub(r"-\d+$", "", key))))
        number = re.search(r" (\d+)$", shown)
        if number is None:
            yield own
            own += key.removeprefix(re.sub(r"-\d+$", "", key))
        elif int(number[1]) > 1:
            own += f"-{number[1]}"
        yield own
        key = own
    yield f"{key}-again"
    yield from (f"{key}-again-{count}" for count in itertools.count(2))


def _refer(node: object, ids: dict[str, str]) -> None:
    """Replaces the former ids of a graph's tasks wherever the graph refers to one."""
    if isinstance(node, list):
        for entry in node:
            _refer(entry, ids)
    elif isinstance(node, dict):
        for key, entry in node.items():
            if key in ("producerTask", "producerSubtask"):
                node[key] = ids[entry]
            elif key == "dependentTasks":
                node[key] = sorted(ids[name] for name in entry)
            elif key != "constant":
                _refer(entry, ids)


def merge_identical(spec: Spec, platform: Spec | None) -> None:
    """Gives tasks with identical components one component, and components with identical containers one container."""
    executors: Spec = spec["deploymentSpec"]["executors"]
    settings = _settings(platform)
    kept = _merged(executors, lambda label: [executors[label], settings.get(label)])
    for label in set(settings) - set(executors):
        del settings[label]
    components: Spec = spec["components"]
    for graph in (spec["root"], *components.values()):
        for task in graph.get("dag", {}).get("tasks", {}).values():
            if not task.get("cachingOptions"):  # none is the same, and each task is in the workflow several times
                task.pop("cachingOptions", None)
    for component in components.values():
        if "executorLabel" in component:
            component["executorLabel"] = kept[component["executorLabel"]]
    while True:  # a graph equals another once their parts do
        before = len(components)
        kept = _merged(components, components.__getitem__)
        for graph in (spec["root"], *components.values()):
            for task in graph.get("dag", {}).get("tasks", {}).values():
                name = task["componentRef"]["name"]
                task["componentRef"]["name"] = kept.get(name, name)
        if len(components) == before:
            return


def _merged(entries: Spec, content: Callable[[str], object]) -> dict[str, str]:
    """Removes all but the first of entries with the same content; returns for each name the kept one."""
    first: dict[str, str] = {}
    kept = {}
    for name in sorted(entries, key=_natural):
        kept[name] = first.setdefault(json.dumps(content(name), sort_keys=True), name)
    for name, stands in kept.items():
        if stands != name:
            del entries[name]
    return kept


def _natural(name: str) -> list[int]:
    """Returns a sorting key: `train-chunk`, `train-chunk-9`, `train-chunk-10`."""
    return [int(part) for part in re.findall(r"\d+", name)] or [0]


class Pipeline(StrEnum):
    finetune = "finetune"
    retrain = "retrain"
    sweep = "sweep"


def write_package(recipe: Recipe, path: str, pipeline: Pipeline = Pipeline.finetune) -> None:
    """Compiles a recipe; refuses one without gate or sweep where needed, and texts that Argo would replace."""
    from baton.pipelines.finetune import finetune
    from baton.pipelines.retrain import retrain
    from baton.pipelines.sweep import sweep

    _require_unexpanded(recipe)
    compile_pipeline({"finetune": finetune, "retrain": retrain, "sweep": sweep}[pipeline](recipe), path)


@contextlib.contextmanager
def packaged(recipe: Recipe, name: str, pipeline: Pipeline = Pipeline.finetune) -> Iterator[str]:
    """Yields the path of a recipe's package, `name` and `.yaml`, which is removed afterwards; see `write_package`."""
    with tempfile.TemporaryDirectory(prefix="baton-compile-") as folder:
        path = os.path.join(folder, f"{name}.yaml")
        write_package(recipe, path, pipeline)
        yield path


def compile_pipeline(made: BaseComponent, path: str) -> None:
    """Compiles a pipeline, with the hash of the code in every command, short ids, and identical parts once."""
    from kfp import compiler

    from baton.kfp.component import CODE, code_version

    compiler.Compiler().compile(made, path)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    spec, *platform = yaml.load_all(text, LOADER)
    for executor in spec["deploymentSpec"]["executors"].values():
        command = executor["container"]["command"]
        executor["container"]["command"] = [code_version() if word == CODE else word for word in command]
    settings = platform[0] if platform else None
    name_tasks(spec, settings)
    merge_identical(spec, settings)
    with open(path, "w", encoding="utf-8") as file:
        file.write(header)
        yaml.dump_all([spec, *platform], file, QuotingDumper)


def write_graph(package: str, path: str) -> None:
    """Writes the graph of a compiled file as Mermaid text: a box a stage, a frame a group, arrows to what waits."""
    with open(package, encoding="utf-8") as file:
        spec = next(yaml.load_all(file, LOADER))
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(graph(spec))


def graph(spec: Spec) -> str:
    """Returns the flowchart of a pipeline, in the order of its stages; a loop's are in it once."""

    def drawn(tasks: Spec, indent: str) -> Iterator[str]:
        waits = {key: sorted(task.get("dependentTasks", ())) for key, task in sorted(tasks.items())}
        for key in graphlib.TopologicalSorter(waits).static_order():
            # A label's marks are text. Ids have capitals, as Mermaid keeps words such as `end` and `style` for itself.
            label = re.sub(r"[^\w ,.:()/–-]", lambda mark: f"#{ord(mark[0])};", tasks[key]["taskInfo"]["name"])
            name, *before = (re.sub(r"\W", "_", each.title()) for each in (key, *waits[key]))
            arrow = f"{' & '.join(before)} --> " if before else ""
            inside = spec["components"][tasks[key]["componentRef"]["name"]].get("dag")
            if inside is None:
                yield f'{indent}{arrow}{name}["{label}"]'
                continue
            yield f'{indent}subgraph {name}["{label}"]'
            yield f"{indent}    direction TB"
            yield from drawn(inside["tasks"], f"{indent}    ")
            yield f"{indent}end"
            if arrow:
                yield f"{indent}{arrow}{name}"

    return "\n".join(["flowchart TD", *drawn(spec["root"]["dag"]["tasks"], "    ")]) + "\n"


def _require_unexpanded(recipe: Recipe) -> None:
    """Refuses texts for Kubernetes that Argo would replace: they cannot travel packed as those for stages do."""
    document = recipe.model_dump(mode="json")
    told = {"resources": document["resources"], "store": {"cache_dir": document["store"]["cache_dir"]}}
    for path, text in _texts(told, ""):
        if "{{" in text:
            raise UserError(
                f"{path} is {text!r}: Argo, which runs Kubeflow's pipelines, replaces text between double braces.",
                remedy="Write it without {{.",
            )


def _texts(node: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields dotted path and text of all texts in plain values, keys among them."""
    if isinstance(node, dict):
        for key, entry in node.items():
            below = f"{path}.{key}" if path else str(key)
            yield below, str(key)
            yield from _texts(entry, below)
    elif isinstance(node, list):
        for position, entry in enumerate(node):
            yield from _texts(entry, f"{path}.{position}")
    elif isinstance(node, str):
        yield path, node


def cluster_warnings(recipe: Recipe) -> list[str]:
    """Returns warnings about settings that do not work in pods."""
    lines = []
    if "://" not in recipe.store.uri:
        lines.append(f"store {recipe.store.uri!r} is a folder, which pods do not share; use {ANY_BUCKET}")
    if recipe.resources.image == Resources.model_fields["image"].default:
        lines.append(f"image {recipe.resources.image!r} is a placeholder; push one with make images and give --image")
    lines += credentials.not_named(recipe)
    for source in [source.uri for part in recipe.phase_recipes() or [recipe] for source in part.data.sources]:
        if "://" not in source and not source.startswith("builtin:"):
            lines.append(f"data.source {source!r} is a local path, which pods do not see; use {ANY_SOURCE}")
    if recipe.hooks.source and "://" not in recipe.hooks.source:
        lines.append(
            f"hooks.source {recipe.hooks.source!r} is a local path, which pods do not see; put it into a bucket"
        )
    if recipe.resources.profile == "mps":
        lines.append("resources.profile mps is for Apple's GPU, which no pod has; name cpu, cuda-small or cuda-large")
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith("sqlite:"):
        lines.append("tracking.mlflow is a local database and is left out; give the address of an MLflow server")
    return lines


def for_cluster(recipe: Recipe) -> Recipe:
    """Returns the recipe for pods, or refuses it: no Secret has its signing key, or its store's address changes."""
    credentials.require_signing_secret(recipe)
    if ref.encode_text(recipe.store.uri) != recipe.store.uri:
        raise UserError(
            f"store {recipe.store.uri!r} goes from stage to stage as it is, and Argo and Kubernetes replace "
            "{{…}} and $(…) in it.",
            remedy="Name a bucket or folder without braces, $( and what does not print.",
        )
    if recipe.tracking.mlflow and recipe.tracking.mlflow.startswith("sqlite:"):
        return recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"mlflow": None})})
    return recipe


WORKFLOW_LIMIT = "BATON_WORKFLOW_BYTES"  # environment variable: bytes, more where Argo keeps states in a database


def check_fits(path: str, recipe: Recipe, pipeline: Pipeline = Pipeline.finetune) -> WorkflowSize:
    """Predicts the workflow of a compiled recipe; refuses one that outgrows Kubernetes before its last stage ends."""
    with open(path, "rb") as file:
        documents = list(yaml.load_all(file, LOADER))
    size = predict(documents, *(_loops(recipe) if pipeline is Pipeline.sweep else ()))
    size = replace(size, limit=int(machine.number_of(WORKFLOW_LIMIT, size.limit)))
    if not size.ends:
        remedy = "Use fewer, longer chunks (chunks.count); chunks.checkpoint_every saves in between."
        if pipeline is Pipeline.sweep:
            remedy = "Lower the number of trials or chunks, or raise eta; `baton sweep run` has no limit."
            if recipe.sweep and recipe.sweep.device == "own":
                remedy = f"Set sweep.device to shared: a rung is then a few pods. Or {remedy[0].lower()}{remedy[1:]}"
        raise UserError(
            f"at least {size.pods} stages do not fit one workflow: their states would take "
            f"{(size.spec + size.compressed) / 1000:,.0f} kB compressed, Kubernetes takes {size.limit / 1000:,.0f} kB. "
            f"The run would fail at about stage {size.possible_stages}.",
            remedy=remedy,
        )
    return size


def readability_warning(size: WorkflowSize) -> str:
    """Returns a warning where Kubeflow's API stops showing stages before the end, else an empty text."""
    if size.readable:
        return ""
    return (
        f"Kubeflow's API shows stages only until about {size.readable_stages} of {size.pods} have ended: then the "
        "workflow is too large for it. The run continues, and `baton status` reads the store."
    )


def _loops(recipe: Recipe) -> tuple[dict[str, int], dict[str, str]]:
    """Returns the iterations of a sweep's loops, by name, and texts as long as an iteration's, by input."""
    from baton.pipelines.sweep import devices

    loops, longest = {"data": 1}, 0
    for bracket in brackets(recipe):
        trials = bracket.trials
        for rung in bracket.rungs:
            pods = min(trials, devices(recipe) or trials)
            longest = max(longest, -(-trials // pods))
            loops[f"rung {rung.number}"] = pods
            trials = trials if recipe.sweep and recipe.sweep.sure else rung.keep  # all advance at worst
    return loops, {"trials": " ".join(f"t{number:03d}" for number in range(longest))}
