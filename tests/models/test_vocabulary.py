"""Vocabularies as recipes change them: tokens, the rows made for them, and adapters that learn these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from baton.data import encoding, tokenize
from baton.errors import UserError
from baton.models import generate, loading, pinned, trained, vocabulary
from baton.recipe.model import Tokenizer
from baton.recipe.recipe import Recipe
from baton.source import prepare
from tests.support import tiny

ADDED: dict[str, Any] = {"add_tokens": ["value", " Think"]}
CHANGES: dict[str, Any] = {**ADDED, "special_tokens": {"bos_token": "<s>"}, "end_of_turn": "<|im_end|>"}
NEW = ["value", " Think", "<s>"]
ROWS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in tiny.PAIRS]
LORA = {"r": 4, "target_modules": "all-linear"}


@pytest.fixture(scope="module", params=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base of 300 rows, whose output has a weight of its own or shares the embedding's."""
    return tiny.make_base(tmp_path_factory.mktemp(request.param) / "base", tied=request.param == "tied")


def changed(base: str, changes: dict[str, Any], **sections: Any) -> Recipe:
    return tiny.recipe(base, **{**sections, "model": {"base": base, "tokenizer": changes}})


def saved(recipe: Recipe, folder: Path) -> Any:
    """Returns the recipe's tokenizer as the stages after the first get it: from its files."""
    loading.build_tokenizer(recipe, recipe.model.base).save_pretrained(folder)
    return loading.load_tokenizer(str(folder))


def train(recipe: Recipe, folder: Path, rows: list[tiny.Row] = ROWS) -> Any:
    """Trains as a chunk does and saves what a checkpoint has of the model."""
    trainer = tiny.trainer(recipe, tiny.tokens(recipe, rows), folder)
    trainer.train()
    trainer.save_model(str(folder / "checkpoint"))
    return trainer


def logits(model: Any, count: int = 303) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(torch.arange(count)[None]).logits
    return found


def test_tokens_are_added_once_and_kept_with_the_files(tiny_base: str, tmp_path: Path) -> None:
    changes = {**CHANGES, "add_tokens": ["value", " Think", "<|im_end|>", "value"], "pad": "<|pad|>"}
    tokenizer = saved(changed(tiny_base, changes), tmp_path)
    assert tokenizer.convert_tokens_to_ids(NEW) == vocabulary.new_ids(tokenizer) == [300, 301, 302]
    assert tokenizer.tokenize("What? Thinkvalue<s>")[-3:] == [" Think", "value", "<s>"]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "<|end|>", "<|pad|>")
    assert vocabulary.end_of_turn(tokenizer) == tokenizer.convert_tokens_to_ids("<|im_end|>") == 3
    assert tokenizer.decode([300, 302, 3], skip_special_tokens=True) == "value"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["new_tokens"] == NEW


