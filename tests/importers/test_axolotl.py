"""axolotl's files: what each setting becomes, and what is said of the others."""

from collections.abc import Callable
from typing import Any

import pytest

from baton.importers.draft import KeyResult

Make = Callable[[str], Any]
Write = Callable[[str, str], Any]


def test_qlora_on_alpaca_rows(imported: Make):
    made = imported("axolotl/qlora.yml")

    assert made.recipe.model_dump(mode="json", exclude_defaults=True) == {
        "name": "qlora",
        "model": {
            "base": "NousResearch/Llama-3.2-1B",
            "tokenizer": {"special_tokens": {"pad_token": "<|end_of_text|>"}},
            "dtype": "bfloat16",
            "quantization": {},
            "attention": "flash_attention_2",
        },
        "data": {
            "source": ["hf://datasets/acme/instructions"],
            "format": "instruction",
            "quality": {"truncation": "fix"},
            "render_as": "text",
            "max_length": 2048,
            "packing": "best-fit",
        },
        "adapter": {
            "r": 32,
            "alpha": 16,
            "dropout": 0.05,
            "target_modules": "all-linear",
            "modules_to_save": ["embed_tokens", "lm_head"],
        },
        "training": {
            "micro_batch_size": 2,
            "epochs": 1.0,
            "learning_rate": 2e-4,
            "lr_scheduler": "cosine",
            "warmup_steps": 0.1,
            "optimizer": "adamw_bnb_8bit",
            "precision": "bf16",
            "gradient_checkpointing": True,
        },
        "chunks": {"checkpoints_per_epoch": 1},
        "evaluation": {"per_epoch": 4},
        "resources": {"gpus": 1},
        "tracking": {"wandb": "tiny-llama"},
    }
    assert (made.recipe.training.batch_size, made.recipe.model.quantization.bits) == (8, 4)
    assert made.keys(KeyResult.unsupported) == {
        "loss_watchdog_threshold",
        "loss_watchdog_patience",
        "datasets[0].split",
    }
    assert made.keys(KeyResult.elsewhere) == {"output_dir"}
    assert made.keys(KeyResult.changed) == {"bf16"}


def test_full_fine_tuning_on_conversations(imported: Make):
    made = imported("axolotl/full_chat.yaml")
    recipe = made.recipe

    assert recipe.adapter is None
    assert recipe.model.model_dump(exclude_defaults=True) == {
        "base": "Qwen/Qwen3-8B",
        "dtype": "bfloat16",
        "attention": "flash_attention_2",
    }
    assert recipe.data.model_dump(exclude_defaults=True) == {
        "source": ["hf://datasets/acme/chats@v2?config=en"],
        "format": "messages",
        "columns": {"messages": "conversations"},
        "split": {"eval": 0.02},
        "quality": {"truncation": "fix"},
        "max_length": 4096,
        "packing": "best-fit",
        "train_on": "assistant",
    }
    assert recipe.training.model_dump(mode="json", exclude_defaults=True) == {
        "micro_batch_size": 2,
        "max_steps": 500,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_scheduler_options": {"min_lr_rate": 0.1},
        "warmup_steps": 100,
        "weight_decay": 0.01,
        "groups": [{"pattern": "embed_tokens|lm_head", "learning_rate": 2e-6}],
        "optimizer": "adamw_torch_fused",
        "adam_betas": [0.9, 0.95],
        "precision": "bf16",
        "tf32": True,
        "gradient_checkpointing": True,
        "activation_offloading": True,
        "liger": True,
        "trainable": {
            "patterns": [
                "^lm_head.weight$",
                "^model.embed_tokens.weight$",
                "^model.layers.2[0-9]+.block_sparse_moe.gate",
            ]
        },
        "early_stopping": {},
    }
    assert recipe.training.learning_rate == 2e-5
    assert (recipe.chunks.checkpoint_every, recipe.chunks.keep.last, recipe.evaluation.every) == (50, 3, 50)
    assert recipe.export.checkpoint == "best"
    assert made.keys(KeyResult.unsupported) >= {"fsdp", "fsdp_config"}
    assert made.draft.carried["tf32"] == "training.tf32"
    assert made.draft.carried["plugins"] == "training.liger"


