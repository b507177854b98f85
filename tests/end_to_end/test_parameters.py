"""The parameters of a compiled pipeline, on the engine that runs it: values as it hands them on, mistakes at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import events
from baton.compiler.pipeline_file import Pipeline, write_package
from baton.errors import BatonError
from baton.local import engine
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.source import prepare
from baton.store.storage import Storage

RECIPES = Path(__file__).parents[1] / "recipes"
SHORT = {"training.max_steps": 2, "evaluation.samples": 1, "model.from_scratch.config.max_position_embeddings": 128}
Started = Callable[..., list[str]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parameters") / "store"


@pytest.fixture(scope="module")
def start(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Runs a compiled recipe with parameters, and returns the stages that were started."""
    folder = tmp_path_factory.mktemp("packages")

    def run(name: str, recipe: Path = RECIPES / "scratch.yaml", **parameters: object) -> list[str]:
        package = folder / f"{recipe.stem}.yaml"
        if not package.exists():
            # Without the engine's retries, which pause before they tell a mistake again.
            loaded = prepare.load(str(recipe), ["training.epochs=null", "resources.retries=0"], store=str(store))
            write_package(loaded.localised(), str(package))
        stages: list[str] = []

        def heard(event: events.Event) -> None:
            if isinstance(event, events.Stage) and event.state == "started":
                stages.append(event.stage)

        engine.run(str(package), name, {"run_name": name, **parameters}, on_event=heard)
        return stages

    return run


def refused(start: Started, name: str, **parameters: object) -> str:
    with pytest.raises(BatonError) as caught:
        start(name, **parameters)
    assert caught.value.exit_code == 2
    assert "Traceback" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def changed(start: Started, store: Path) -> tuple[list[str], Recipe, int]:
    """The run `changed`: its stages, its recipe and its last step."""
    stages = start("changed", seed=5, batch_size=4, overrides=SHORT)
    run = Run(Storage(str(store)), "changed")
    return stages, run.recipe(), run.plan().targets[-1]


@pytest.mark.slow
def test_parameters_and_overrides_reach_the_run_with_their_types(changed: tuple[list[str], Recipe, int]) -> None:
    stages, recipe, end = changed
    assert stages[-1] == "report"
    assert (recipe.seed, recipe.training.batch_size, recipe.training.learning_rate) == (5, 4, 1e-2)
    assert (recipe.training.max_steps, recipe.training.epochs, recipe.evaluation.samples) == (2, None, 1)
    assert recipe.model.from_scratch
    assert (
        repr(recipe.model.from_scratch.config) == "{'attention_dropout': 0.2, 'max_position_embeddings': 128}"
    )  # 128.0 on the way
    assert end == 2


@pytest.mark.slow
@pytest.mark.usefixtures("changed")
def test_a_run_that_was_started_with_other_overrides_is_not_joined(start: Started) -> None:
    said = refused(start, "changed", seed=5, batch_size=4, overrides={**SHORT, "training.max_steps": 3})
    assert "run 'changed' was started with another recipe: training.max_steps: 2 → 3" in said
    said = refused(start, "changed", seed=6, batch_size=4, overrides=SHORT)
    assert "seed: 5 → 6" in said


@pytest.mark.slow
@pytest.mark.usefixtures("changed")
def test_a_setting_that_changes_no_bits_may_be_another(start: Started, store: Path) -> None:
    start("changed", seed=5, batch_size=4, overrides={**SHORT, "evaluation.samples": 2})
    assert Run(Storage(str(store)), "changed").recipe().evaluation.samples == 2


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"overrides": {"training.learning_rte": 1e-3}}, "unknown key; did you mean 'learning_rate'?"),
        ({"overrides": {"chunks.count": 2}}, "chunks.count cannot be changed in a compiled pipeline: each chunk is"),
        ({"overrides": {"training.batch_size": 0}}, "training.batch_size: Input should be greater than 0"),
        ({"overrides": {"seed": 1}, "seed": 2}, "seed is 1 in overrides, and 2 in the parameter seed. Give one"),
        ({"base_model": "org/model"}, "base_model is given, and the recipe's model is trained from scratch."),
    ],
    ids=["unknown", "fixed", "range", "twice", "base"],
)
def test_a_mistake_is_one_message_of_the_first_stage(
    parameters: dict[str, Any], said: str, start: Started, store: Path
) -> None:
    assert said in refused(start, "mistaken", **parameters)
    assert Run(Storage(str(store)), "mistaken").raw("recipe.json") is None


