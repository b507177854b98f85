"""What is said of what is not carried over, of chat templates, and of values that cannot be meant."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from baton.errors import UserError
from baton.importers import common
from baton.importers.draft import KeyResult

UNSUPPORTED = KeyResult.unsupported

Write = Callable[[str, str], Any]

BASE = {
    "axolotl": "base_model: org/model\nlearning_rate: 1e-4\n",
    "llamafactory": "model_name_or_path: org/model\ndataset_dir: llamafactory/data\n",
}
DATA = {
    "axolotl": "datasets:\n  - {path: org/d, type: alpaca}\n",
    "llamafactory": "dataset: house_rules\nstage: dpo\n",
}


def cases(tables: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> list[Any]:
    """Return a case for each row of each trainer's table."""
    return [
        pytest.param(tool, *row, id=f"{tool}-{name.splitlines()[-1]}")
        for tool, rows in tables.items()
        for name, row in rows.items()
    ]


SAID = {
    "axolotl": {
        "optimizer: muon": ("optimizer", "adamw_torch is used"),
        "lr_scheduler: rex": ("lr_scheduler", "linear is used"),
        "load_in_4bit: true": ("load_in_4bit", "weights in few bits cannot be trained"),
        "deepspeed: zero3.json": ("deepspeed", "set resources.gpus and training.parallel"),
        "generate_samples: true\ngeneration_top_k: 5": ("generation_top_k", "evaluation.temperature and top_p alone"),
        "do_causal_lm_eval: true\neval_causal_lm_metrics: [ter, chrf]": (
            "eval_causal_lm_metrics",
            "ter: Baton has none; functions of your own go into evaluation.functions",
        ),
        "do_causal_lm_eval: true": ("do_causal_lm_eval", "comet, ter: Baton has none"),
        "do_bench_eval: true": ("do_bench_eval", "evaluation.tasks: {names: [mmlu], few_shot: 0}"),
        "hub_model_id: mine": ("hub_model_id", "give export.hub.repo as organisation/name"),
        "hub_model_id: me/mine\nhub_strategy: checkpoint": ("hub_strategy", "pushed once, at the end"),
        "s2_attention: true": ("s2_attention", "attention is whole"),
        "early_stopping_patience: 2": ("early_stopping_patience", "training.early_stopping: {patience: 2}"),
        "rl: kto\ngroup_by_length: true": ("group_by_length", "kto takes rows in its own order"),
        "my_own_key: 7": ("my_own_key", "unknown: no setting of axolotl"),
        "adapter: lora\nunfrozen_parameters: [lm_head]": ("unfrozen_parameters", "adapter.modules_to_save"),
        "adapter: lora\npeft_init_lora_weights: pissa": ("peft_init_lora_weights", "adapter.init"),
        "special_tokens: {image_token: x}": ("special_tokens", "image_token: Baton knows bos_token"),
        "plugins: [axolotl.integrations.diffusion.DiffusionPlugin]": ("plugins", "Baton runs no plugins"),
        "processor_type: AutoProcessor": ("processor_type", "rows with pictures or sound are refused"),
        "shuffle_merged_datasets: false": ("shuffle_merged_datasets", "drawn from seed"),
    },
    "llamafactory": {
        "pref_loss: kto_pair": ("pref_loss", "sigmoid is used"),
        "dpo_label_smoothing: 0.1": ("dpo_label_smoothing", "loss: robust, label_smoothing: 0.1"),
        "packing: true": ("packing", "pairs are not packed"),
        "optim: came": ("optim", "adamw_torch is used"),
        "lr_scheduler_type: reduce_lr_on_plateau": ("lr_scheduler_type", "linear is used"),
        "quantization_bit: 3": ("quantization_bit", "4 and 8 bits"),
        "quantization_bit: 4\nquantization_method: hqq": ("quantization_method", "only bitsandbytes"),
        "save_steps: 0.1": ("save_steps", "a share of all steps"),
        "logging_steps: 0.1": ("logging_steps", "a share of all steps"),
        "save_strategy: best": ("save_strategy", "every chunk ends on a checkpoint"),
        "early_stopping_steps: 2": ("early_stopping_steps", "training.early_stopping: {patience: 2}"),
        "load_best_model_at_end: true": ("load_best_model_at_end", "export.checkpoint: best"),
        "dataset: absent": ("dataset", "'absent' is in no dataset_info.json"),
        "dataset: odd_chats": ("dataset_info.json: odd_chats", "messages from Klient: Baton knows human, gpt, system"),
        "dataset: keyed_chats": ("dataset_info.json: keyed_chats", "from and value, or role and content"),
        "dataset: pairs,chat_pairs": (
            "dataset_info.json: chat_pairs",
            "rows of preference as messages are not trained on",
        ),
        "eval_dataset: absent": ("eval_dataset", "'absent' is in no dataset_info.json"),
        "mix_strategy: interleave_over\ninterleave_probs: 0.3,0.7": ("mix_strategy", "give weight p·N/n"),
        "export_quantization_bit: 4": ("export_quantization_bit", "export.gguf.types"),
        "export_legacy_format: true": ("export_legacy_format", "weights are always safetensors"),
        "push_to_hub: true": ("push_to_hub", "without hub_model_id"),
        "export_hub_model_id: mine": ("export_hub_model_id", "organisation/name"),
        "num_beams: 4": ("num_beams", "evaluation.temperature and top_p alone"),
        "dataset: house_rules\nstage: sft\ntemplate: alpaca\ndefault_system: You are kind.": (
            "default_system",
            "without a chat template has no system message",
        ),
        "preserve_thinking: true": ("preserve_thinking", "what becomes of earlier thoughts"),
        "my_own_key: 7": ("my_own_key", "unknown: no setting of LLaMA-Factory"),
        "report_to: comet_ml": ("report_to", "comet_ml: Baton logs to MLflow"),
        "use_galore: true\ngalore_rank: 64": ("galore_rank", "does not have this optimizer"),
    },
}


