"""Baton's artifacts in somebody's own pipeline: a component that loads the model, one that reads the rows, lineage."""

import json
from pathlib import Path
from typing import Any

import pytest
from kfp import compiler, dsl, local

from baton.components.evaluate.component import evaluate
from baton.components.export.component import export
from baton.components.report.component import report
from baton.components.tokenize.component import tokenize
from baton.components.train_chunk.component import train_chunk
from baton.pipelines import finetune
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.storage import Storage

RECIPE = Path(__file__).parents[1] / "recipes/scratch.yaml"
SETTINGS = ["training.epochs=null", "training.max_steps=4"]


@dsl.component(base_image="theirs/rows:1", install_kfp_package=False)
def count_rows(rows: dsl.Input[dsl.Dataset], side: str) -> int:
    from fsspec.core import url_to_fs

    file_system, folder = url_to_fs(rows.metadata["address"])
    with file_system.open(f"{folder}/{side}.jsonl", "rb") as file:
        counted = sum(1 for _ in file)
    assert counted == rows.metadata[side]
    with open(rows.path, encoding="utf-8") as card:
        assert f"{side} {counted:,}" in card.readline()
    return counted


@dsl.component(base_image="theirs/tokens:1", install_kfp_package=False)
def count_tokens(tokens: dsl.Input[dsl.Dataset]) -> int:
    import datasets

    read = datasets.load_from_disk(f"{tokens.metadata['address']}/train")
    counted = sum(len(ids) for ids in read["input_ids"])
    assert counted == tokens.metadata["tokens"]
    return counted


@dsl.component(base_image="theirs/model:1", install_kfp_package=False)
def write_on(model: dsl.Input[dsl.Model], metrics: dsl.Input[dsl.Metrics]) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert metrics.metadata["steps"] == model.metadata["step"]
    loaded = AutoModelForCausalLM.from_pretrained(model.path)
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    assert loaded.config.vocab_size >= len(tokenizer)
    return model.metadata["framework"]


def _recipe(store: Path, *settings: str) -> Recipe:
    return load.load(str(RECIPE), [*SETTINGS, f"store={store}", *settings])


def _pipeline(recipe: Recipe) -> Any:
    @dsl.pipeline(name="theirs")
    def theirs(run_name: str) -> str:
        split = finetune.split_task(recipe, recipe.store.uri, run_name=run_name)
        count_rows(rows=split.outputs["rows"], side="train")
        tokens = tokenize(baton=split.outputs["Output"])
        count_tokens(tokens=tokens.outputs["tokens"])
        trained = train_chunk(baton=tokens.outputs["Output"], index=1)
        evaluated = evaluate(baton=trained.outputs["Output"])
        exported = export(baton=evaluated.outputs["Output"])
        write_on(model=exported.outputs["model"], metrics=evaluated.outputs["metrics"])
        report(baton=exported.outputs["Output"])
        return exported.outputs["address"]

    return theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("theirs")


@pytest.fixture(scope="module")
def by_kfp(folder: Path) -> Path:
    """A run by kfp's own local engine; returns the folder of its artifacts."""
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(folder / "by-kfp"), raise_on_error=True)
    recipe = _recipe(folder / "store", "export.artifact=true")
    done = _pipeline(recipe)(run_name="mine")
    run = Run(Storage(recipe.store.uri), "mine")
    assert done.output == run.require("export.json")["model_uri"]
    (root,) = (folder / "by-kfp").iterdir()
    return root


@pytest.mark.slow
def test_a_foreign_component_loads_the_model_from_its_input(by_kfp: Path, folder: Path) -> None:
    """By transformers, in the pipeline; here that it is what was committed."""
    model = by_kfp / "export" / "model"
    committed = Path(Run(Storage(str(folder / "store")), "mine").require("export.json")["model_uri"])
    assert model != committed
    assert {path.name: path.read_bytes() for path in model.iterdir()} == {
        path.name: path.read_bytes() for path in committed.iterdir()
    }


@pytest.mark.slow
def test_a_foreign_component_reads_where_the_rows_are(by_kfp: Path) -> None:
    output = json.loads((by_kfp / "count-rows" / "executor_output.json").read_text(encoding="utf-8"))
    assert output["parameterValues"]["Output"] > 0


@pytest.mark.slow
def test_cards_are_readable_in_a_preview(by_kfp: Path) -> None:
    """Kubeflow's page shows 255 bytes of one."""
    rows = (by_kfp / "data-split" / "rows").read_text(encoding="utf-8")
    assert rows.splitlines()[0].startswith("train ")
    assert '\ntrain\n1  {"completion": "' in rows[:255]
    assert "run_name mine" in rows
    tokens = (by_kfp / "tokenize" / "tokens").read_text(encoding="utf-8")
    assert tokens[:255].count("⟦") == 3  # the first of them in the heading
    assert "⟧ (32 tokens)\n2  " in tokens[:255]
    assert max(len(rows), len(tokens)) < 20_000