@pytest.mark.parametrize(
    ("kind", "settings", "overrides", "said"),
    [
        (
            Pipeline.retrain,
            ['evaluation.gate={loss: "<= production"}', "evaluation.production=accepted"],
            {"training.learning_rte": 1},
            "unknown key; did you mean 'learning_rate'?",
        ),
        (
            Pipeline.sweep,
            ["sweep={parameters: {training.learning_rate: [0.01, 0.02]}, method: grid}"],
            {"training.learning_rate": 0.03},
            "training.learning_rate is given, and the sweep draws training.learning_rate for each trial.",
        ),
    ],
    ids=["retrain", "sweep"],
)
def test_a_mistake_is_told_by_the_first_stage_of_each_kind(
    kind: Pipeline, settings: list[str], overrides: dict[str, object], said: str, store: Path, tmp_path: Path
) -> None:
    package = tmp_path / "p.yaml"
    write_package(prepare.load(str(RECIPES / "scratch.yaml"), settings, store=str(store)).recipe, str(package), kind)
    with pytest.raises(BatonError) as caught:
        engine.run(str(package), "mistaken", {"overrides": overrides}, on_event=lambda event: None)
    assert said in str(caught.value)


# phases


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    (folder / "plays.txt").write_text("\n".join(f"the {n} quick foxes jump over {n * n} dogs" for n in range(200)))
    document = yaml.safe_load((RECIPES / "phases.yaml").read_text(encoding="utf-8"))
    document["phases"][0]["data"]["source"] = "plays.txt"
    del document["phases"][1]["training"]["lr_find"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    return folder / "recipe.yaml"


def test_a_mistake_about_the_last_phase_is_told_before_the_first_trains(
    start: Started, phases: Path, store: Path
) -> None:
    said = refused(start, "two", recipe=phases, overrides={"sft.training.learning_rte": 1})
    assert "phase sft" in said
    assert "did you mean 'learning_rate'?" in said
    assert Run(Storage(str(store)), "two-pretrain").raw("recipe.json") is None


@pytest.mark.slow
def test_an_override_is_for_the_phase_that_it_names_or_for_all(start: Started, phases: Path, store: Path) -> None:
    overrides = {"pretrain.training.max_steps": 2, "sft.training.max_steps": 3, "evaluation.samples": 1}
    start("two", recipe=phases, seed=9, overrides=overrides)

    first, second = (Run(Storage(str(store)), f"two-{name}") for name in ("pretrain", "sft"))
    assert [run.plan().targets[-1] for run in (first, second)] == [2, 3]
    assert [(run.recipe().seed, run.recipe().evaluation.samples) for run in (first, second)] == [(9, 1), (9, 1)]
    assert second.recipe().model.base == first.require("export.json")["model_uri"]


# what Kubeflow's page shows


def parameters_of(path: Path) -> dict[str, str]:
    spec = next(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    declared = spec["root"]["inputDefinitions"]["parameters"]
    assert all(parameter["isOptional"] and parameter["description"] for parameter in declared.values())
    return {name: parameter["parameterType"] for name, parameter in declared.items()}


def test_each_kind_of_pipeline_takes_them(tmp_path: Path, phases: Path) -> None:
    common = {"store": "STRING", "base_model": "STRING", "seed": "NUMBER_INTEGER", "overrides": "STRUCT"}
    rows = {"source": "STRING", "batch_size": "NUMBER_INTEGER"}
    length = {"learning_rate": "NUMBER_DOUBLE", "epochs": "NUMBER_DOUBLE", "max_steps": "NUMBER_INTEGER"}
    gate = ['evaluation.gate={loss: "<= production"}', "evaluation.production=accepted"]
    swept = ["sweep={parameters: {training.learning_rate: [0.01, 0.02]}, method: grid}"]
    path = tmp_path / "p.yaml"
    for recipe, overrides, kind, expected in (
        (RECIPES / "scratch.yaml", [], Pipeline.finetune, {"run_name": "STRING", **common, **rows, **length}),
        (phases, [], Pipeline.finetune, {"run_name": "STRING", **common}),
        (RECIPES / "scratch.yaml", gate, Pipeline.retrain, {**common, **rows}),
        (
            RECIPES / "scratch.yaml",
            swept,
            Pipeline.sweep,
            {"sweep_name": "STRING", **common, "batch_size": "NUMBER_INTEGER"},
        ),
    ):
        write_package(prepare.load(str(recipe), overrides).recipe, str(path), kind)
        assert parameters_of(path) == expected, kind