@pytest.mark.parametrize(
    ("tool", "lines", "key", "text"),
    cases({tool: {lines: (lines, *said) for lines, said in table.items()} for tool, table in SAID.items()}),
)
def test_what_is_not_carried_over_is_said(tool: str, lines: str, key: str, text: str, written: Write):
    made = written(tool, f"{BASE[tool]}{DATA[tool]}{lines}\n")

    assert key in made.keys(KeyResult.unsupported)
    assert text in made.text(key)
    assert f"Not carried over: {key}" in made.yaml or f", {key}" in made.yaml


CHAT = "path: org/d, type: chat_template"
TEMPLATES: dict[str, dict[str, tuple[str, str | None, KeyResult | None, str]]] = {
    "axolotl": {
        "the same text": (f"chat_template: chatml\ndatasets: [{{{CHAT}}}]", "chatml", None, ""),
        "nearly the same": (f"chat_template: alpaca\ndatasets: [{{{CHAT}}}]", "alpaca", KeyResult.changed,
                            "no beginning of text"),
        "of the data set": (f"chat_template: gemma\ndatasets: [{{{CHAT}, chat_template: llama3}}]", "llama3",
                            KeyResult.not_needed, "another template is given, and decides"),
        "the tokenizer's": (f"chat_template: tokenizer_default\ndatasets: [{{{CHAT}}}]", None, None, ""),
        "one to fall back on": (f"chat_template: tokenizer_default_fallback_chatml\ndatasets: [{{{CHAT}}}]", None,
                                UNSUPPORTED, "where it has none, set model.chat_template: chatml"),
        "another": (f"chat_template: qwen_25\ndatasets: [{{{CHAT}}}]", None, KeyResult.unsupported,
                    "the tokenizer's own chat template"),
        "the model's": (f"base_model: Qwen/Qwen2.5-7B-Instruct\nchat_template: qwen_25\ndatasets: [{{{CHAT}}}]", None,
                        KeyResult.changed, "which has it, judging by the model's name"),
        "written out": (f"chat_template: gemma\ndatasets: [{{{CHAT}}}]", common.WRITTEN_OUT_TEMPLATES["gemma"], None,
                        ""),
        "of pairs by their type": ("rl: dpo\nchat_template: gemma\ndatasets: [{path: org/d, type: chatml.intel}]",
                                   "chatml", KeyResult.not_needed, "another template is given, and decides"),
        "texts": ("chat_template: llama3\ndatasets: [{path: org/d, type: alpaca}]", None, KeyResult.not_needed,
                  "instruction has no chat template"),
    },
    "llamafactory": {
        "chatml": ("dataset: chats\ntemplate: chatml", "chatml", KeyResult.changed,
                   "its marks are single tokens only where it has them"),
        "llama3": ("dataset: chats\ntemplate: llama3", "llama3", KeyResult.changed, "white space around a message"),
        "zephyr": ("dataset: chats\ntemplate: zephyr", None, UNSUPPORTED, "no line break after the end of a text"),
        "alpaca": ("dataset: chats\ntemplate: alpaca", None, UNSUPPORTED, "Stanford's preamble before conversations"),
        "qwen": ("dataset: chats\ntemplate: qwen", None, UNSUPPORTED, "the tokenizer's own chat template is used"),
        "default": ("dataset: house_rules\ntemplate: default", common.WRITTEN_OUT_TEMPLATES["default"], None, ""),
        "the model's": ("model_name_or_path: Qwen/Qwen3-8B\ndataset: chats\ntemplate: qwen3", None, KeyResult.changed,
                        "which has it, judging by the model's name"),
        "without thoughts": ("model_name_or_path: Qwen/Qwen3-8B\ndataset: chats\ntemplate: qwen3_nothink", "chatml",
                             KeyResult.changed, "the same text without tools"),
        "without thoughts, of a model without": (
            "model_name_or_path: Qwen/Qwen3-4B-Instruct-2507\ndataset: chats\ntemplate: qwen3_nothink", None,
            KeyResult.changed, "which has it, judging by the model's name"),
        "nothing": ("dataset: house_rules\ntemplate: empty", None, KeyResult.changed, "without anything between them"),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "lines", "template", "fate", "said"),
    cases(TEMPLATES),
)
def test_chat_template(tool: str, lines: str, template: str | None, fate: KeyResult | None, said: str, written: Write):
    made = written(tool, f"{BASE[tool]}{lines}\n")
    key = "chat_template" if tool == "axolotl" else "template"

    assert made.recipe.model.chat_template == template
    assert (key in made.draft.carried) == (fate is None)
    assert fate is None or key in made.keys(fate)
    assert said in made.text(key)