def test_dpo(imported: Make):
    made = imported("axolotl/dpo.yml")
    recipe = made.recipe

    assert recipe.training.dpo.model_dump(exclude_defaults=True) == {
        "beta": 0.3,
        "loss": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.5],
    }
    assert recipe.data.source == ["hf://datasets/acme/orca-pairs", "hf://datasets/acme/more-pairs"]
    assert (recipe.data.format, recipe.data.columns) == ("preference", {"prompt": "question"})
    assert (recipe.model.quantization.bits, recipe.model.chat_template) == (8, "llama3")
    assert recipe.model.attention == "sdpa"
    assert recipe.adapter.target_modules == ["q_proj", "v_proj"]
    assert recipe.training.optimizer == "paged_adamw_8bit"
    assert recipe.data.render_as == "chat"
    assert made.draft.carried["chat_template"] == "model.chat_template"
    assert recipe.model.tokenizer.special_tokens.named == {"pad_token": "<|finetune_right_pad_id|>"}


def test_gradient_checkpointing_that_is_off(written: Write):
    made = written("axolotl", f"{BASE}{DATA}gradient_checkpointing: false\n")

    assert made.draft.document["training"]["gradient_checkpointing"] is False
    assert made.draft.carried["gradient_checkpointing"] == "training.gradient_checkpointing"


def test_kto(imported: Make):
    made = imported("axolotl/kto.yaml")

    assert made.recipe.training.kto.model_dump(exclude_defaults=True) == {"beta": 0.5, "desirable_weight": 0.2}
    assert (made.recipe.training.batch_size, made.recipe.training.micro_batch_size) == (3, 3)
    assert (made.recipe.training.precision, made.recipe.model.dtype) == ("fp16", "float16")


def test_grpo(imported: Make):
    made = imported("axolotl/grpo.yaml")
    recipe = made.recipe

    assert [(x.use, x.weight) for x in recipe.training.grpo.rewards] == [
        ("judges:is_right", 1),
        ("judges:is_short", 0.5),
    ]
    assert (recipe.training.grpo.beta, recipe.training.grpo.num_generations) == (0.001, 4)
    assert (recipe.training.batch_size, recipe.training.micro_batch_size) == (4, 2)
    assert recipe.hooks.source == "judges.py"
    assert made.keys(KeyResult.unsupported) == {"datasets[0].type", "trl.use_vllm"}


def test_pretraining(imported: Make):
    made = imported("axolotl/pretrain.yaml")

    assert made.recipe.training.method == "pretrain"
    assert made.recipe.data.source == ["hf://datasets/acme/web?config=en"]
    assert (made.recipe.data.columns, made.recipe.data.packing) == ({"text": "body"}, True)
    assert made.keys(KeyResult.unsupported) == set()


BASE = "base_model: org/model\nlearning_rate: 1e-4\n"
SHAPES = {
    "alpaca": ("path: org/d\n    type: alpaca", "instruction", {}),
    "completion": ("path: org/d\n    type: completion\n    field: body", "text", {"text": "body"}),
    "chat": ("path: org/d\n    type: chat_template\n    field_messages: talk", "messages", {"messages": "talk"}),
    "sharegpt": ("path: org/d\n    type: sharegpt", "sharegpt", {}),
    "sharegpt, another column": (
        "path: org/d\n    type: sharegpt\n    field_messages: talk",
        "sharegpt",
        {"conversations": "talk"},
    ),
    "from and value": (
        "path: org/d\n    type: chat_template\n    message_property_mappings: {role: from, content: value}",
        "sharegpt",
        {"conversations": "messages"},
    ),
    "from and value by the earlier keys": (
        "path: org/d\n    type: chat_template\n    message_field_role: from\n    message_field_content: value\n"
        "    field_messages: conversations",
        "sharegpt",
        {},
    ),
    "own with input": (
        "path: org/d\n    type: {field_instruction: q, field_input: more, field_output: a}",
        "prompt-completion",
        {"prompt": ["q", "more"], "completion": "a"},
    ),
    "own": (
        "path: org/d\n    type: {field_instruction: q, field_output: a}",
        "prompt-completion",
        {"prompt": "q", "completion": "a"},
    ),
    "unknown": ("path: org/d\n    type: gpteacher", "auto", {}),
}


