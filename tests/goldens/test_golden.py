"""What recipes compile to, and its graph in the docs: golden files, which `make golden` writes anew.

A difference is what a change of the code does to every user's pipeline: read it before you commit it.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from baton.compiler import pipeline_file
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.recipe import load
from baton.runs import ref
from tests.support import conformance

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
QUICKSTART = ROOT / "pipelines/recipes/quickstart.yaml"
PHASES = HERE.parent / "recipes/phases.yaml"
SWEEP = ROOT / "pipelines/recipes/sweep.yaml"
GATE = 'evaluation.gate={perplexity: "<= baseline"}'
Source = tuple[Path, tuple[str, ...], Pipeline]
"""A recipe, settings that change it, and what it is compiled to."""

FILES: dict[str, Source] = {
    "quickstart": (QUICKSTART, (), Pipeline.finetune),
    "gsm8k-lora": (ROOT / "docs/examples/gsm8k-lora.yaml", (), Pipeline.finetune),
    "sweep": (SWEEP, ("resources.gpus=1", "chunks.spare=1", "sweep.parallel=3"), Pipeline.sweep),
    "sweep-shared": (SWEEP, ("resources.gpus=1", "chunks.spare=1", "sweep.device=shared"), Pipeline.sweep),
    "gate": (QUICKSTART, (GATE,), Pipeline.finetune),
    "phases": (PHASES, (), Pipeline.finetune),
    "lr-find": (QUICKSTART, ("training.lr_find={steps: 20}",), Pipeline.finetune),
    "retrain": (QUICKSTART, (GATE, "evaluation.production=accepted"), Pipeline.retrain),
    "nodes": (QUICKSTART, ("resources.gpus=2", "resources.nodes=2", "training.micro_batch_size=4"), Pipeline.finetune),
    "shards": (QUICKSTART, ("data.shards=3",), Pipeline.finetune),
    "20-chunks": (QUICKSTART, ("chunks.count=20",), Pipeline.finetune),
}
_CODE = re.compile(rf"\b{re.escape(version('baton-llm'))}-[0-9a-f]{{8}}\b")
"""Version of Baton and digest of a stage's component, which any change of that changes."""
GRAPHS: dict[str, Source] = {
    "4 chunks": (QUICKSTART, ("chunks.count=4",), Pipeline.finetune),
    "10 chunks": (QUICKSTART, ("chunks.count=10",), Pipeline.finetune),
    "gate": (QUICKSTART, ("chunks.count=2", GATE), Pipeline.finetune),
    "shards": (QUICKSTART, ("chunks.count=2", "data.shards=3"), Pipeline.finetune),
    "phases": (PHASES, (), Pipeline.finetune),
    "sweep": (SWEEP, (), Pipeline.sweep),
    "sweep of shared devices": (SWEEP, ("sweep.device=shared",), Pipeline.sweep),
}
"""Graphs of the docs, below a comment with their name."""
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def _compile(source: Source, target: Path) -> None:
    recipe, settings, pipeline = source
    write_package(pipeline_file.for_cluster(load.load(str(recipe), settings)), str(target), pipeline)


@pytest.mark.parametrize("name", FILES)
def test_golden_file(name: str, tmp_path: Path) -> None:
    _compile(FILES[name], tmp_path / "pipeline.yaml")
    compiled = _CODE.sub("VERSION-DIGEST", (tmp_path / "pipeline.yaml").read_text())
    documents = ref.decode_texts(list(yaml.load_all(compiled, yaml.CSafeLoader)))  # a golden file is to be read
    documents[0].pop("sdkVersion")
    golden = HERE / "pipelines" / f"{name}.yaml"
    if os.environ.get("BATON_GOLDEN"):
        golden.write_text(yaml.safe_dump_all(documents, sort_keys=True))
    kept = list(yaml.load_all(golden.read_text(), yaml.CSafeLoader))
    assert documents == kept, "run `make golden` and read the diff"
    assert conformance.check_documents(kept) == []


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_graph(name: str, tmp_path: Path) -> None:
    _compile(GRAPHS[name], tmp_path / "pipeline.yaml")
    pipeline_file.write_graph(str(tmp_path / "pipeline.yaml"), str(tmp_path / "graph.mmd"))
    drawn = (tmp_path / "graph.mmd").read_text()
    block = re.compile(rf"(<!-- graph: {name} -->\n```mermaid\n)(.*?)(```\n)", re.DOTALL)
    if os.environ.get("BATON_GOLDEN"):
        for page in PAGES:
            page.write_text(block.sub(lambda found: f"{found[1]}{drawn}{found[3]}", page.read_text()))
    kept = [found[2] for page in PAGES for found in block.finditer(page.read_text())]
    assert kept, "a page shows it"
    assert set(kept) == {drawn}, "run `make golden` and read the diff"


def test_every_graph_of_the_docs_is_a_golden_one() -> None:
    named = {name for page in PAGES for name in re.findall("<!-- graph: (.*?) -->", page.read_text())}
    assert named == set(GRAPHS)