WRONG = {
    "axolotl": {
        "rl": ("rl: ppo", "rl is 'ppo', expected one of dpo, ipo, kto, orpo, simpo, grpo."),
        "adapter": ("adapter: llama-adapter", "expected lora or qlora, which Baton has."),
        "no rewards": ("rl: grpo", "trl.reward_funcs is None, expected functions as module.function."),
        "a reward without a module": (
            "rl: grpo\ntrl: {reward_funcs: [right]}",
            "expected functions as module.function.",
        ),
        "weights": (
            "rl: grpo\ntrl: {reward_funcs: [a.b], reward_weights: [1, 2]}",
            "a number for each of the 1 functions",
        ),
        "batch": ("micro_batch_size: 3\nbatch_size: 8", "batch_size is 8, expected a multiple of micro_batch_size 3."),
        "groups": ("lr_groups: [7]", "lr_groups is [7], expected groups of name, modules and lr."),
    },
    "llamafactory": {
        "not a number": ("learning_rate: fast", "train.yaml: learning_rate is 'fast', expected a number."),
        "not a whole number": ("lora_rank: 8.5", "lora_rank is 8.5, expected a whole number above 0."),
        "not a switch": ("bf16: perhaps", "bf16 is 'perhaps', expected true or false."),
        "ppo": ("stage: ppo", "Baton has no PPO. Take training.method grpo or rloo with a reward function"),
        "stage": ("stage: sftt", "stage is 'sftt', expected one of pt, sft, rm, kto, dpo."),
        "oft": ("finetuning_type: oft", "expected lora, freeze or full, which Baton has. Choose one of them."),
        "out of range": ("lora_dropout: 2", "adapter.dropout: Input should be less than 1"),
        "no layers": ("finetuning_type: freeze\nfreeze_trainable_layers: 0", "a number of layers other than 0"),
    },
}


@pytest.mark.parametrize(
    ("tool", "lines", "message"),
    cases(WRONG),
)
def test_what_cannot_be_meant_is_an_error(tool: str, lines: str, message: str, written: Write):
    with pytest.raises(UserError) as error:
        written(tool, f"{BASE[tool]}{DATA[tool]}{lines}\n")

    assert message in str(error.value)
