"""What other trainers say of conversations and of the tokenizer, and what a recipe says for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.importers import common
from baton.importers.draft import KeyResult

Write = Callable[[str, str], Any]

AXOLOTL = "base_model: Qwen/Qwen3-8B\nlearning_rate: 1e-4\n"
CHAT = "datasets:\n  - {path: org/d, type: chat_template%s}\n"
FACTORY = "model_name_or_path: Qwen/Qwen3-8B\ndataset_dir: llamafactory/data\n"

DATA: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "alpaca is text": ("axolotl", "datasets: [{path: org/d, type: alpaca}]", {"render_as": "text"}, "datasets[0].type"),
    "a prompt of one's own is text": (
        "axolotl",
        "datasets: [{path: org/d, type: {field_instruction: q, field_output: a}}]",
        {"render_as": "text", "separator": " "},
        "datasets[0].type.field_instruction",
    ),
    "pairs in a template": (
        "axolotl",
        "rl: dpo\ndatasets: [{path: org/d, type: chatml.intel}]",
        {"render_as": "chat"},
        "datasets[0].type",
    ),
    "rated answers in a template": (
        "axolotl",
        "rl: kto\ndatasets: [{path: org/d, type: llama3.ultra}]",
        {"render_as": "chat"},
        "datasets[0].type",
    ),
    "scores in the model's template": (
        "axolotl",
        "reward_model: true\ndatasets: [{path: org/d, type: bradley_terry.chat_template}]",
        {"render_as": "chat"},
        "datasets[0].type",
    ),
    "the assistant counts": (
        "axolotl",
        f"{CHAT % ''}train_on_inputs: false",
        {"train_on": "assistant"},
        "train_on_inputs",
    ),
    "everything counts": ("axolotl", f"{CHAT % ''}train_on_inputs: true", {"train_on": "all"}, "train_on_inputs"),
    "everything of a text counts": (
        "axolotl",
        "datasets: [{path: org/d, type: alpaca}]\ntrain_on_inputs: true",
        {"render_as": "text", "train_on": "all"},
        "train_on_inputs",
    ),
    "roles that count": (
        "axolotl",
        CHAT % ", roles_to_train: [assistant]",
        {"train_on": "assistant"},
        "datasets[0].roles_to_train",
    ),
    "ends that count": (
        "axolotl",
        CHAT % ", train_on_eos: turn",
        {"train_on": "assistant"},
        "datasets[0].train_on_eos",
    ),
    "ends of turns that count": (
        "axolotl",
        CHAT % ", train_on_eot: turn",
        {"train_on": "assistant"},
        "datasets[0].train_on_eot",
    ),
    "turns that say so": (
        "axolotl",
        CHAT % ", message_field_training: train",
        {"train_on": "assistant"},
        "datasets[0].message_field_training",
    ),
    "tools and system": (
        "axolotl",
        CHAT % ", field_tools: functions, field_system: rules",
        {"columns": {"tools": "functions", "system": "rules"}, "train_on": "assistant"},
        "datasets[0].field_tools",
    ),
    "thoughts": (
        "axolotl",
        CHAT % ", field_thinking: thinking",
        {"train_on": "assistant"},
        "datasets[0].field_thinking",
    ),
    "thoughts in the template": (
        "axolotl",
        CHAT % ", template_thinking_key: thinking",
        {"train_on": "assistant"},
        "datasets[0].template_thinking_key",
    ),
    "other parts of messages": (
        "axolotl",
        CHAT % ", message_property_mappings: {role: role, content: content, tool_calls: tool_calls}",
        {"train_on": "assistant"},
        "datasets[0].message_property_mappings.tool_calls",
    ),
    "a system message": (
        "axolotl",
        f"{CHAT % ''}default_system_message: Be kind.",
        {"system": "Be kind.", "train_on": "assistant"},
        "default_system_message",
    ),
    "rows of instructions in a template": (
        "llamafactory",
        "dataset: house_rules\ntemplate: llama3",
        {"render_as": "chat"},
        "template",
    ),
    "pairs of texts in a template": (
        "llamafactory",
        "stage: dpo\ndataset: pairs\ntemplate: llama3",
        {"render_as": "chat"},
        "template",
    ),
    "no template": ("llamafactory", "dataset: house_rules", {}, "dataset"),
    "nothing around": (
        "llamafactory",
        "dataset: house_rules\ntemplate: empty",
        {"render_as": "text", "separator": ""},
        "template",
    ),
    "a prompt that counts": (
        "llamafactory",
        "dataset: house_rules\ntemplate: llama3\ntrain_on_prompt: true",
        {"render_as": "chat", "train_on": "all"},
        "train_on_prompt",
    ),
    "the last turn counts": (
        "llamafactory",
        "dataset: chats\ntemplate: llama3\nmask_history: true",
        {"train_on": "last"},
        "mask_history",
    ),
    "a system message of one's own": (
        "llamafactory",
        "dataset: chats\ntemplate: qwen\ndefault_system: Be kind.",
        {"system": "Be kind.", "train_on": "assistant"},
        "default_system",
    ),
    "the template's system message": (
        "llamafactory",
        "dataset: chats\ntemplate: qwen",
        {"system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "train_on": "assistant"},
        "template",
    ),
    "thoughts left out": (
        "llamafactory",
        "dataset: chats\nenable_thinking: false",
        {"reasoning": "drop", "train_on": "assistant"},
        "enable_thinking",
    ),
    "thoughts kept": (
        "llamafactory",
        "dataset: chats\nenable_thinking: true",
        {"train_on": "assistant"},
        "enable_thinking",
    ),
}
"""Whose, lines, what of the rows' rendering differs from the defaults, and the key that says it."""