@pytest.mark.parametrize(("entry", "shape", "columns"), SHAPES.values(), ids=SHAPES)
def test_shape_of_rows(entry: str, shape: str, columns: dict[str, str], written: Write):
    made = written("axolotl", f"{BASE}datasets:\n  - {entry}\n")

    assert (made.recipe.data.format, made.recipe.data.columns) == (shape, columns)
    assert made.recipe.data.source == ["hf://datasets/org/d"]


PAIRS = {
    "dpo intel": ("dpo", "chatml.intel", {"prompt": "question"}),
    "dpo icr": ("dpo", "llama3.icr", {"prompt": "input"}),
    "dpo messages": ("dpo", "chat_template.default", {"prompt": "messages"}),
    "orpo": ("orpo", "chat_template.argilla_chat", {}),
    "kto argilla": ("kto", "chatml.argilla", {"prompt": "instruction"}),
    "simpo own": ("simpo", "{field_prompt: q, field_chosen: good, field_rejected: bad}",
                  {"prompt": "q", "chosen": "good", "rejected": "bad"}),
}  # fmt: skip


@pytest.mark.parametrize(("rl", "kind", "columns"), PAIRS.values(), ids=PAIRS)
def test_shape_of_pairs(rl: str, kind: str, columns: dict[str, str], written: Write):
    made = written("axolotl", f"{BASE}rl: {rl}\nmicro_batch_size: 2\ndatasets:\n  - path: org/d\n    type: {kind}\n")

    assert made.recipe.data.columns == columns


def test_reward_model(written: Write):
    lines = f"{BASE}reward_model: true\ndatasets:\n  - {{path: org/d, type: bradley_terry.chat_template}}\n"
    recipe = written("axolotl", lines).recipe

    assert (recipe.training.method, recipe.data.format) == ("reward", "preference")
    assert recipe.data.columns == {"prompt": "input"}


def test_files(written: Write, folder: Any):
    (folder / "rows").mkdir()
    (folder / "rows/a.jsonl").touch()
    made = written(
        "axolotl",
        f"{BASE}datasets:\n  - {{path: rows/a.jsonl, ds_type: json, type: alpaca}}\n"
        "  - {path: json, data_files: [rows/a.jsonl], type: alpaca}\n"
        "  - {path: s3://bucket/rows, type: alpaca}\n  - {path: org/d, data_files: b.jsonl, type: alpaca}\n",
    )

    assert made.recipe.data.source == [
        "rows/a.jsonl",
        "rows/a.jsonl",
        "s3://bucket/rows",
        "hf://datasets/org/d/b.jsonl",
    ]


DATA = "datasets:\n  - {path: org/d, type: alpaca}\n"


CHAT = "path: org/d, type: chat_template"


def test_a_chat_template_of_ones_own(written: Write, folder: Any):
    (folder / "mine.jinja").write_text("{% for message in messages %}…{% endfor %}", encoding="utf-8")
    (folder / "mine.txt").write_text("{{ messages }}\n{{ eos_token }}", encoding="utf-8")
    for given, expected in {
        "mine.jinja": "mine.jinja",
        "mine.txt": "{{ messages }}\n{{ eos_token }}",
        "'{{ messages }}'": "{{ messages }}",
    }.items():
        lines = f"{BASE}chat_template: jinja\nchat_template_jinja: {given}\ndatasets: [{{{CHAT}}}]\n"
        made = written("axolotl", lines)
        assert made.recipe.model.chat_template == expected
        assert made.draft.carried["chat_template"] == made.draft.carried["chat_template_jinja"] == "model.chat_template"

    made = written("axolotl", f"{BASE}chat_template_jinja: absent.txt\ndatasets: [{{{CHAT}}}]\n")
    assert made.recipe.model.chat_template is None
    assert "neither a template nor a file" in made.text("chat_template_jinja")


