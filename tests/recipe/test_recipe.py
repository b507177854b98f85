"""The recipe's schema: each rule refuses with the dotted path and what to do."""

import json
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.recipe import Recipe


def changed(document: dict[str, Any], changes: dict[str, Any]) -> Recipe:
    """Check a recipe with values set by dotted path."""
    for path, value in changes.items():
        node = document
        *parents, last = path.split(".")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return load.validate(document, origin="r.yaml")


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


def test_a_check_may_be_off_without_quotes(scratch_recipe: dict[str, Any]):
    assert changed(scratch_recipe, {"data.quality": {"duplicates": False}}).data.quality.duplicates == "off"
    with pytest.raises(UserError, match=r"data\.quality\.duplicates"):
        changed(scratch_recipe, {"data.quality": {"duplicates": True}})


NO_TRACKING = ["none", "None", "NONE", "off", "Off", "no", "false", "null", "disabled", "", " none ", False, None]
ADDRESSES = [
    "http://mlflow:5000",
    "https://mlflow.example.com/base",
    "sqlite:///mlflow.db",
    "sqlite:////srv/mlflow.db",
    "postgresql+psycopg2://mlflow@host/db",
    "mysql+pymysql://host/db",
    "databricks",
    "databricks://profile",
    "databricks-uc",
    "uc:aws",
    "uc",
    "file:./mlruns",
    "./mlruns",
    "/srv/mlruns",
    "~/mlruns",
    "../mlruns",
    "runs/mlflow",
    "wasbs://container@account/x",
]


@pytest.mark.parametrize("value", NO_TRACKING, ids=repr)
@pytest.mark.parametrize("given", ["value", "yaml"])
def test_a_word_for_no_tracking_is_none(value: Any, given: str, scratch_recipe: dict[str, Any]) -> None:
    if given == "value":
        recipe = load.validate({**scratch_recipe, "tracking": {"mlflow": value}}, origin="r.yaml")
    else:
        text = json.dumps({name: scratch_recipe[name] for name in scratch_recipe if name != "tracking"})
        recipe = load.validate(
            load.parse(text, [f"tracking.mlflow={'null' if value is None else value}"], origin="r.yaml"),
            origin="r.yaml",
        )
    assert recipe.tracking.mlflow is None
    load.require_effects(recipe, origin="r.yaml")


@pytest.mark.parametrize("value", ADDRESSES)
def test_an_address_of_mlflow_is_taken(value: str, scratch_recipe: dict[str, Any]) -> None:
    recipe = load.validate({**scratch_recipe, "tracking": {"mlflow": value}}, origin="r.yaml")
    assert recipe.tracking.mlflow == value
    load.require_effects(recipe, origin="r.yaml")


BEFORE_PODS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "a word for an address": (
        {"tracking.mlflow": "mlflow"},
        "tracking.mlflow: is 'mlflow', which is not an address; expected one such as http://mlflow:5000",
        {"tracking.mlflow": "http://mlflow:5000"},
    ),
    "an address without a scheme": (
        {"tracking.mlflow": "mlflow.svc:5000"},
        "did you mean 'http://mlflow.svc:5000'?",
        {"tracking.mlflow": "http://mlflow.svc:5000"},
    ),
    "memory below shm": (
        {"resources.memory": "1Gi"},
        "resources.memory: 1Gi is no more than resources.shm, 2Gi, which counts as memory; raise memory, or lower shm",
        {"resources.shm": "512Mi"},
    ),
    "memory that is shm": (
        {"resources.memory": "4096Mi", "resources.shm": "4Gi"},
        "resources.memory: 4096Mi is no more than resources.shm, 4Gi",
        {"resources.memory": "4097Mi"},
    ),
    "no memory": ({"resources.memory": "0"}, "resources.memory: is 0; give", {"resources.memory": None}),
    "no processor": ({"resources.cpu": "0m"}, "resources.cpu: is 0m; give", {"resources.cpu": "500m"}),
    "no memory of a GPU": (
        {"resources.gpus": 1, "resources.gpu_memory": 0},
        "resources.gpu_memory: is 0; give what a pod needs, or remove it",
        {"resources.gpu_memory": None},
    ),
    "a registered model without a version": (
        {"evaluation.production": "models:/x"},
        "evaluation.production: is 'models:/x'; expected models:/NAME@ALIAS or models:/NAME/VERSION",
        {"evaluation.production": "models:/x@live"},
    ),
    "a system message for texts": (
        {"data.system": "Be kind.", "training.method": "pretrain"},
        "data.system: rows of plain text have no system message; remove it",
        {"data.system": None},
    ),
    "a system message for a format of texts": (
        {"data.system": "Be kind.", "data.format": "text"},
        "data.system: rows of plain text have no system message; remove it",
        {"data.format": "messages"},
    ),
}
"""Name → changes to a recipe that no pod can run, what is said, and what is then done."""


