"""The estimate of memory: what can be counted is counted exactly, and what is kept for the backward pass nearly so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.errors import UserError
from baton.models import loading, memory, trainable
from baton.recipe import load
from baton.recipe.recipe import Recipe

SIZES = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}


def base(folder: Path, **changes: Any) -> str:
    """Saves a tiny Llama."""
    torch.manual_seed(0)
    settings = {**SIZES, "vocab_size": 400, "num_key_value_heads": 2, "bos_token_id": None, **changes}
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    return str(folder)


def recipe(**sections: Any) -> Recipe:
    """A recipe, with sections merged one deep."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"from_scratch": dict(SIZES), "tokenizer": {"train": {"vocab_size": 400}}},
        "data": {"source": "rows.jsonl", "max_length": 64},
        "training": {"batch_size": 8, "micro_batch_size": 4},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    if "base" in document["model"]:
        document["model"] = {k: v for k, v in document["model"].items() if k not in ("from_scratch", "tokenizer")}
    return load.validate(document, origin="tiny")


def items(given: Recipe) -> dict[str, int]:
    """The estimate of a recipe, by item."""
    return {item.name: item.bytes for item in memory.estimate(given, memory.build_skeleton(given)).items}


def real(given: Recipe) -> Any:
    """The model that a recipe trains, with its weights."""
    from peft import get_peft_model

    if given.model.from_scratch:
        config = memory.configuration(given)
        model = loading.auto_class(given).from_config(config, dtype=getattr(torch, given.model.dtype))
    else:
        assert given.model.base
        model = loading.load_model(given.model.base, given)
    if given.training.trainable:
        trainable.freeze(model, given.training.trainable)
    return get_peft_model(model, trainable.lora(given)) if given.adapter else model


def shapes(model: Any) -> dict[str, tuple[Any, ...]]:
    """Names, shapes, types and whether they are trained, of a model's parameters."""
    return {name: (*value.shape, value.dtype, value.requires_grad) for name, value in model.named_parameters()}


LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
MODELS: dict[str, dict[str, Any]] = {
    "from scratch": {},
    "in 16 bits": {"model": {"dtype": "bfloat16"}},
    "two heads share a key": {"model": {"from_scratch": {**SIZES, "num_key_value_heads": 2}}},
    "a larger embedding": {"model": {"from_scratch": {**SIZES, "vocab_size": 512}}},
    "tied": {"model": {"from_scratch": {**SIZES, "config": {"tie_word_embeddings": True}}}},
    "gpt2": {"model": {"from_scratch": {**SIZES, "architecture": "gpt2", "intermediate_size": None, "config": {}}}},
    "the last block": {"training": {"trainable": {"last_layers": 1, "patterns": ["norm"]}}},
    "reward model": {"training": {"method": "reward"}},
}
ADAPTED: dict[str, dict[str, Any]] = {
    "lora": {"adapter": LORA},
    "lora on all layers": {"adapter": {**LORA, "target_modules": "all-linear"}},
    "lora of several ranks": {"adapter": {**LORA, "rank_pattern": {"v_proj": 9}}},
    "lora with biases and a head": {"adapter": {**LORA, "bias": "all", "modules_to_save": ["lm_head"]}},
    "lora on some blocks": {"adapter": {**LORA, "layers_to_transform": [0, 2]}},
    "dora": {"adapter": {**LORA, "dora": True}},
    "orthogonal": {"adapter": {**LORA, "init": "orthogonal"}},
    "lora in 16 bits": {"adapter": LORA, "model": {"dtype": "bfloat16"}},
    "lora on a reward model": {"adapter": LORA, "training": {"method": "reward"}},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_the_skeleton_is_the_model(changes: dict[str, Any]) -> None:
    given = recipe(**changes)
    laid_out = memory.build_skeleton(given)
    assert shapes(laid_out) == shapes(real(given))
    assert {value.device.type for value in laid_out.parameters()} == {"meta"}


@pytest.mark.parametrize("changes", ADAPTED.values(), ids=ADAPTED)
def test_the_skeleton_of_an_adapter_is_peft_s(changes: dict[str, Any], tmp_path: Path) -> None:
    given = recipe(**{**changes, "model": {**changes.get("model", {}), "base": base(tmp_path)}})
    found, adapted = memory.estimate(given, memory.build_skeleton(given)), real(given)
    assert shapes(memory.build_skeleton(given)) == shapes(adapted)
    assert (found.trainable, found.parameters) == adapted.get_nb_trainable_parameters()


def test_laying_out_draws_nothing() -> None:
    before = torch.get_rng_state()
    memory.build_skeleton(recipe())
    assert torch.equal(torch.get_rng_state(), before)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw_torch"},
    "adamw, fused": {"optimizer": "adamw_torch_fused"},
    "sgd": {"optimizer": "sgd"},
    "sgd with momentum": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
    "adafactor": {"optimizer": "adafactor"},
    "rmsprop": {"optimizer": "rmsprop"},
    "rmsprop, centered": {"optimizer": "rmsprop", "optimizer_options": {"momentum": 0.9, "centered": True}},
    "adagrad": {"optimizer": "adagrad"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("training", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_state_is_as_large_as_the_real_one(training: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    given = recipe(training=training, model={"dtype": dtype})
    options = ",".join(f"{name}={value}" for name, value in given.training.optimizer_options.items())
    arguments = TrainingArguments(str(tmp_path), optim=given.training.optimizer, optim_args=options or None)
    model = real(given)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    optimizer = kind(model.parameters(), **settings)
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    size = sum(value.numel() * value.element_size() for value in kept)
    assert memory.optimizer_bytes(given.training, memory.build_skeleton(given)) == size
    assert items(given).get("optimizer", 0) == size


PER_WEIGHT = {
    "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "paged_adamw_32bit": 8, "lion_8bit": 1, "lion_32bit": 4,
    "paged_lion_8bit": 1, "paged_lion_32bit": 4, "ademamix": 12, "ademamix_8bit": 3, "paged_ademamix_8bit": 3,
}  # fmt: skip


@pytest.mark.parametrize("optimizer", PER_WEIGHT)
def test_bytes_per_weight_of_bitsandbytes(optimizer: str) -> None:
    given = recipe(training={"optimizer": optimizer}, resources={"gpus": 1})
    model = torch.nn.Linear(512, 512, bias=False)
    expected = PER_WEIGHT[optimizer] * 512 * 512
    assert memory.optimizer_bytes(given.training, model) == pytest.approx(expected, rel=0.02)


def test_eight_bits_leave_embeddings_and_small_tensors_in_thirty_two() -> None:
    training = recipe(training={"optimizer": "adamw_bnb_8bit"}).training
    assert memory.optimizer_bytes(training, torch.nn.Embedding(512, 512)) == 8 * 512 * 512
    assert memory.optimizer_bytes(training, torch.nn.Linear(63, 65, bias=False)) == 8 * 63 * 65


def kept_for_backward(model: Any, given: Recipe) -> int:
    """Bytes that the backward pass of one micro-batch needs, weights apart."""
    known = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())}
    seen: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
        return value

    ids = torch.randint(0, 400, (given.micro_batch_size_per_process, given.data.max_length))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        hidden = model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        kept = [hidden.last_hidden_state]
    assert kept
    return sum(seen.values())


WIDE = {**SIZES, "hidden_size": 128, "intermediate_size": 384}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in 16 bits": {"model": {"dtype": "bfloat16"}},
    "longer": {"data": {"max_length": 256}},
    "eager": {"model": {"attention": "eager"}, "data": {"max_length": 256}},
    "two heads share a key": {"model": {"from_scratch": {**WIDE, "num_key_value_heads": 2}}},
    "norms in attention": {"model": {"from_scratch": {**WIDE, "architecture": "qwen3", "config": {"head_dim": 32}}}},
    "dropout": {"model": {"from_scratch": {**WIDE, "architecture": "gpt2", "config": {}}}},
    "experts": {"model": {"from_scratch": {**WIDE, "architecture": "mixtral", "config": {}}}},
}


@pytest.mark.parametrize("changes", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_are_about_what_autograd_keeps(changes: dict[str, Any]) -> None:
    given = recipe(**{**changes, "model": {"from_scratch": WIDE, **changes.get("model", {})}})
    config = memory.configuration(given)
    config._attn_implementation = given.model.attention or "sdpa"
    model = loading.auto_class(given).from_config(config, dtype=getattr(torch, given.model.dtype))
    assert items(given)["activations"] == pytest.approx(kept_for_backward(model.train(), given), rel=0.12)


def test_rows_of_new_tokens_beside_an_adapter_take_copies_of_a_layer(tmp_path: Path) -> None:
    document = recipe(model={"base": base(tmp_path)}, adapter={"r": 2}).model_dump(mode="json")
    document["model"]["tokenizer"] = {"add_tokens": ["<x>"]}
    grown = load.validate(document, origin="tiny")
    assert items(grown)["rows of new tokens"] == 3 * 4 * 400 * 32
    document["adapter"]["modules_to_save"] = ["embed_tokens", "lm_head"]
    assert "rows of new tokens" not in items(load.validate(document, origin="tiny"))


def test_checkpointing_and_offloading_keep_less() -> None:
    plain = items(recipe())["activations"]
    checkpointed = items(recipe(training={"gradient_checkpointing": True}))["activations"]
    offloaded = items(recipe(training={"activation_offloading": True}))["activations"]
    assert offloaded < checkpointed < plain
    assert offloaded == plain // 3


def test_frozen_blocks_keep_nothing() -> None:
    last = items(recipe(training={"trainable": {"last_layers": 1}}))
    assert last["activations"] == items(recipe())["activations"] // 3


def test_memory_grows_with_what_it_should() -> None:
    plain = items(recipe())
    longer, more = items(recipe(data={"max_length": 128})), items(recipe(training={"micro_batch_size": 8}))
    assert longer["activations"] == more["activations"] == 2 * plain["activations"]
    for name in ("trained weights", "gradients", "optimizer", "fixed"):
        assert longer[name] == more[name] == plain[name]


def test_a_pair_is_two_sequences(tmp_path: Path) -> None:
    given = {"model": {"base": base(tmp_path)}}
    one, two = items(recipe(**given)), items(recipe(**given, training={"method": "dpo"}))
    assert two["activations"] == 2 * one["activations"]


REFERENCES = {
    "sft": ({}, {}, False),
    "dpo": ({"method": "dpo"}, {}, True),
    "dpo on an adapter": ({"method": "dpo"}, {"adapter": LORA}, False),
    "orpo": ({"method": "orpo"}, {}, False),
    "grpo": ({"method": "grpo", "grpo": {"rewards": ["length"], "num_generations": 2}}, {}, False),
    "grpo with beta": (
        {"method": "grpo", "grpo": {"rewards": ["length"], "num_generations": 2, "beta": 0.1}},
        {},
        True,
    ),
    "rloo": ({"method": "rloo", "rloo": {"rewards": ["length"], "num_generations": 2}}, {}, True),
}


@pytest.mark.parametrize(("training", "more", "expected"), REFERENCES.values(), ids=REFERENCES)
def test_a_reference_is_the_start_model_once_more(
    training: dict[str, Any], more: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    found = items(recipe(training=training, model={"base": base(tmp_path)}, **more))
    assert ("reference" in found) == expected
    if expected:
        assert found["reference"] == found["trained weights"]


def test_a_teacher_is_counted_whole_in_its_own_type(tmp_path: Path) -> None:
    student, teacher = base(tmp_path / "student"), base(tmp_path / "teacher", hidden_size=64)
    alone = items(recipe(model={"base": teacher}))
    for dtype, share in ((None, 1), ("bfloat16", 2)):
        taught = {"method": "distillation", "distillation": {"teacher": {"base": teacher, "dtype": dtype}}}
        found = items(recipe(model={"base": student}, training=taught))
        assert found["teacher"] * share == alone["trained weights"]


def test_weights_in_four_bits(tmp_path: Path) -> None:
    few = {"base": base(tmp_path), "dtype": "bfloat16", "quantization": {"bits": 4, "double": False}}
    given = recipe(model=few, adapter=LORA, resources={"gpus": 1})
    found = items(given)
    linear = 3 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 96)
    rest = 2 * 400 * 32 + 7 * 32
    assert found["weights"] == math.floor(linear * (0.5 + 4 / 64) + rest * 2)
    assert found["trained weights"] == 2 * memory.estimate(given, memory.build_skeleton(given)).trainable


def test_autocast_keeps_copies_of_weights_in_fp32() -> None:
    assert "16-bit weights" in items(recipe(training={"precision": "bf16"}))
    assert "16-bit weights" not in items(recipe())
    assert "16-bit weights" not in items(recipe(training={"precision": "bf16"}, model={"dtype": "bfloat16"}))


def test_logits_in_full_where_the_loss_takes_them(tmp_path: Path) -> None:
    sizes = {"data": {"max_length": 4096}, "model": {"base": base(tmp_path, vocab_size=50_000)}}
    tiled, full = items(recipe(**sizes)), items(recipe(**sizes, training={"method": "orpo"}))
    assert full["logits"] == 2 * 4 * 4096 * 50_000 * 12
    assert tiled["logits"] < full["logits"] / 2
    assert "logits" not in items(recipe(**sizes, training={"method": "reward"}))


UNREADABLE = {
    "no such folder": (
        {"base": "/absent/model/here"},
        "the configuration of model '/absent/model/here' cannot be read",
    ),
    "no such object": ({"base": "file:///absent/model"}, "the configuration of model 'file:///absent/model' cannot"),
}


@pytest.mark.parametrize(("model", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_model_that_cannot_be_read(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="cannot be read") as caught:
        memory.build_skeleton(recipe(model=model))
    assert message in str(caught.value)


def test_the_configuration_is_all_that_is_read(tmp_path: Path) -> None:
    folder = base(tmp_path / "model")
    expected = shapes(memory.build_skeleton(recipe(model={"base": folder})))
    for weights in Path(folder).glob("*.safetensors"):
        weights.unlink()
    assert shapes(memory.build_skeleton(recipe(model={"base": folder}))) == expected
    assert shapes(memory.build_skeleton(recipe(model={"base": f"file://{folder}"}))) == expected
