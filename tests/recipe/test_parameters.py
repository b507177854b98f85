"""What the parameters of a compiled pipeline change in its recipe, and what they may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load, parameters
from baton.recipe.recipe import Recipe
from baton.runs.run import identity

TINY = {
    "name": "tiny",
    "seed": 7,
    "store": "s3://baton",
    "model": {"base": "org/model", "revision": "abc"},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 24, "learning_rate": 1e-3},
    "chunks": {"count": 4},
    "evaluation": {"gate": {"loss": "<= 3"}},
}
PHASES = {
    **{key: value for key, value in TINY.items() if key != "training"},
    "training": {"weight_decay": 0.1},
    "data": {"source": "rows.jsonl", "quality": {"least_rows": 9, "duplicates": "fix"}},
    "phases": [
        {"name": "sft", "training": {"method": "sft", "learning_rate": 1e-3}},
        {"name": "dpo", "training": {"method": "dpo", "learning_rate": 1e-5}},
    ],
}


def recipe(document: dict[str, Any] = TINY, **more: Any) -> Recipe:
    return load.validate({**document, **more}, origin="r.yaml")


def as_compiled(recipe: Recipe) -> dict[str, object]:
    """What a pipeline's parameters say where nobody has changed one."""
    training, source = recipe.training, recipe.model_dump(mode="json")["data"]["source"]
    return parameters.given_parameters(
        store=recipe.store.uri,
        source=source,
        base_model=recipe.model.base or "",
        seed=recipe.seed,
        batch_size=training.batch_size,
        learning_rate=training.learning_rate,
        epochs=0.0 if training.max_steps else training.epochs or 1.0,
        max_steps=training.max_steps or 0,
    )


def changed(overrides: dict[str, object], document: dict[str, Any] = TINY, **values: Any) -> Recipe:
    compiled = recipe(document)
    given = (
        as_compiled(compiled) | parameters.given_parameters(**values)
        if document is TINY
        else parameters.given_parameters(**values)
    )
    return parameters.apply_parameters(compiled, given, overrides)


def refused(overrides: dict[str, object], document: dict[str, Any] = TINY, **values: Any) -> str:
    with pytest.raises(UserError) as caught:
        changed(overrides, document, **values)
    return str(caught.value)


# what they change


def test_what_nobody_changed_leaves_the_recipe_as_it_is() -> None:
    assert changed({}) == recipe()


def test_the_run_of_a_recipe_without_a_length_is_what_it_always_was() -> None:
    compiled = recipe({**TINY, "training": {}})
    whole = parameters.apply_parameters(compiled, as_compiled(compiled), {})
    left_out = parameters.apply_parameters(compiled, parameters.given_parameters(store="s3://baton"), {})
    assert whole.training.epochs == 1.0
    assert identity(parameters.of_phase(left_out, "")) == identity(whole)


def test_parameters_change_the_recipe() -> None:
    result = changed({}, seed=11, batch_size=16, base_model="org/other", learning_rate=2e-3, epochs=2.0)
    assert (result.seed, result.training.batch_size, result.training.learning_rate) == (11, 16, 2e-3)
    assert (result.training.epochs, result.training.max_steps) == (2.0, None)
    assert (result.model.base, result.model.revision) == ("org/other", None)
    assert changed({}, base_model="org/model").model.revision == "abc"


def test_overrides_change_any_setting_and_whole_numbers_are_whole_again() -> None:
    sent = json.loads(json.dumps({"training.weight_decay": 1.0, "training.batch_size": 16.0, "seed": 3.0}))
    result = changed({**sent, "evaluation.gate.loss": "<= 2"})
    assert (result.training.batch_size, result.seed) == (16, 3)
    assert [type(value) for value in (result.training.batch_size, result.training.weight_decay)] == [int, float]
    assert result.evaluation.gate["loss"] != recipe().evaluation.gate["loss"]


def test_whole_numbers_are_mended_where_nothing_says_their_type() -> None:
    scratch = {**TINY, "model": {"from_scratch": {}, "tokenizer": {"train": {"vocab_size": 300}}}}
    compiled = recipe(scratch)
    overrides = {"model.from_scratch.config": {"rope": {"factor": 8.0}, "sizes": [2.0, 0.5]}}
    result = parameters.apply_parameters(compiled, {}, overrides)
    assert result.model.from_scratch
    assert json.dumps(result.model.from_scratch.config) == '{"rope": {"factor": 8}, "sizes": [2, 0.5]}'