def test_special_tokens_of_all_kinds(tiny_base: str, tmp_path: Path) -> None:
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "additional_special_tokens": ["<tool>", "<|im_start|>"]}
    tokenizer = saved(changed(tiny_base, {"special_tokens": special}), tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (300, 301)
    assert vocabulary.new_ids(tokenizer) == [300, 301, 302]
    assert tokenizer.decode([301, 302, 2], skip_special_tokens=True) == ""
    model = loading.start_model(changed(tiny_base, {"special_tokens": special}), tokenizer, tiny_base)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (300, 301)
    assert model.generation_config.eos_token_id == [300, 0]


@pytest.mark.parametrize("name", ["eos", "pad", "end_of_turn"])
def test_a_token_that_is_not_there_has_no_task(name: str, tiny_base: str) -> None:
    recipe = changed(tiny_base, {name: "<|im_ende|>"})
    with pytest.raises(UserError, match=rf"{name}: '<\|im_ende\|>' is not in the vocabulary. Did you mean '<\|im"):
        prepare.check_model(recipe)
    tokenizer = loading.build_tokenizer(
        changed(tiny_base, {name: "<|im_ende|>", "add_tokens": ["<|im_ende|>"]}), tiny_base
    )
    assert vocabulary.new_ids(tokenizer) == [300]


def test_a_text_begins_with_the_new_token_where_it_began_with_the_old(tiny_base: str, tmp_path: Path) -> None:
    loading.load_model(tiny_base).save_pretrained(tmp_path)
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.add_bos_token = True
    tokenizer.save_pretrained(tmp_path)
    tokenizer = saved(changed(str(tmp_path), {"special_tokens": {"bos_token": "<s>"}}), tmp_path / "own")
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == 300
    tokenizer = saved(changed(str(tmp_path), ADDED), tmp_path / "own")
    assert tokenizer("a")["input_ids"][0] == 2
    tokenizer = saved(changed(tiny_base, {"special_tokens": {"bos_token": "<s>"}}), tmp_path / "own")
    assert len(tokenizer("a")["input_ids"]) == 1


def test_rows_are_the_mean_of_the_old_ones_in_any_process(base: str, tmp_path: Path) -> None:
    recipe = changed(base, CHANGES)
    tokenizer, before = saved(recipe, tmp_path), loading.load_model(base)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = loading.start_model(recipe, tokenizer, base)
        torch.set_num_threads(3)
        other = loading.start_model(recipe, tokenizer, base)
    finally:
        torch.set_num_threads(threads)
    ends = [one.get_input_embeddings(), one.get_output_embeddings()]
    assert (ends[0].weight is ends[1].weight) == before.config.tie_word_embeddings
    for grown, old in zip(ends, (before.get_input_embeddings(), before.get_output_embeddings()), strict=True):
        assert torch.equal(grown.weight[:300], old.weight)
        torch.testing.assert_close(grown.weight[300:], old.weight.mean(0).expand(3, -1))
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert one.config.vocab_size == 303
    assert one.generation_config.eos_token_id == [0, 3]
    assert generate.stop_ids(one, tokenizer) == [0, 3]


def test_spare_rows_are_used_first(tmp_path: Path) -> None:
    base = tiny.make_base(tmp_path / "base", spare=2)
    before = loading.load_model(base).get_input_embeddings().weight.detach()
    for add, rows in ((["value"], 302), (["value", " Think", "<s>"], 303)):
        recipe = changed(base, {"add_tokens": add})
        tokenizer = saved(recipe, tmp_path / "own")
        weight = loading.start_model(recipe, tokenizer, base).get_input_embeddings().weight
        assert weight.shape[0] == loading.vocabulary_size(recipe, tokenizer, base) == rows
        torch.testing.assert_close(weight[300 : 300 + len(add)], before[:300].mean(0).expand(len(add), -1))
        assert torch.equal(weight[300 + len(add) : 302], before[300 + len(add) : 302]), "of no token still"


def test_what_an_earlier_run_added_is_not_new(tiny_base: str, tmp_path: Path) -> None:
    recipe = changed(tiny_base, CHANGES)
    tokenizer = saved(recipe, tmp_path)
    loading.start_model(recipe, tokenizer, tiny_base).save_pretrained(tmp_path)
    for changes in (CHANGES, {"pad": "<|pad|>"}):
        assert vocabulary.new_ids(loading.build_tokenizer(changed(str(tmp_path), changes), str(tmp_path))) == []
    assert vocabulary.new_ids(loading.build_tokenizer(tiny.recipe(str(tmp_path)), str(tmp_path))) == []


def test_another_models_larger_tokenizer_gets_its_rows(tiny_base: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in tiny.PAIRS), encoding="utf-8")
    spec = Tokenizer.model_validate({"train": {"vocab_size": 320}}).train
    assert spec
    other = encoding.train_bpe(str(text), spec, 64)
    other.save_pretrained(tmp_path / "other")
    tokenizer = loading.build_tokenizer(changed(tiny_base, {"base": str(tmp_path / "other"), **ADDED}), tiny_base)
    assert vocabulary.new_ids(tokenizer) == [*range(300, len(other) + 2)]


SAVED = {
    "rows": ({}, (True, True)),
    "input in full": ({"modules_to_save": ["embed_tokens"]}, (False, True)),
    "output in full": ({"modules_to_save": ["lm_head"]}, (True, False)),
    "both in full": ({"modules_to_save": ["embed_tokens", "lm_head"]}, (False, False)),
}