def test_a_template_of_several_lines_is_written_as_it_is(written: Write):
    lines = "chat_template_jinja: |\n  {% for message in messages %}\n  {{ message.content }}{% endfor %}\n"
    made = written("axolotl", f"{BASE}{lines}datasets: [{{{CHAT}}}]\n")

    assert "  chat_template: |\n    {% for message in messages %}\n    {{ message.content }}{% endfor %}\n" in made.yaml


def test_a_conversation_style_by_name(written: Write):
    made = written("axolotl", f"{BASE}datasets: [{{path: org/d, type: sharegpt, conversation: chatml}}]\n")

    assert (made.recipe.data.format, made.recipe.model.chat_template) == ("sharegpt", "chatml")
    assert "without the system message that axolotl puts" in made.text("datasets[0].conversation")


ROLES = {
    "{user: [human, user], assistant: [gpt]}": ({"user", "assistant"}, set()),
    "{user: [Klient], system: [system]}": ({"system"}, {"user"}),
}


@pytest.mark.parametrize(("roles", "expected"), ROLES.items(), ids=ROLES)
def test_roles(roles: str, expected: tuple[set[str], set[str]], written: Write):
    made = written("axolotl", f"{BASE}datasets:\n  - {{{CHAT}, roles: {roles}, roles_to_train: [gpt]}}\n")
    carried, left = expected

    assert {key.rpartition(".")[2] for key in made.draft.carried if ".roles." in key} == carried
    assert {key.rpartition(".")[2] for key in made.keys(KeyResult.unsupported) if ".roles." in key} == left
    assert made.draft.carried["datasets[0].roles_to_train"] == "data.train_on"


def test_data_sets_of_several_shapes(written: Write):
    made = written(
        "axolotl",
        f"{BASE}datasets:\n  - {{path: org/a, type: sharegpt}}\n  - {{path: org/b, type: chat_template, shards: 4}}\n"
        "  - {path: org/c, type: alpaca}\n",
    )

    assert made.recipe.data.format == "auto"
    assert [source.model_dump(exclude_defaults=True) for source in made.recipe.data.sources] == [
        {"uri": "hf://datasets/org/a", "format": "sharegpt"},
        {"uri": "hf://datasets/org/b", "weight": 0.25, "format": "messages"},
        {"uri": "hf://datasets/org/c", "format": "instruction"},
    ]
    assert "not trained on together with conversations" in made.text("datasets[2].type")
    assert "1/4 of the training rows" in made.text("datasets[1].shards")
    assert "datasets[1].type" not in made.keys(KeyResult.unsupported)


def test_rows_held_out_that_are_given(written: Write):
    made = written(
        "axolotl", f"{BASE}{DATA}test_datasets:\n  - {{path: org/t, type: alpaca}}\n  - {{path: org/d, split: dev}}\n"
    )

    assert [source.model_dump(exclude_defaults=True) for source in made.recipe.data.sources] == [
        {"uri": "hf://datasets/org/d", "format": "instruction", "side": "train"},
        {"uri": "hf://datasets/org/t?split=test", "format": "instruction", "side": "eval"},
        {"uri": "hf://datasets/org/d?split=dev", "format": "auto", "side": "eval"},
    ]
    assert made.recipe.data.split.model_dump(exclude_defaults=True) == {}


PROMPTS = {
    "their own": ("field_input: more", ["q", "more"], " ", " "),
    "joined": ('field_input: more, format: "{instruction}\\n{input}\\n"', ["q", "more"], "\n", "\n"),
    "without an input": ('no_input_format: "{instruction} ->"', "q", "\n\n", " ->"),
    "another": ('field_input: more, format: "Q: {instruction} {input} A:"', ["q", "more"], "\n\n", "\n"),
}