def test_a_length_that_is_overridden_takes_the_place_of_the_one_nobody_gave() -> None:
    compiled = recipe({**TINY, "training": {}})
    result = parameters.apply_parameters(compiled, as_compiled(compiled), {"training.max_steps": 8.0})
    assert (result.training.max_steps, result.training.epochs) == (8, None)
    both = {"training.max_steps": None, "training.epochs": 2.0}
    assert changed(both).training.epochs == 2.0


# what they may not


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"training.learning_rte": 1e-3}, "training.learning_rte: unknown key; did you mean 'learning_rate'?"),
        ({"trainig.batch_size": 4.0}, "trainig: unknown key; did you mean 'training'?"),
        ({"training.batch_size": -1.0}, "training.batch_size: Input should be greater than 0 (got -1)"),
        ({"training.batch_size": 2.5}, "training.batch_size: Input should be a valid integer"),
        ({"training.method.x": 1.0}, "overrides: training.method.x: 'method' is a value, it has no keys below it."),
        ({"training..x": 1.0}, "overrides: 'training..x' is not a dotted path"),
        ({"training": {"batch_size": 4.0}}, "overrides: training is a section; expected the paths of settings"),
        ({"data.shuffle": True}, "data.shuffle: chooses the rows of data.max_samples, which is not set"),
    ],
)
def test_a_mistake_is_told_as_that_of_a_recipe(overrides: dict[str, object], said: str) -> None:
    assert said in refused(overrides)


@pytest.mark.parametrize("key", [*parameters.FIXED, "resources.gpus", "store.uri", "training.lr_find.steps"])
def test_what_is_fixed_in_the_compiled_file_is_refused_with_the_reason(key: str) -> None:
    said = refused({key: 1.0})
    assert f"overrides: {key} cannot be changed in a compiled pipeline: " in said
    assert "--set" in said


@pytest.mark.parametrize("gate", [{}, None])
def test_a_gate_cannot_go_or_appear(gate: object) -> None:
    without = {key: value for key, value in TINY.items() if key != "evaluation"}
    if gate is not None:
        assert "the gate is a stage" in refused({"evaluation.gate": gate})
    with pytest.raises(UserError, match=r"evaluation\.gate cannot appear or go"):
        parameters.apply_parameters(recipe(without), {}, {"evaluation.gate.loss": "<= 3"})


BY_EPOCH = {**TINY, "training": {"epochs": 2.5}, "chunks": {"count": "per-epoch"}}


@pytest.mark.parametrize(
    ("values", "overrides", "said"),
    [
        (
            {"epochs": 4.0},
            {},
            "training.epochs is 4, and chunks.count is per-epoch: this pipeline was compiled with the",
        ),
        ({}, {"training.epochs": 4.0}, "compiled with the chunks of 2.5 epoch(s). Change it in the recipe or by --set"),
        ({"max_steps": 9}, {}, "chunks.count: per-epoch counts training.epochs, and training.max_steps is set"),
    ],
)
def test_a_chunk_for_each_epoch_holds_the_epochs(values: Any, overrides: dict[str, object], said: str) -> None:
    assert said in refused(overrides, BY_EPOCH, **values)


def test_a_chunk_for_each_epoch_and_as_many_chunks_are_one_run() -> None:
    whole, number = recipe(BY_EPOCH), recipe({**BY_EPOCH, "chunks": {"count": 3}})
    assert identity(whole) == identity(number)
    assert "per_epoch" not in identity(whole)["evaluation"], "runs from before it was a setting stay the same ones"
    twice = recipe({**BY_EPOCH, "evaluation": {"per_epoch": 2}, "chunks": {"count": 3, "checkpoints_per_epoch": 5}})
    assert identity(twice)["evaluation"] == {"every": None, "per_epoch": 2}
    assert identity(twice)["chunks"] == {"count": 3}


def test_a_chunk_for_each_epoch_takes_the_epochs_it_was_compiled_with() -> None:
    result = parameters.apply_parameters(recipe(BY_EPOCH), as_compiled(recipe(BY_EPOCH)), {"training.batch_size": 4.0})
    assert (result.num_chunks, result.chunks.count) == (3, "per-epoch")
    phases = {**PHASES, "chunks": {"count": "per-epoch"}}
    with pytest.raises(UserError, match=r"training\.epochs is 3, and chunks\.count is per-epoch"):
        parameters.apply_parameters(recipe(phases), {}, {"dpo.training.epochs": 3.0})