@pytest.mark.parametrize("case", SAVED)
def test_an_adapter_learns_the_rows_and_carries_them(case: str, base: str, tmp_path: Path) -> None:
    more, by_row = SAVED[case]
    recipe = changed(base, CHANGES, adapter={**LORA, **more})
    trainer = train(recipe, tmp_path)
    checkpoint, asked = tmp_path / "checkpoint", logits(trainer.model)
    tokenizer, start = loading.load_tokenizer(str(checkpoint)), loading.load_model(base)
    tied = start.config.tie_word_embeddings
    indices = json.loads((checkpoint / "adapter_config.json").read_text())["trainable_token_indices"] or {}
    expected = [name for name, rows in zip(("model.embed_tokens", "lm_head"), by_row, strict=True) if rows]
    if tied:
        expected = ["model.embed_tokens"] if all(by_row) else []
    assert indices == {name: [300, 301, 302] for name in expected}
    if case == "rows":
        assert not [
            name for name, value in load_file(checkpoint / "adapter_model.safetensors").items() if 303 in value.shape
        ]

    again = trained.trained_model(recipe, tokenizer, str(checkpoint))
    assert torch.equal(logits(again), asked)
    served, _ = generate.load(str(checkpoint))
    assert torch.equal(logits(served), asked)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(checkpoint)), asked), "without Baton"
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    alone = loading.load_model(str(tmp_path / "merged"))
    torch.testing.assert_close(logits(alone), asked, rtol=1e-4, atol=1e-5)
    assert (alone.get_input_embeddings().weight is alone.get_output_embeddings().weight) == tied
    assert alone.generation_config.eos_token_id == [0, 3]
    for end, old in ((alone.get_input_embeddings(), start.get_input_embeddings()), (alone.lm_head, start.lm_head)):
        assert not torch.allclose(end.weight[300], old.weight.mean(0), atol=1e-4), "learned"


def test_all_weights_learn_and_come_back(base: str, tmp_path: Path) -> None:
    recipe = changed(base, CHANGES)
    trainer = train(recipe, tmp_path)
    checkpoint = str(tmp_path / "checkpoint")
    loaded = trained.trained_model(recipe, loading.load_tokenizer(checkpoint), checkpoint)
    assert torch.equal(logits(loaded), logits(trainer.model))
    assert loaded.generation_config.eos_token_id == [0, 3]
    assert torch.equal(logits(generate.load(checkpoint)[0]), logits(trainer.model))


def test_a_new_filler_may_stay_as_it_was_made(tiny_base: str, tmp_path: Path) -> None:
    recipe = changed(
        tiny_base, {"special_tokens": {"pad_token": "<pad>"}}, training={"trainable": {"patterns": ["q_proj"]}}
    )
    trainer = train(recipe, tmp_path)
    checkpoint = str(tmp_path / "checkpoint")
    tokenizer = loading.load_tokenizer(checkpoint)
    assert tokenizer.pad_token_id == 300
    assert torch.equal(logits(trained.trained_model(recipe, tokenizer, checkpoint), 301), logits(trainer.model, 301))


