"""Compiling a recipe to the file that Kubeflow and the local engine run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from baton.components.shared.core.errors import BatonError
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from kfp.dsl.base_component import BaseComponent


class Pipeline(StrEnum):
    """Kind of pipeline that a recipe is compiled to."""

    finetune = "finetune"
    retrain = "retrain"
    sweep = "sweep"


def write_package(recipe: Recipe, path: str, pipeline: Pipeline = Pipeline.finetune) -> None:
    """Compiles a recipe and checks the result as a cluster would.

    Raises:
        UserError: the recipe cannot be retrained or has no sweep.
        BatonError: the result does not conform.
    """
    from baton.pipelines.finetune import finetune
    from baton.pipelines.retrain import retrain
    from baton.pipelines.sweep import sweep

    compile_checked({"finetune": finetune, "retrain": retrain, "sweep": sweep}[pipeline](recipe), path)


@contextlib.contextmanager
def packaged(recipe: Recipe, name: str, pipeline: Pipeline = Pipeline.finetune) -> Iterator[str]:
    """Yields the path of a recipe's package, `name` and `.yaml`, which is gone afterwards; see `write_package`."""
    with tempfile.TemporaryDirectory(prefix="baton-compile-") as folder:
        path = os.path.join(folder, f"{name}.yaml")
        write_package(recipe, path, pipeline)
        yield path


def compile_checked(made: BaseComponent, path: str) -> None:
    """Compiles a pipeline and checks the result as a cluster would.

    Raises:
        BatonError: the result does not conform.
    """
    import yaml
    from kfp import compiler

    from baton.pipelines.compiling import compact, conformance

    compiler.Compiler().compile(made, path)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    spec, *platform = yaml.load_all(text, conformance.LOADER)
    compact.merge_identical(spec, platform[0] if platform else None)
    with open(path, "w", encoding="utf-8") as file:
        file.write(header)
        yaml.dump_all([spec, *platform], file, getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    if problems := conformance.check(path):
        raise BatonError(f"the compiled file does not conform: {'; '.join(problems)}")