RENDERING = ("render_as", "system", "train_on", "reasoning", "separator")


@pytest.mark.parametrize(("tool", "lines", "expected", "key"), DATA.values(), ids=DATA)
def test_what_is_said_of_rows(tool: str, lines: str, expected: dict[str, Any], key: str, written: Write):
    made = written(tool, f"{AXOLOTL if tool == 'axolotl' else FACTORY}{lines}\n")
    data = made.recipe.data.model_dump(exclude_defaults=True)

    assert {name: data[name] for name in (*RENDERING, *expected) if name in data} == expected
    assert key not in made.keys(KeyResult.unsupported)


TOKENIZER: dict[str, tuple[str, str, dict[str, Any], set[str]]] = {
    "special tokens": (
        "axolotl",
        "special_tokens: {pad_token: <pad>, eos_token: <|im_end|>, bos_token: <s>, unk_token: }",
        {"special_tokens": {"pad_token": "<pad>", "eos_token": "<|im_end|>", "bos_token": "<s>"}},
        set(),
    ),
    "further special tokens": (
        "axolotl",
        "special_tokens: {additional_special_tokens: [<a>, <b>]}",
        {"special_tokens": {"additional_special_tokens": ["<a>", "<b>"]}},
        set(),
    ),
    "special tokens that say nothing": ("axolotl", "special_tokens: {pad_token: }", {}, set()),
    "tokens": ("axolotl", "tokens: [<a>, <b>]", {"add_tokens": ["<a>", "<b>"]}, set()),
    "tokens by their tasks": (
        "axolotl",
        "tokens: {bos_token: <s>}",
        {"special_tokens": {"bos_token": "<s>"}},
        set(),
    ),
    "tokens in reserve": (
        "axolotl",
        "added_tokens_overrides: {128041: <a>, 128042: <b>}",
        {"special_tokens": {"additional_special_tokens": ["<a>", "<b>"]}},
        {"added_tokens_overrides"},
    ),
    "the end of a turn": ("axolotl", "eot_tokens: [<end_of_turn>]", {"end_of_turn": "<end_of_turn>"}, set()),
    "ends of turns": ("axolotl", "eot_tokens: [<a>, <b>]", {"end_of_turn": "<a>"}, {"eot_tokens"}),
    "words": ("llamafactory", "add_tokens: <a>,<b>\nresize_vocab: true", {"add_tokens": ["<a>", "<b>"]}, set()),
    "special words": (
        "llamafactory",
        "add_special_tokens: <a>,<b>\ninit_special_tokens: noise_init",
        {"special_tokens": {"additional_special_tokens": ["<a>", "<b>"]}},
        set(),
    ),
}
"""Whose, lines, the tokenizer's settings, and keys that differ."""