def test_an_architecture_of_other_names(tmp_path: Path, tiny_base: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=320, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    loading.load_tokenizer(tiny_base).save_pretrained(tmp_path / "base")
    recipe = changed(str(tmp_path / "base"), ADDED, adapter={"r": 2})
    trainer = train(recipe, tmp_path)
    checkpoint = str(tmp_path / "checkpoint")
    again = trained.trained_model(recipe, loading.load_tokenizer(checkpoint), checkpoint)
    assert torch.equal(logits(again, 302), logits(trainer.model, 302))


def test_a_reference_is_the_base_with_the_same_rows(base: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"training": {"method": "dpo"}}
    recipe = changed(base, ADDED, adapter=LORA, **sections)
    trainer = train(recipe, tmp_path / "adapter", tiny.PAIRS)
    start = loading.start_model(recipe, loading.build_tokenizer(recipe, base), base)
    with trainer.model.disable_adapter():
        assert torch.equal(logits(trainer.model, 302), logits(start, 302))
    assert not torch.equal(logits(trainer.model, 302), logits(start, 302))
    full = train(changed(base, ADDED, **sections), tmp_path / "full", tiny.PAIRS)
    assert torch.equal(logits(full.ref_model, 302), logits(start, 302))
    assert tiny.losses(full)[0] == pytest.approx(0.6931, abs=1e-4), "the two are the same at the start"


def test_a_reward_model_has_rows_at_its_input_alone(base: str, tmp_path: Path) -> None:
    recipe = changed(base, ADDED, adapter=LORA, training={"method": "reward"})
    trainer = train(recipe, tmp_path, tiny.PAIRS)
    checkpoint = str(tmp_path / "checkpoint")
    again = trained.trained_model(recipe, loading.load_tokenizer(checkpoint), checkpoint)
    assert torch.equal(logits(again, 302), logits(trainer.model, 302))
    config = json.loads((tmp_path / "checkpoint/adapter_config.json").read_text())
    assert config["trainable_token_indices"] == {"model.embed_tokens": [300, 301]}


def test_a_teacher_needs_the_new_tokens_too(tiny_base: str, tmp_path: Path) -> None:
    changes = changed(tiny_base, ADDED)
    saved(changes, tmp_path)
    loading.start_model(changes, loading.load_tokenizer(str(tmp_path)), tiny_base).save_pretrained(tmp_path)
    for teacher, wrong in ((tiny_base, "300 tokens, and the model that is trained one of 302"), (str(tmp_path), None)):
        method = {"method": "distillation", "distillation": {"teacher": {"base": teacher}}}
        recipe = changed(tiny_base, ADDED, training=method)
        folders = {"base": tiny_base, "teacher": teacher}
        if wrong:
            with pytest.raises(UserError, match=wrong):
                pinned.check_second_model(recipe, folders)
        else:
            pinned.check_second_model(recipe, folders)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapter": {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}}, "embed_tokens has rows of new tokens"),
        ({"adapter": {"r": 2, "target_modules": ".*(embed_tokens|q_proj)"}}, "embed_tokens has rows of new tokens"),
        ({"training": {"trainable": {"last_layers": 1}}}, "embed_tokens, lm_head would be frozen, and 2 new tokens"),
    ],
)
def test_rows_that_would_not_be_learned_are_refused(sections: Any, words: str, base: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(changed(base, ADDED, **sections), tmp_path)


def test_an_adapter_in_shards_is_refused_before_training(tiny_base: str) -> None:
    shards = {"training": {"parallel": {"strategy": "fsdp", "processes": 2}, "micro_batch_size": 4}}
    with pytest.raises(UserError, match=r"new tokens exclude training\.parallel\.strategy fsdp"):
        prepare.check_model(changed(tiny_base, ADDED, adapter=LORA, **shards))
    prepare.check_model(changed(tiny_base, ADDED, **shards))
    whole = {**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}
    prepare.check_model(changed(tiny_base, ADDED, adapter=whole, **shards))


def test_recipes_without_changes_keep_their_digests(tiny_base: str) -> None:
    trained_here = Tokenizer.model_validate({"train": {"vocab_size": 300}})
    assert trained_here.model_dump() == {"train": {"vocab_size": 300, "min_frequency": 2}, "base": None}
    plain, other = changed(tiny_base, {"base": tiny_base}), changed(tiny_base, {"base": tiny_base, **ADDED})
    assert plain.model_dump(mode="json")["model"]["tokenizer"] == {"train": None, "base": tiny_base}
    digests = {tokenize.tokens_digest(recipe, "s", "b", "o") for recipe in (plain, other)}
    assert len(digests) == 2


def test_a_tokenizer_of_its_own_takes_tokens_too(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(row) + "\n" for row in tiny.PAIRS), encoding="utf-8")
    scratch = {"architecture": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"base": None, "from_scratch": scratch, "tokenizer": {"train": {"vocab_size": 300}, **CHANGES}}
    recipe = tiny.recipe("", model=model)
    tokenizer = encoding.run_tokenizer(recipe, None, str(text))
    assert tokenizer.convert_tokens_to_ids(NEW) == [300, 301, 302]
    assert vocabulary.new_ids(tokenizer) == [], "no row was learned before"
    started = loading.start_model(recipe, tokenizer, None)
    assert started.config.vocab_size == 303
    assert generate.stop_ids(started, tokenizer) == [0, 3]