def test_what_a_parameter_and_an_override_say_differently_names_both() -> None:
    said = refused({"training.learning_rate": 1e-4}, learning_rate=2e-3)
    assert said == (
        "training.learning_rate is 0.0001 in overrides, and 0.002 in the parameter learning_rate. Give one of the two."
    )
    assert changed({"training.learning_rate": 2e-3}, learning_rate=2e-3).training.learning_rate == 2e-3
    assert changed({"training.learning_rate": 1e-4}).training.learning_rate == 1e-4


def test_a_base_for_a_model_from_scratch_is_refused() -> None:
    scratch = recipe({**TINY, "model": {"from_scratch": {}, "tokenizer": {"train": {"vocab_size": 300}}}})
    with pytest.raises(UserError, match="base_model is given, and the recipe's model is trained from scratch"):
        parameters.apply_parameters(scratch, parameters.given_parameters(base_model="org/model"), {})


# phases


def parts(overrides: dict[str, object], **values: Any) -> list[Recipe]:
    result = changed(overrides, PHASES, **values)
    return [parameters.of_phase(result, phase.name) for phase in result.phases]


def test_phases_share_what_they_do_not_have_of_their_own() -> None:
    before, after = parts({}), parts({"training.weight_decay": 0.3}, seed=11, base_model="org/other")
    assert [part.training.weight_decay for part in before] == [0.1, 0.1]
    assert [part.training.weight_decay for part in after] == [0.3, 0.3]
    assert [part.seed for part in after] == [11, 11]
    assert after[0].model.base == "org/other"
    assert after[1].model.base == before[1].model.base  # the phase before


def test_a_key_after_the_name_of_a_phase_is_that_ones_and_leaves_what_is_beside_it() -> None:
    overrides = {"dpo.training.learning_rate": 2e-5, "dpo.data.quality.least_rows": 5.0, "dpo.chunks.retries": 1.0}
    sft, dpo = parts({**overrides, "data.quality.leakage": "fail"})
    assert (sft.training.learning_rate, dpo.training.learning_rate) == (1e-3, 2e-5)
    shown = [(part.data.quality.least_rows, part.data.quality.duplicates) for part in (sft, dpo)]
    assert shown == [(9, "fix"), (5, "fix")]
    assert [part.data.quality.leakage for part in (sft, dpo)] == ["fail", "fail"]
    assert (sft.chunks.retries, dpo.chunks.retries) == (recipe().chunks.retries, 1)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"training.learning_rate": 1e-4}, "training.learning_rate changes nothing, as each phase has its own. Name"),
        ({"dpo.training.learning_rte": 1e-4}, "training.learning_rte: unknown key; did you mean 'learning_rate'?"),
        ({"dop.training.learning_rate": 1e-4}, "dop: unknown key"),
        ({"dpo.chunks.count": 2.0}, "dpo.chunks.count cannot be changed in a compiled pipeline"),
        ({"dpo.export.formats": []}, "phases share export; expected one of data, adapter, training"),
        ({"phases": []}, "phases cannot be changed in a compiled pipeline"),
    ],
)
def test_a_mistake_of_a_later_phase_is_told_with_the_whole_recipe(overrides: dict[str, object], said: str) -> None:
    assert said in refused(overrides, PHASES)


def test_parameters_of_one_training_are_refused_with_phases() -> None:
    assert "batch_size is given, and the recipe has phases. Give it in overrides: training.batch_size" in refused(
        {}, PHASES, batch_size=16
    )


# sweeps


@pytest.mark.parametrize(
    ("values", "overrides"),
    [({"batch_size": 16}, {}), ({}, {"training.batch_size": 16.0}), ({}, {"training": {}})],
)
def test_what_trials_draw_cannot_be_given(values: dict[str, Any], overrides: dict[str, object]) -> None:
    swept = recipe(sweep={"parameters": {"training.batch_size": [8, 16]}, "trials": 2})
    with pytest.raises(UserError, match=r"the sweep draws training.batch_size for each trial"):
        parameters.require_undrawn(swept, parameters.given_parameters(**values), overrides)
    parameters.require_undrawn(swept, parameters.given_parameters(seed=3, batch_size=8), {"training.weight_decay": 0.1})