@pytest.mark.slow
def test_lineage_is_read_back_from_the_metadata_store(by_kfp: Path, folder: Path, tmp_path: Path) -> None:
    from tests.end_to_end.cluster.graph import Graph
    from tests.end_to_end.cluster.local_tasks import LocalTasks

    package = tmp_path / "theirs.yaml"
    compiler.Compiler().compile(_pipeline(_recipe(folder / "store", "export.artifact=true")), str(package))
    tasks = LocalTasks(tmp_path / "root" / "theirs" / "0000-1")
    outputs = Graph(package).run({"run_name": "mine"}, tasks)

    records, run = tasks.metadata, Run(Storage(str(folder / "store")), "mine")
    assert {execution.state for execution in records.executions} == {"COMPLETE"}
    made = {
        (event.execution.name, event.path): event.artifact.type for event in records.events if event.type == "OUTPUT"
    }
    assert made == {
        ("data-split", "rows"): "system.Dataset",
        ("data-split", "quality"): "system.HTML",
        ("tokenize", "tokens"): "system.Dataset",
        ("train-chunk", "checkpoint"): "system.Model",
        ("train-chunk", "progress"): "system.HTML",
        ("evaluate", "metrics"): "system.Metrics",
        ("export", "model"): "system.Model",
        ("report", "report"): "system.HTML",
    }
    model = records.artifact("export", "model")
    assert records.maker(model).name == "export"
    assert [execution.name for execution in records.takers(model)] == ["write-on"]
    assert [e.name for e in records.takers(records.artifact("data-split", "rows"))] == ["count-rows"]
    assert [e.name for e in records.takers(records.artifact("evaluate", "metrics"))] == ["write-on"]

    meta = run.storage.read(
        f"{model.custom_properties['address']}".removeprefix(f"{run.storage.uri()}/") + "/README.md"
    )
    assert meta.startswith(b"---")
    assert model.custom_properties["address"] == outputs["Output"] == run.require("export.json")["model_uri"]
    named = {(event.execution.name, event.path): event.artifact for event in records.events if event.type == "OUTPUT"}
    assert {place: artifact.custom_properties["display_name"] for place, artifact in named.items()} == {
        ("data-split", "rows"): "mine · rows",
        ("data-split", "quality"): "mine · quality",
        ("tokenize", "tokens"): "mine · tokens",
        ("train-chunk", "checkpoint"): "mine · step 4",
        ("train-chunk", "progress"): "mine · progress of chunk 1",
        ("evaluate", "metrics"): "mine · metrics",
        ("export", "model"): "mine · model",
        ("report", "report"): "mine · report",
    }
    assert model.custom_properties["bytes"] == float(run.require("export.json")["bytes"])
    metrics = records.artifact("evaluate", "metrics").custom_properties
    assert str(model.custom_properties["digest"]).startswith(str(metrics["digest"]))
    after = run.require("evaluation.json")["after"]
    assert {f"{name}_after": float(value) for name, value in after.items()}.items() <= metrics.items()
    assert metrics["steps"] == 4
    assert metrics["tokens_per_second"] > 0  # type: ignore[operator]
    # Scalar metrics in one place alone: a run is one column on the page that compares runs.
    assert [a for a in records.artifacts if a.type in ("system.Metrics", "system.ClassificationMetrics")] == [
        records.artifact("evaluate", "metrics")
    ]


@pytest.mark.slow
def test_counts_alone_keep_every_text_out(folder: Path, tmp_path: Path) -> None:
    from tests.end_to_end.cluster.graph import Graph
    from tests.end_to_end.cluster.local_tasks import LocalTasks

    canary = "Zanzibar-4711"
    source = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{canary} {i}?", "completion": f"{canary} is {i} {'x' * i}"}) for i in range(60)]
    source.write_text("\n".join(lines + lines[:5] + ['{"prompt": "' + canary]) + "\n", encoding="utf-8")
    texts = {}
    for cards in ("rows", "counts"):
        settings = [
            f"data.source={source}",
            "data.max_samples=null",
            "data.max_rejected=0.5",
            f"tracking.cards={cards}",
        ]
        package = tmp_path / f"{cards}.yaml"
        recipe = _recipe(tmp_path / "store", *settings)
        compiler.Compiler().compile(finetune.finetune(recipe), str(package))
        root = tmp_path / cards
        assert Graph(package).run({"run_name": "mine"}, LocalTasks(root))
        files = [path for path in root.rglob("*") if path.is_file()]
        texts[cards] = {f"{path.parent.name}/{path.name}": canary in path.read_text(encoding="utf-8") for path in files}
    shown = {name for name, is_shown in texts["rows"].items() if is_shown}
    assert shown == {"data-split/rows", "data-split/quality", "tokenize/tokens", "report/report"}
    assert texts["counts"].keys() == texts["rows"].keys()
    assert not any(texts["counts"].values())
