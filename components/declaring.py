"""How `component.py` of each room declares its stages to Kubeflow Pipelines."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask

RUNTIME = "_KFP_RUNTIME"
"""kfp's own variable: `true` where a stage runs, so that kfp imports neither its compiler nor its client."""
EXECUTOR = "baton.components.executor"


def stage(function: Callable[..., object]) -> Callable[..., PipelineTask]:
    """Makes a component of a function, as `kfp.dsl.component` does; where stages run the function stays what it is.

    The compiled file then holds neither the function's source nor its documentation: Kubernetes keeps up to six copies
    of them for each pod in an object of 1 MiB at most. The command names the function instead, with Baton's version and
    the source's digest, which tell Kubeflow's cache one Baton from another where images keep their tag.
    """
    if os.environ.get(RUNTIME) == "true":
        return function  # type: ignore[return-value]
    from kfp import dsl

    component = dsl.component(function, base_image="python:3.11", install_kfp_package=False)
    specification = component.component_spec
    for described in (specification, *(specification.inputs or {}).values(), *(specification.outputs or {}).values()):
        described.description = None
    version = importlib.metadata.version("baton-llm")
    digest = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:8]
    room = function.__module__.split(".")[-2]
    # kfp's runner of processes takes a component by the name of kfp's executor alone.
    command = ["python3", "-m", EXECUTOR, room, f"{version}-{digest}", "--in-place-of", "kfp.dsl.executor_main"]
    specification.implementation.container.command = command
    return component  # type: ignore[no-any-return]
