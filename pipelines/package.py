"""Compiling a recipe to the file that Kubeflow and the local engine run."""

from __future__ import annotations

import os

from components.shared.errors import BatonError, UserError
from components.shared.recipe import Recipe


def write_package(recipe: Recipe, path: str) -> None:
    """Compiles a recipe and checks the result as a cluster would.

    Raises:
        UserError: the path is none that Kubeflow takes.
        BatonError: the result does not conform.
    """
    from kfp import compiler

    from pipelines import conformance
    from pipelines.finetune import finetune

    if not path.endswith((".yaml", ".yml")):
        raise UserError(f"output {path!r} has another ending than .yaml.", remedy="Kubeflow takes YAML files.")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    compiler.Compiler().compile(finetune(recipe), path)
    if problems := conformance.check(path):
        raise BatonError(f"the compiled file does not conform: {'; '.join(problems)}")