@pytest.mark.parametrize(("changes", "message", "mended"), BEFORE_PODS.values(), ids=BEFORE_PODS)
def test_what_no_pod_can_do_is_refused_where_a_recipe_is_handed_in(
    changes: dict[str, Any], message: str, mended: dict[str, Any], scratch_recipe: dict[str, Any]
) -> None:
    for path, value in changes.items():
        load.set_path(scratch_recipe, path, value)
    recipe = load.validate(scratch_recipe, origin="r.yaml")  # a run that was started with it is still read
    with pytest.raises(UserError) as caught:
        load.require_effects(recipe, origin="r.yaml")
    assert message in str(caught.value)

    for path, value in mended.items():
        load.set_path(scratch_recipe, path, value)
    load.require_effects(load.validate(scratch_recipe, origin="r.yaml"), origin="r.yaml")


RULES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "per epoch with steps": (
        {"chunks.count": "per-epoch", "training.max_steps": 9},
        "set chunks.count to a number, or training.epochs instead of max_steps",
        {"chunks.count": 3},
    ),
    "too many epochs": (
        {"chunks.count": "per-epoch", "training.epochs": 200},
        "at most 100 fit a workflow; set chunks.count to a number",
        {"chunks.count": 4},
    ),
    "more chunks than steps": (
        {"chunks.count": 9, "training.max_steps": 4},
        "at most one per step: set it to 4",
        {"chunks.count": 4},
    ),
    "half precision on a CPU": (
        {"training.precision": "fp16"},
        "set resources.gpus, or use bf16 or fp32",
        {"resources.gpus": 1},
    ),
    "a claim without a folder": (
        {"resources.cache_claim": "cache"},
        "set it, for example to /cache, or remove the claim",
        {"store": {"uri": "s", "cache_dir": "/cache"}},
    ),
    "packed pairs": (
        {**BASE, "training.method": "dpo", "data.packing": True},
        "set it to false",
        {"data.packing": False},
    ),
    "packed conversations": (
        {**BASE, "data.format": "messages", "data.packing": True},
        "set it to best-fit or false",
        {"data.packing": "best-fit"},
    ),
    "an adapter from scratch": (
        {"adapter": {"type": "lora"}},
        "remove adapter, or give model.base",
        {**BASE},
    ),
    "few bits without an adapter": (
        {"model": {"base": "a/b", "quantization": {"bits": 4}}},
        "weights in few bits cannot be trained; add an adapter",
        {"adapter": {"type": "lora"}},
    ),
    "a score on few bits": (
        {
            "training.method": "reward",
            "model": {"base": "a/b", "quantization": {"bits": 4}},
            "adapter": {"type": "lora"},
        },
        "cannot compute with them; use bf16",
        {"training.precision": "bf16"},
    ),
    "a reference from scratch": (
        {"training.method": "grpo", "training.grpo": {"rewards": ["length"], "beta": 0.1}},
        "training.grpo.beta: there is no reference for a model from scratch; set it to 0",
        {"training.grpo.beta": 0},
    ),
    "early stopping without evaluations": (
        {"training.early_stopping": {"patience": 2}},
        "there are none; set evaluation.every or per_epoch",
        {"evaluation.every": 2},
    ),
    "the best is not kept": (
        {"export.checkpoint": "best", "evaluation.every": 2, "chunks.keep.best": 0},
        "set chunks.keep.best to 1 or more",
        {"chunks.keep.best": 1},
    ),
    "an adapter's export without one": (
        {"export.formats": ["adapter"]},
        "take safetensors, or add an adapter",
        {"export.formats": ["safetensors"]},
    ),
    "a loss of its own": (
        {**BASE, "training.method": "grpo", "training.grpo": {"rewards": ["length"]}, "hooks.loss": "m:f"},
        "use hooks.trainer to change it",
        {"hooks": {"trainer": "m:f"}},
    ),
}
"""Name → changes to a recipe, the remedy that is told, and the same done."""


@pytest.mark.parametrize(("changes", "remedy", "mended"), RULES.values(), ids=RULES)
def test_a_rule_s_remedy_is_one(
    changes: dict[str, Any], remedy: str, mended: dict[str, Any], scratch_recipe: dict[str, Any]
) -> None:
    with pytest.raises(UserError) as caught:
        changed(scratch_recipe, changes)
    assert remedy in str(caught.value)

    changed(scratch_recipe, mended)
