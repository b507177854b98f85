"""Compiling a recipe to the file that Kubeflow and the local engine run."""

from __future__ import annotations

import os
from enum import StrEnum

from components.shared.errors import BatonError, UserError
from components.shared.recipe import Recipe


class Pipeline(StrEnum):
    """What a recipe is compiled to."""

    finetune = "finetune"
    retrain = "retrain"


def write_package(recipe: Recipe, path: str, pipeline: Pipeline = Pipeline.finetune) -> None:
    """Compiles a recipe and checks the result as a cluster would.

    Raises:
        UserError: the path is none that Kubeflow takes, or the recipe cannot be retrained.
        BatonError: the result does not conform.
    """
    from kfp import compiler

    from pipelines import conformance
    from pipelines.finetune import finetune
    from pipelines.retrain import retrain

    if not path.endswith((".yaml", ".yml")):
        raise UserError(f"output {path!r} has another ending than .yaml.", remedy="Kubeflow takes YAML files.")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    compiler.Compiler().compile({"finetune": finetune, "retrain": retrain}[pipeline](recipe), path)
    if problems := conformance.check(path):
        raise BatonError(f"the compiled file does not conform: {'; '.join(problems)}")