@pytest.mark.parametrize(("tool", "lines", "expected", "changed"), TOKENIZER.values(), ids=TOKENIZER)
def test_what_is_said_of_the_tokenizer(
    tool: str, lines: str, expected: dict[str, Any], changed: set[str], written: Write
):
    rows = f"{AXOLOTL}{CHAT % ''}" if tool == "axolotl" else f"{FACTORY}dataset: chats\n"
    made = written(tool, f"{rows}{lines}\n")
    tokenizer = made.recipe.model.tokenizer

    assert (tokenizer.model_dump(exclude_defaults=True) if tokenizer else {}) == expected
    assert made.keys(KeyResult.unsupported) == set()
    assert changed <= made.keys(KeyResult.changed)


UNCARRIED = {
    "ends of the last turn": (CHAT % ", train_on_eos: last", "datasets[0].train_on_eos", "no other one"),
    "a part of a turn": (
        CHAT % ", message_field_training_detail: parts",
        "datasets[0].message_field_training_detail",
        "no part of a turn",
    ),
    "another name of thoughts": (CHAT % ", field_thinking: musing", "datasets[0].field_thinking", "reasoning_content"),
    "another name of what counts": (
        CHAT % ", message_field_training: counts",
        "datasets[0].message_field_training",
        "call it train",
    ),
    "tools of texts": (
        "datasets: [{path: org/d, type: alpaca, field_tools: tools}]",
        "datasets[0].field_tools",
        "only conversations",
    ),
}


@pytest.mark.parametrize(("lines", "key", "said"), UNCARRIED.values(), ids=UNCARRIED)
def test_what_is_not_carried_over(lines: str, key: str, said: str, written: Write):
    made = written("axolotl", f"{AXOLOTL}{lines}\n")

    assert key in made.keys(KeyResult.unsupported)
    assert said in made.text(key)


def test_rows_as_text_and_as_turns_are_not_mixed(written: Write):
    made = written("axolotl", f"{AXOLOTL}rl: dpo\ndatasets:\n  - {{path: org/a, type: chatml.intel}}\n"
                   "  - {path: org/b, type: {field_prompt: p, field_chosen: c, field_rejected: r}}\n")  # fmt: skip

    assert made.recipe.data.render_as == "chat"
    assert "as chat like the first data set" in made.text("datasets[1].type")


SAID = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TEXTS = {
    "gemma": "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "phi_3": "<s><|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n<|assistant|>\n",
    "falcon_h1": "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "deepseek_v2": "<s><｜User｜>Hi<｜Assistant｜>Hello</s><｜User｜>Bye<｜Assistant｜>",
    "llama2": "<s>[INST] Hi [/INST]Hello</s><s>[INST] Bye [/INST]",
    "default": "Human: Hi</s>\nAssistant:Hello</s>\nHuman: Bye</s>\nAssistant:",
}
"""What axolotl's template of that name writes, and LLaMA-Factory's llama2 and default."""


@pytest.mark.parametrize("name", common.WRITTEN_OUT_TEMPLATES)
def test_a_template_that_is_written_out_writes_the_same(name: str):
    written, _ = render_jinja_template(
        [SAID],
        chat_template=common.WRITTEN_OUT_TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )

    assert written == [TEXTS[name]]


def test_names_tell_whose_template_it_is():
    assert common.is_own_template("qwen3_5", "Qwen/Qwen3.5-9B")
    assert common.is_own_template("deepseek3", "/models/DeepSeek-V3.1")
    assert not common.is_own_template("gemma3", "Qwen/Qwen3-8B")
    assert not common.is_own_template("", "Qwen/Qwen3-8B")


def test_a_template_beside_the_file_is_not_taken_for_a_name(written: Write, folder: Path):
    (folder / "own.jinja").write_text("{{ messages }}", encoding="utf-8")
    made = written("axolotl", f"{AXOLOTL}{CHAT % ''}chat_template: jinja\nchat_template_jinja: own.jinja\n")

    assert made.recipe.model.chat_template == "own.jinja"
