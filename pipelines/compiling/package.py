"""Compiling a recipe to the file that Kubeflow and the local engine run."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    import yaml
    from kfp.dsl.base_component import BaseComponent


class Pipeline(StrEnum):
    """Kind of pipeline that a recipe is compiled to."""

    finetune = "finetune"
    retrain = "retrain"
    sweep = "sweep"


def write_package(recipe: Recipe, path: str, pipeline: Pipeline = Pipeline.finetune) -> None:
    """Compiles a recipe and checks the result as a cluster would.

    Raises:
        UserError: the recipe cannot be retrained or has no sweep, or says something to Kubernetes that Argo would
            replace.
        BatonError: the result does not conform.
    """
    from baton.pipelines.finetune import finetune
    from baton.pipelines.retrain import retrain
    from baton.pipelines.sweep import sweep

    _require_unexpanded(recipe)
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

    from baton.components.declaring import CODE, code
    from baton.pipelines.compiling import compact, conformance

    compiler.Compiler().compile(made, path)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    spec, *platform = yaml.load_all(text, conformance.LOADER)
    for executor in spec["deploymentSpec"]["executors"].values():
        command = executor["container"]["command"]
        executor["container"]["command"] = [code() if word == CODE else word for word in command]
    compact.name_tasks(spec)
    compact.merge_identical(spec, platform[0] if platform else None)
    with open(path, "w", encoding="utf-8") as file:
        file.write(header)
        yaml.dump_all([spec, *platform], file, _dumper())
    if problems := conformance.check_documents([spec, *platform]):
        raise BatonError(f"the compiled file does not conform: {'; '.join(problems)}")


def _require_unexpanded(recipe: Recipe) -> None:
    """Makes sure that Argo leaves what Kubernetes is told, which cannot travel packed as what stages read does.

    Raises:
        UserError: a text holds two braces.
    """
    document = recipe.model_dump(mode="json")
    told = {"resources": document["resources"], "store": {"cache_dir": document["store"]["cache_dir"]}}
    for path, text in _texts(told, ""):
        if "{{" in text:
            raise UserError(
                f"{path} is {text!r}: Argo, which runs Kubeflow's pipelines, replaces what stands between two braces.",
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


def _dumper() -> type[yaml.SafeDumper]:
    """Returns what writes YAML, with quotes around texts that Kubeflow's reader takes for a number or a boolean."""
    import yaml

    class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
        pass

    words = re.compile(r"(?:[yn]|[-+]?(?:\.\d+|\d[\d_]*(?:\.\d*)?)(?:e[-+]?\d+)?|[-+]?0(?:o[0-7_]+|b[01_]+))$", re.I)
    Dumper.add_implicit_resolver("tag:yaml.org,2002:other", words, list("yYnN+-.0123456789"))
    return Dumper
