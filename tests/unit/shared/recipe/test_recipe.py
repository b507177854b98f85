"""The recipe's schema: each rule refuses with the dotted path and what to do."""

from typing import Any

import pytest

from baton.components.shared.core.errors import UserError
from baton.components.shared.recipe import Recipe, recipe_file


def changed(document: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    """Check a recipe with values set by dotted path."""
    for path, value in changes.items():
        node = document
        *parents, last = path.split(".")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return recipe_file.validate(document, origin="r.yaml")


BASE = {"model": {"base": "org/model"}}

REFUSED = {
    "micro batch does not divide": (
        {"training.batch_size": 16, "training.micro_batch_size": 5},
        "training: micro_batch_size 5 does not divide batch_size 16; choose one of 1, 2, 4, 8, 16",
    ),
    "rows beyond counting": (
        {"training.batch_size": 2**31},
        "training.batch_size: Input should be less than or equal to 1000000 (got 2147483648)",
    ),
    "batch of none": ({"training.batch_size": 0}, "training.batch_size: Input should be greater than 0 (got 0)"),
    "101 chunks": ({"chunks.count": 101}, "chunks.count: Input should be less than or equal to 100 (got 101)"),
    "no chunk": ({"chunks.count": 0}, "chunks.count: Input should be greater than or equal to 1 (got 0)"),
    "more chunks than steps": (
        {"chunks.count": 5, "training.max_steps": 4},
        "chunks.count: 5 chunks for 4 steps; at most one per step",
    ),
    "a guard of nothing": (
        {"training.guard": {"nan": False, "loss": None, "grad_norm": None}},
        "training.guard: nothing would be watched or skipped; set nan, loss or grad_norm, or remove guard",
    ),
    "a bound below the median": (
        {"training.guard": {"loss": 1}},
        "training.guard.loss: Input should be greater than 1",
    ),
    "a step after the last": (
        {"training.guard": {"skip": [2, 9]}, "training.max_steps": 8},
        "training: guard.skip: step 9 is after the last, max_steps 8",
    ),
    "one list for all phases": (
        {"training.guard": {"skip": [2]}, "phases": ["pretrain", "sft"]},
        "training.guard.skip: each phase counts its own steps; give the list in the phase it is for",
    ),
    "epochs and steps": (
        {"training.epochs": 1, "training.max_steps": 3},
        "training: give epochs or max_steps, not both",
    ),
    "adapter on random weights": ({"adapter": {}}, "adapter: an adapter on a model trained from scratch"),
    "two origins": ({"model.base": "org/model"}, "model: give exactly one of base and from_scratch"),
    "no origin": ({"model": {}}, "model: give exactly one of base and from_scratch"),
    "no tokenizer": (
        {"model.tokenizer": None},
        "model: a model trained from scratch needs a tokenizer; add tokenizer: {train:",
    ),
    "new tokenizer on a base": (
        {"model": {"base": "org/model", "tokenizer": {"train": {}}}},
        "model: tokenizer.train would not fit the embeddings of base; leave it out",
    ),
    "tokenizer without origin": (
        {"model.tokenizer": {}},
        "model.tokenizer: give exactly one of train and base, or tokens to add or to choose",
    ),
    "tokenizer of no origin": (
        {"model.tokenizer": {"add_tokens": ["<x>"]}},
        "model: a model trained from scratch needs a tokenizer",
    ),
    "special token of no task": (
        {"model.tokenizer.special_tokens": {"eot_token": "<x>"}},
        "model.tokenizer.special_tokens.eot_token: ",
    ),
    "two tokens for the end": (
        {"model.tokenizer.eos": "<a>", "model.tokenizer.special_tokens": {"eos_token": "<b>"}},
        "model.tokenizer: eos is '<a>' and special_tokens.eos_token is '<b>'; leave one out",
    ),
    "tokenizer of two origins": (
        {"model.tokenizer": {"train": {}, "base": "org/model"}},
        "model.tokenizer: give exactly one of train and base",
    ),
    "tokenizer too large": (
        {"model.from_scratch.vocab_size": 299},
        "model: from_scratch.vocab_size 299 is smaller than the tokenizer's 300",
    ),
    "vocabulary under the bytes": (
        {"model.tokenizer.train.vocab_size": 256},
        "model.tokenizer.train.vocab_size: Input should be greater than or equal to 300 (got 256)",
    ),
    "heads do not divide": (
        {"model.from_scratch.num_attention_heads": 3},
        "model.from_scratch: num_attention_heads is 3, which does not divide hidden_size 16; choose a divisor",
    ),
    "unknown column": (
        {"data.columns": {"question": "prompt"}},
        "data.columns: maps 'question', which is none of text, prompt, completion,",
    ),
    "no source": ({"data.source": []}, "data.source: List should have at least 1 item"),
    "none held out": ({"data.split.eval": 0}, "data.split.eval: Input should be greater than 0 (got 0)"),
    "packed conversations": (
        {"data.format": "messages", "data.packing": True},
        "data.packing: conversations are not cut; set it to best-fit or false",
    ),
    "unknown format": ({"data.format": "chat"}, "data.format: Input should be 'auto', 'text', 'prompt-completion'"),
    "infinite rate": ({"training.learning_rate": float("inf")}, "training.learning_rate: Input should be a finite"),
    "rate in words": ({"training.learning_rate": "fast"}, "(got 'fast')"),
    "access key": (
        {"resources.env": {"AWS_SECRET_ACCESS_KEY": "x"}},
        "resources.env: holds AWS_SECRET_ACCESS_KEY, which looks like a credential; put it into resources.secret_env",
    ),
    "token": ({"resources.env": {"HF_TOKEN": "x"}}, "resources.env: holds HF_TOKEN, which looks like a credential"),
    "quantity of no unit": ({"resources.memory": "64GiB"}, "resources.memory: String should match pattern"),
    "digits of another script": ({"resources.memory": "٣Gi"}, "resources.memory: String should match pattern"),
    "name in capitals": ({"name": "Tiny"}, "name: String should match pattern"),
    "name that ends in a dash": ({"name": "tiny-"}, "name: String should match pattern"),
    "negative seed": ({"seed": -1}, "seed: Input should be greater than or equal to 0 (got -1)"),
    "modules that are a number": ({**BASE, "adapter": {"target_modules": 5}}, "adapter.target_modules: Input should"),
    "bad toleration": (
        {"resources.tolerations": [{"effect": "Never"}]},
        "resources.tolerations.0.effect: Input should be 'NoSchedule', 'PreferNoSchedule' or 'NoExecute'",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_rule_names_the_path_and_the_remedy(changes: dict[str, Any], message: str, scratch_recipe: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        changed(scratch_recipe, changes)

    first, *problems = str(caught.value).splitlines()
    assert first == f"recipe 'r.yaml' has {len(problems)} problem(s):"
    assert any(message in problem for problem in problems), problems
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", ["5x", "0s", "00m", "m", "", "5ms", "٣s", 0, -1, 1.5, True, [5]], ids=repr)
def test_a_bad_duration(value: Any, scratch_recipe: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        changed(scratch_recipe, {"chunks.checkpoint_every": value})

    expected = (
        f"chunks.checkpoint_every: is {value!r}; expected a number of steps, a time such as 30s, 5m, 1h, or continuous"
    )
    assert str(caught.value).splitlines()[1:] == [f"  {expected}"]


@pytest.mark.parametrize(
    ("value", "steps", "seconds"),
    [
        (None, None, None),
        (5, 5, None),
        ("30s", None, 30),
        ("5m", None, 300),
        ("01h", None, 3600),
        ("continuous", None, None),
    ],
    ids=["none", "steps", "seconds", "minutes", "hours", "continuous"],
)
def test_a_duration(value: Any, steps: int | None, seconds: float | None, scratch_recipe: dict[str, Any]):
    chunks = changed(scratch_recipe, {"chunks.checkpoint_every": value}).chunks

    assert (chunks.every_steps, chunks.every_seconds) == (steps, seconds)


def test_checkpoints_that_follow_each_other_do_not_hold_training(scratch_recipe: dict[str, Any]):
    with pytest.raises(UserError, match="does not go with wait_for_commit"):
        changed(scratch_recipe, {"chunks.checkpoint_every": "continuous", "chunks.wait_for_commit": True})


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS"])
def test_environment_that_is_no_credential(name: str, scratch_recipe: dict[str, Any]):
    assert changed(scratch_recipe, {"resources.env": {name: "1"}}).resources.env == {name: "1"}


UNKNOWN = {
    "top": ({"chnks": {}}, "chnks: unknown key; did you mean 'chunks'?"),
    "section": ({"training.lerning_rate": 1}, "training.lerning_rate: unknown key; did you mean 'learning_rate'?"),
    "model": ({"model.from_scratch.hiden": 1}, "model.from_scratch.hiden: unknown key; did you mean 'hidden_size'?"),
    "three deep": (
        {"model.tokenizer.train.vocabsize": 300},
        "model.tokenizer.train.vocabsize: unknown key; did you mean 'vocab_size'?",
    ),
    "in a list": (
        {"resources.tolerations": [{"key": "spot"}, {"efect": "NoSchedule"}]},
        "resources.tolerations.1.efect: unknown key; did you mean 'effect'?",
    ),
    "like nothing": ({"export.gguf": {"zzz": 1}}, "export.gguf.zzz: unknown key; known here: types"),
}


@pytest.mark.parametrize(("changes", "problem"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_key(changes: dict[str, Any], problem: str, scratch_recipe: dict[str, Any]):
    with pytest.raises(UserError) as caught:
        changed(scratch_recipe, changes)

    assert str(caught.value).splitlines()[1:] == [f"  {problem}"]


def test_all_problems_are_told_at_once(scratch_recipe: dict[str, Any]):
    del scratch_recipe["name"]

    with pytest.raises(UserError) as caught:
        changed(scratch_recipe, {"seed": -1, "trainin": {}})

    assert str(caught.value).splitlines() == [
        "recipe 'r.yaml' has 3 problem(s):",
        "  name: missing, and it has no default; write name: my-model",
        "  seed: Input should be greater than or equal to 0 (got -1)",
        "  trainin: unknown key; did you mean 'training'?",
    ]


def test_batches(scratch_recipe: dict[str, Any]):
    recipe = changed(scratch_recipe, {"training.batch_size": 16, "training.micro_batch_size": 4})

    assert (recipe.micro_batch_size_per_process, recipe.gradient_accumulation_steps) == (4, 4)


def test_one_source_is_a_list(scratch_recipe: dict[str, Any]):
    assert changed(scratch_recipe, {"data.source": "a.csv"}).data.source == ["a.csv"]
