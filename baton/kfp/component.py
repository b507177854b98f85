"""Declares the stages of each `component.py` to Kubeflow Pipelines."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

RUNTIME = "_KFP_RUNTIME"  # kfp's own: `true` where a stage runs, so that kfp imports neither compiler nor client
EXECUTOR = "baton.kfp.executor"
SOURCES = (".py", ".yaml", ".yml", ".json", ".jsonl", ".j2", ".jinja", ".html", ".md", ".txt")
"""Endings of the files that a wheel holds, too."""
NOT_IN_STAGES = (  # imported by no stage: above `components` in the layers of `lint-imports`
    *("__main__.py", "api.py", "cli", "compiler", "doctor.py", "importers", "kubeflow", "local", "pipelines", "prove"),
    "source",
)
CODE = "code"  # placeholder of `code_version()` until a pipeline is compiled: most processes compile none


def component(function: Callable[..., object]) -> Callable[..., PipelineTask]:
    """Makes a component of a function, as `kfp.dsl.component` does; where stages run the function is unchanged."""
    if os.environ.get(RUNTIME) == "true":
        return function  # type: ignore[return-value]
    from kfp import dsl

    component = dsl.component(function, base_image="python:3.11", install_kfp_package=False)
    # No source and no documentation: Kubernetes keeps up to six copies for each pod, in an object of 1 MiB at most.
    specification = component.component_spec
    for described in (specification, *(specification.inputs or {}).values(), *(specification.outputs or {}).values()):
        described.description = None
    room = function.__module__.split(".")[-2]
    # kfp's runner of processes takes a component by the name of kfp's executor alone.
    command = ["python3", "-m", EXECUTOR, room, CODE, "--in-place-of", "kfp.dsl.executor_main"]
    specification.implementation.container.command = command
    return component  # type: ignore[no-any-return]


@functools.cache
def code_version(root: Path = Path(__file__).parents[1]) -> str:
    """Returns Baton's version and the beginning of the SHA-256 of all code that stages run."""
    # In commands it makes Kubeflow's cache tell one Baton from another where images keep their tag. A checkout, the
    # wheel made of it and an image with either have the same.
    digest = hashlib.sha256()
    for part in sorted(root.iterdir()):
        if part.name in NOT_IN_STAGES:
            continue
        place = part.resolve()  # a checkout's `components` is a link
        for path in sorted([place, *place.rglob("*")]):
            if path.suffix in SOURCES and path.is_file():
                name, content = (Path(part.name) / path.relative_to(place)).as_posix(), path.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode() + content)
    return f"{importlib.metadata.version('baton-llm')}-{digest.hexdigest()[:8]}"