@pytest.mark.parametrize(("kind", "prompt", "join", "separator"), PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_of_ones_own(kind: str, prompt: Any, join: str, separator: str, written: Write):
    made = written("axolotl", f"{BASE}datasets:\n  - {{path: org/d, type: {{field_instruction: q, {kind}}}}}\n")

    assert made.recipe.data.columns == {"prompt": prompt}
    assert (made.recipe.data.join, made.recipe.data.separator) == (join, separator)
    assert ("datasets[0].type.format" in made.keys(KeyResult.unsupported)) == ("Q:" in kind)


LONG = {
    "": ("fix", 0.05),
    "excess_length_strategy: drop": ("fix", 0.05),
    "excess_length_strategy: truncate": ("warn", 0.05),
    "excess_length_strategy: raise": ("fail", 0.0),
}


@pytest.mark.parametrize(("lines", "expected"), LONG.items(), ids=LONG)
def test_rows_that_are_too_long(lines: str, expected: tuple[str, float], written: Write):
    quality = written("axolotl", f"{BASE}{DATA}{lines}\n").recipe.data.quality

    assert (quality.truncation, quality.truncated_share) == expected


def test_how_the_result_is_judged(written: Write):
    made = written(
        "axolotl",
        f"{BASE}{DATA}dataset_exact_deduplication: true\neval_steps: 50\n"
        "generate_samples: true\nnum_generation_samples: 5\ngeneration_max_new_tokens: 80\n"
        "generation_temperature: 0.3\ngeneration_top_p: 0.9\n"
        "do_causal_lm_eval: true\neval_causal_lm_metrics: [sacrebleu, chrf, perplexity]\n"
        "plugins: [axolotl.integrations.lm_eval.LMEvalPlugin]\nlm_eval_tasks: ['gsm8k:5', 'hellaswag:5']\n"
        "lm_eval_batch_size: 16\nhub_model_id: me/mine\nhub_revision: next\n",
    )
    recipe = made.recipe

    assert recipe.evaluation.model_dump(exclude_defaults=True) == {
        "samples": 5,
        "max_new_tokens": 80,
        "temperature": 0.3,
        "top_p": 0.9,
        "metrics": ["bleu", "chrf"],
        "tasks": {"names": ["gsm8k", "hellaswag"], "few_shot": 5},
        "every": 50,
        "write_every": 50,
    }
    assert recipe.data.quality.duplicates == "fix"
    assert recipe.export.hub.model_dump() == {"repo": "me/mine", "private": True, "revision": "next"}
    assert made.keys(KeyResult.unsupported) == set()


def test_greedy_samples_and_tasks_with_numbers_of_their_own(written: Write):
    made = written(
        "axolotl",
        f"{BASE}{DATA}generate_samples: true\ngeneration_do_sample: false\nlm_eval_tasks: ['gsm8k:5', hellaswag]\n",
    )

    assert (made.recipe.evaluation.samples, made.recipe.evaluation.temperature) == (3, 0)
    assert made.recipe.evaluation.tasks.model_dump(exclude_defaults=True) == {"names": ["gsm8k", "hellaswag"]}
    assert "one number of examples is for all tasks" in made.text("lm_eval_tasks")
    assert "evaluation.sample_every in steps" in made.text("generate_samples")


def test_their_defaults_hold_where_the_file_is_silent(written: Write):
    recipe = written("axolotl", f"{BASE}{DATA}").recipe

    assert (recipe.training.optimizer, recipe.training.lr_scheduler) == ("adamw_torch_fused", "cosine")
    assert (recipe.training.batch_size, recipe.training.epochs, recipe.training.warmup_steps) == (1, 1, 0.03)
    assert (recipe.training.precision, recipe.model.dtype) == ("bf16", "bfloat16")
    assert recipe.data.max_length == 512


def test_groups_with_rates_of_their_own(written: Write):
    lines = "lr_groups:\n  - {name: o, modules: [self_attn.o_proj.weight], lr: 1e-6}\n"
    made = written("axolotl", f"{BASE}{DATA}{lines}embedding_lr: 3e-6\n")

    assert [group.model_dump(exclude_defaults=True) for group in made.recipe.training.groups] == [
        {"pattern": r"self_attn\.o_proj\.weight", "name": "o", "learning_rate": 1e-6},
        {"pattern": "embed_tokens|lm_head", "learning_rate": 3e-6},
    ]


def test_cadence_by_epoch(written: Write):
    data = "datasets:\n  - path: org/d\n    type: alpaca\n"
    watching = "early_stopping_patience: 2\nload_best_model_at_end: true\n"

    made = written("axolotl", f"{BASE}{data}{watching}evals_per_epoch: 2\nsaves_per_epoch: 1\n")
    assert (made.recipe.evaluation.per_epoch, made.recipe.chunks.checkpoints_per_epoch) == (2, 1)
    assert (made.recipe.training.early_stopping.patience, made.recipe.export.checkpoint) == (2, "best")
    assert not made.keys(KeyResult.unsupported)

    made = written("axolotl", f"{BASE}{data}eval_strategy: epoch\nsave_strategy: epoch\neval_steps: 5\nsave_steps: 5\n")
    assert (made.recipe.evaluation.per_epoch, made.recipe.chunks.checkpoints_per_epoch) == (1, 1)
    assert made.keys(KeyResult.not_needed) == {"eval_steps", "save_steps"}

    made = written("axolotl", f"{BASE}{data}max_steps: 9\nevals_per_epoch: 2\nsaves_per_epoch: 0\n")
    assert (made.recipe.evaluation.per_epoch, made.recipe.chunks.checkpoints_per_epoch) == (2, None)
    assert made.keys(KeyResult.changed) >= {"evals_per_epoch"}

    made = written("axolotl", f"{BASE}{data}evals_per_epoch: 0.5\n")
    assert "a whole number of times in an epoch" in made.text("evals_per_epoch")


def test_an_empty_key_asks_for_nothing(written: Write):
    made = written("axolotl", f"{BASE}{DATA}pretraining_dataset:\nrl:\nadapter:\n")

    assert made.recipe.training.method == "sft"
    assert set(made.draft.idle) == {"pretraining_dataset", "rl", "adapter"}


def test_a_whole_batch_in_place_of_accumulation(written: Write):
    recipe = written("axolotl", f"{BASE}{DATA}micro_batch_size: 2\nbatch_size: 16\n").recipe

    assert (recipe.training.batch_size, recipe.training.micro_batch_size) == (16, 2)


NOT_THE_SAME = {
    "texts in pieces": (
        "datasets:\n  - {path: org/d, type: completion}",
        {"datasets[0].type": (KeyResult.changed, "data.packing: true joins texts and cuts without loss")},
        {"packing": False},
    ),
    "packed texts without an end": (
        "sample_packing: true\nmax_steps: 5\npretraining_dataset:\n  - {path: org/d, type: pretrain}",
        {"sample_packing": (KeyResult.changed, "joined and cut, so that nothing of long ones is lost")},
        {"packing": True},
    ),
    "a part of a side": (
        "datasets:\n  - {path: org/d, type: alpaca, split: 'train[:2%]'}",
        {"datasets[0].split": (KeyResult.unsupported, "all rows of train are read")},
        {"source": ["hf://datasets/org/d"]},
    ),
    "a part of a file": (
        "datasets:\n  - {path: json, data_files: rows.jsonl, type: alpaca, split: 'train[:2%]'}",
        {"datasets[0].split": (KeyResult.unsupported, "all rows of train are read")},
        {},
    ),
    "untrained weights": (
        "reinit_weights: true\ndatasets:\n  - {path: org/d, type: alpaca}",
        {"reinit_weights": (KeyResult.unsupported, "begins from the trained weights here; model.from_scratch")},
        {},
    ),
    "a prompt that is not known": ("datasets:\n  - {path: org/d, type: gpteacher}", {}, {"train_on": "assistant"}),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_what_is_not_the_same_is_said(name: str, written: Write):
    lines, expected, data = NOT_THE_SAME[name]
    made = written("axolotl", f"{BASE}{lines}\n")
    for key, (fate, text) in expected.items():
        assert any(x.result is fate and text in x.text for x in made.draft.remarks if x.key == key)
    assert {key: getattr(made.recipe.data, key) for key in data} == data
