"""LLaMA-Factory's files: what each setting becomes, and what is said of the others."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.errors import UserError
from baton.importers.draft import KeyResult
from baton.store.clouds import SCHEMES

Make = Callable[[str], Any]
Write = Callable[[str, str], Any]


def test_lora_sft(imported: Make):
    made = imported("llamafactory/lora_sft.yaml")

    assert made.recipe.model_dump(mode="json", exclude_defaults=True) == {
        "name": "lora-sft",
        "model": {
            "base": "meta-llama/Llama-3.1-8B-Instruct",
            "dtype": "bfloat16",
            "attention": "flash_attention_2",
            "chat_template": "llama3",
            "trust_remote_code": True,
        },
        "data": {
            "source": ["hf://datasets/acme/tickets?config=en&split=train_sft"],
            "format": "messages",
            "max_length": 4096,
            "packing": "best-fit",
            "train_on": "assistant",
            "max_samples": 1000,
        },
        "adapter": {"r": 8, "alpha": 16, "target_modules": "all-linear"},
        "training": {
            "micro_batch_size": 1,
            "epochs": 3.0,
            "learning_rate": 1e-4,
            "lr_scheduler": "cosine",
            "warmup_steps": 0.1,
            "groups": [{"pattern": r"\.lora_B\.", "name": "loraplus", "learning_rate": 1.6e-3}],
            "precision": "bf16",
            "gradient_checkpointing": True,
            "liger": True,
            "neftune_alpha": 5.0,
            "early_stopping": {},
            "log_every": 10,
            "workers": 4,
        },
        "chunks": {"checkpoint_every": 500},
        "evaluation": {"every": 500, "batch_size": 1},
        "export": {"checkpoint": "best"},
        "resources": {"gpus": 1},
        "tracking": {"wandb": "lora-sft"},
        "trust": "ask",
    }
    assert made.recipe.training.batch_size == 8
    assert made.keys(KeyResult.unsupported) == set()
    assert made.keys(KeyResult.elsewhere) == {"output_dir"}
    assert made.keys(KeyResult.changed) == {"report_to", "template"}


def test_dpo(imported: Make):
    made = imported("llamafactory/dpo.yaml")
    recipe = made.recipe

    assert (recipe.training.method, recipe.seed) == ("dpo", 17)
    assert recipe.training.dpo.model_dump(exclude_defaults=True) == {
        "beta": 0.2,
        "loss": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.5],
    }
    assert recipe.data.model_dump(exclude_defaults=True) == {
        "source": ["data/pairs.jsonl"],
        "format": "preference",
        "columns": {"prompt": "question", "chosen": "better", "rejected": "worse", "system": "system_prompt"},
        "split": {"eval": 0.05},
        "render_as": "chat",
        "max_length": 2048,
    }
    assert recipe.adapter.model_dump(exclude_defaults=True) == {
        "alpha": 16,
        "dropout": 0.05,
        "target_modules": ["q_proj", "v_proj"],
        "rslora": True,
    }
    assert (recipe.training.batch_size, recipe.training.micro_batch_size) == (16, 2)
    assert (recipe.training.lr_scheduler, recipe.training.warmup_steps) == ("constant_with_warmup", 20)
    assert (recipe.training.learning_rate, recipe.training.precision, recipe.model.dtype) == (5e-6, "fp16", "float16")
    assert recipe.tracking.mlflow is None


def test_full_pretraining(imported: Make):
    made = imported("llamafactory/full_pretrain.yaml")
    recipe = made.recipe

    assert recipe.adapter is None
    assert recipe.model.dtype == "bfloat16"
    assert recipe.data.model_dump(exclude_defaults=True) == {
        "source": ["data/books.txt"],
        "format": "text",
        "split": {"eval": 0.05},
        "max_length": 1024,
        "packing": True,
    }
    assert recipe.training.model_dump(mode="json", exclude_defaults=True) == {
        "method": "pretrain",
        "micro_batch_size": 4,
        "max_steps": 2000,
        "learning_rate": 1e-4,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_scheduler_options": {"min_lr_rate": 0.1},
        "warmup_steps": 100,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "optimizer": "adamw_bnb_8bit",
        "adam_betas": [0.9, 0.95],
        "compile": True,
    }
    assert recipe.tracking.tensorboard
    assert made.keys(KeyResult.unsupported) == {"deepspeed"}
    assert made.keys(KeyResult.elsewhere) == {"run_name"}


def test_freeze(imported: Make):
    made = imported("llamafactory/freeze_sft.yaml")
    recipe = made.recipe

    assert recipe.training.trainable.model_dump() == {"last_layers": 4, "patterns": ["embed_tokens", "norm"]}
    assert (recipe.model.dtype, recipe.training.precision) == ("float32", "bf16")
    assert (recipe.data.format, recipe.data.join) == ("prompt-completion", "\n")
    assert recipe.data.columns == {"prompt": ["instruction", "input"], "completion": "output"}
    assert recipe.data.train_on == "all"
    assert (recipe.training.batch_size, recipe.training.micro_batch_size) == (4, None)
    assert made.draft.idle == ["use_galore"]
    assert made.keys(KeyResult.changed) == {"template", "val_size"}


def test_qlora_kto(imported: Make):
    made = imported("llamafactory/qlora_kto.yaml")
    recipe = made.recipe

    assert recipe.model.quantization.model_dump() == {
        "bits": 4,
        "type": "nf4",
        "double": False,
        "compute_dtype": "bfloat16",
    }
    assert recipe.training.kto.model_dump(exclude_defaults=True) == {"undesirable_weight": 1.33}
    assert recipe.data.format == "rated"
    assert recipe.data.columns == {"prompt": "question", "completion": "reply", "label": "liked"}
    assert (recipe.training.batch_size, recipe.training.micro_batch_size) == (8, 2)
    assert recipe.adapter.dora
    assert "per_device_train_batch_size" in made.keys(KeyResult.changed)


def test_reward(imported: Make):
    made = imported("llamafactory/reward.yaml")

    assert made.recipe.training.method == "reward"
    assert made.recipe.data.format == "preference"
    assert "sequence classifier" in made.text("stage")


BASE = "model_name_or_path: org/model\ndataset: house_rules\ndataset_dir: llamafactory/data\n"
ANY = "model_name_or_path: org/model\ndataset_dir: llamafactory/data\n"
PREFERENCES = {
    "orpo": ("orpo", {"beta": 0.3}),
    "simpo": ("cpo", {"beta": 0.3, "loss": "simpo", "likelihood": 0, "simpo_margin": 0.7}),
    "ipo": ("dpo", {"beta": 0.3, "loss": ["ipo"]}),
}


@pytest.mark.parametrize(("loss", "expected"), PREFERENCES.items(), ids=PREFERENCES)
def test_a_loss_may_be_a_method_of_its_own(loss: str, expected: tuple[str, dict[str, Any]], written: Write):
    made = written("llamafactory", f"{BASE}stage: dpo\npref_loss: {loss}\npref_beta: 0.3\nsimpo_gamma: 0.7\n")
    method, settings = expected

    assert made.recipe.training.method == method
    assert getattr(made.recipe.training, method).model_dump(exclude_defaults=True) == settings


def test_a_number_of_rows_is_held_out_as_it_is(written: Write):
    made = written("llamafactory", f"{BASE}val_size: 200\n")
    assert made.recipe.data.split.eval == 200
    assert "val_size" not in made.keys(KeyResult.unsupported)


def test_their_defaults_hold_where_the_file_is_silent(written: Write):
    recipe = written("llamafactory", BASE).recipe

    assert (recipe.adapter.r, recipe.adapter.alpha, recipe.adapter.target_modules) == (8, 16, "all-linear")
    assert (recipe.training.learning_rate, recipe.training.epochs) == (5e-5, 3)
    assert (recipe.training.batch_size, recipe.gradient_accumulation_steps, recipe.data.max_length) == (8, 1, 2048)
    assert recipe.training.gradient_checkpointing
    assert recipe.evaluation.every is None


def test_cadence_by_epoch(written: Write):
    lines = "eval_strategy: epoch\nsave_strategy: epoch\nearly_stopping_steps: 2\nload_best_model_at_end: true\n"
    made = written("llamafactory", f"{BASE}{lines}")

    assert (made.recipe.evaluation.per_epoch, made.recipe.chunks.checkpoints_per_epoch) == (1, 1)
    assert (made.recipe.training.early_stopping.patience, made.recipe.export.checkpoint) == (2, "best")
    assert not made.keys(KeyResult.unsupported)


def test_first_layers_are_named(written: Write):
    made = written("llamafactory", f"{BASE}finetuning_type: freeze\nfreeze_trainable_layers: -2\n")

    assert made.recipe.training.trainable.patterns == [r"\.(layers|h|blocks)\.(0|1)\."]
    assert "check the pattern" in made.text("freeze_trainable_layers")


def test_alpacas_prompt(written: Write):
    made = written("llamafactory", f"{BASE}template: alpaca\n")

    assert (made.recipe.data.format, made.recipe.data.columns) == ("instruction", {})
    assert "Stanford's prompt" in made.text("template")


SHAPES = {
    "chats": ("sft", "sharegpt", {}),
    "talks": ("sft", "sharegpt", {"conversations": "talk"}),
    "tickets": ("sft", "messages", {}),
    "house_rules": ("sft", "prompt-completion", {"prompt": ["instruction", "input"], "completion": "output"}),
    "asked": ("sft", "prompt-completion", {"prompt": "question", "completion": "reply"}),
    "books": ("pt", "text", {}),
    "pairs": (
        "dpo",
        "preference",
        {"prompt": "question", "chosen": "better", "rejected": "worse", "system": "system_prompt"},
    ),
    "joined_pairs": ("rm", "preference", {"prompt": ["question", "context"], "chosen": "better", "rejected": "worse"}),
    "chat_pairs": ("dpo", "preference", {"prompt": "conversations"}),
    "old_pairs": ("dpo", "ranked", {"prompt": ["instruction", "input"], "responses": "output"}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of_rows(name: str, written: Write):
    stage, shape, columns = SHAPES[name]
    made = written("llamafactory", f"{ANY}dataset: {name}\nstage: {stage}\n")

    assert (made.recipe.data.format, made.recipe.data.columns) == (shape, columns)
    joined = any(isinstance(names, list) for names in columns.values())
    assert made.recipe.data.join == ("\n" if joined else "\n\n")


def test_data_sets_of_several_shapes(written: Write):
    made = written("llamafactory", f"{ANY}dataset: chats,tickets,house_rules\ntemplate: chatml\n")

    assert made.recipe.data.format == "auto"
    assert [source.model_dump(exclude_defaults=True) for source in made.recipe.data.sources] == [
        {"uri": "hf://datasets/acme/chats", "format": "sharegpt"},
        {"uri": "hf://datasets/acme/tickets?config=en&split=train_sft", "format": "messages"},
        {
            "uri": "llamafactory/data/house_rules.json",
            "format": "prompt-completion",
            "columns": {"prompt": ["instruction", "input"], "completion": "output"},
        },
    ]
    assert made.keys(KeyResult.unsupported) == {"dataset_info.json: house_rules"}


def test_rows_held_out_that_are_given(written: Write):
    made = written("llamafactory", f"{ANY}dataset: chats\neval_dataset: talks,cloud\nval_size: 0\n")

    assert [source.model_dump(exclude_defaults=True) for source in made.recipe.data.sources] == [
        {"uri": "hf://datasets/acme/chats", "format": "sharegpt", "side": "train"},
        {
            "uri": "hf://datasets/acme/talks",
            "format": "sharegpt",
            "columns": {"conversations": "talk"},
            "side": "eval",
        },
        {"uri": "s3://acme/chats.json", "format": "sharegpt", "side": "eval"},
    ]
    assert made.recipe.data.split.model_dump(exclude_defaults=True) == {}
    assert made.draft.idle.count("val_size") == 1


@pytest.mark.parametrize("address", [f"{scheme}://acme/a.json" for scheme in (*SCHEMES, "oss")])
def test_rows_in_a_store(address: str, written: Write, folder: Any):
    info = folder / "llamafactory/data/dataset_info.json"
    info.write_text(json.dumps({"house_rules": {"cloud_file_name": address}}), encoding="utf-8")
    made = written("llamafactory", BASE)
    is_known = not address.startswith("oss://")

    assert made.recipe.data.source == [address if is_known else "house_rules"]
    assert ("put its address into data.source" in made.text("dataset_info.json: house_rules")) != is_known


def test_what_is_on_and_has_no_effect_is_not_called_off(written: Write):
    made = written("llamafactory", f"{BASE}stage: dpo\ntrain_on_prompt: true\n")

    assert made.text("train_on_prompt") == "has no effect with dpo"
    assert "train_on_prompt" not in made.draft.idle


def test_rows_that_are_drawn(written: Write):
    data = written("llamafactory", f"{ANY}dataset: sampled\n").recipe.data

    assert (data.max_samples, data.shuffle) == (200, True)
    made = written("llamafactory", f"{ANY}dataset: sampled,chats\n")
    assert (made.recipe.data.max_samples, made.recipe.data.shuffle) == (None, False)
    assert "num_samples is not read" in made.text("dataset_info.json: sampled")


WRITING = {
    "": {"max_new_tokens": 1024, "temperature": 0.95, "top_p": 0.7},
    "temperature: 0.5\ntop_p: 0.9\nmax_new_tokens: 64": {"temperature": 0.5, "top_p": 0.9},
    "do_sample: false\ntop_p: 0.9": {"max_new_tokens": 1024},
}


@pytest.mark.parametrize(("lines", "expected"), WRITING.items(), ids=["theirs", "given", "greedy"])
def test_what_the_model_writes(lines: str, expected: dict[str, Any], written: Write):
    made = written("llamafactory", f"{BASE}predict_with_generate: true\n{lines}\n")

    assert made.recipe.evaluation.model_dump(exclude_defaults=True) == {"metrics": ["bleu", "rouge"], **expected}
    assert "sacreBLEU" in made.text("predict_with_generate")
    assert ("top_k of 50" in made.text("predict_with_generate")) == ("false" not in lines)
    assert ("evaluation.max_new_tokens 1024" in made.draft.assumed) == ("max_new_tokens" not in lines)


def test_generation_settings_alone_are_for_inference(written: Write):
    made = written("llamafactory", f"{BASE}temperature: 0.5\nmax_new_tokens: 64\n")

    assert made.recipe.evaluation.model_dump(exclude_defaults=True) == {}
    assert made.keys(KeyResult.not_needed) == {"temperature", "max_new_tokens"}


def test_where_the_model_goes(written: Write):
    made = written("llamafactory", f"{BASE}export_size: 2\nexport_hub_model_id: acme/rules\nexport_device: auto\n")
    assert made.recipe.export.model_dump(exclude_defaults=True) == {"shard_size": "2GB", "hub": {"repo": "acme/rules"}}
    assert "a new repository is private" in made.text("export_hub_model_id")
    assert "export.formats: [adapter]" in made.text("export_hub_model_id")

    lines = "push_to_hub: true\nhub_model_id: acme/rules\nhub_private_repo: false\nhub_strategy: end\n"
    made = written("llamafactory", f"{BASE}finetuning_type: full\n{lines}hub_token: hf_do_not_repeat_me\n")
    assert made.recipe.export.hub.model_dump() == {"repo": "acme/rules", "private": False, "revision": "main"}
    assert made.keys(KeyResult.unsupported) == set()
    assert made.keys(KeyResult.elsewhere) == {"hub_token"}


def test_each_row_once_is_what_joined_data_sets_are(written: Write):
    made = written("llamafactory", f"{ANY}dataset: chats,tickets\nmix_strategy: interleave_once\n")

    assert "mix_strategy" in made.keys(KeyResult.not_needed)


def test_names_on_the_hub(written: Write):
    made = written("llamafactory", "model_name_or_path: m\ndataset: org/a, org/b\ndataset_dir: ONLINE\n")

    assert made.recipe.data.source == ["hf://datasets/org/a", "hf://datasets/org/b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("[1]", "holds a list, expected data sets by their names", id="list"),
        pytest.param("{", "is not JSON", id="broken"),
        pytest.param('{"house_rules": 7}', "'house_rules' is 7, expected keys and values", id="number"),
        pytest.param('{"house_rules": {"columns": [1]}}', "expected keys and values", id="columns"),
    ],
)
def test_a_broken_dataset_info(content: str, message: str, written: Write, folder: Any):
    (folder / "llamafactory/data/dataset_info.json").write_text(content, encoding="utf-8")

    with pytest.raises(UserError, match=message):
        written("llamafactory", BASE)


def test_of_rows_of_an_unknown_shape_the_answers_count(written: Write):
    made = written("llamafactory", f"{ANY}dataset: elsewhere\n")
    assert made.recipe.data.train_on == "assistant"
    whole = written("llamafactory", f"{ANY}dataset: elsewhere\ntrain_on_prompt: true\n")
    assert whole.recipe.data.train_on == "all"


def test_a_part_of_a_side_is_told(written: Write, folder: Any):
    info = {"few": {"hf_hub_url": "acme/few", "split": "train[:2%]"}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    made = written("llamafactory", f"{ANY}dataset: few\ndataset_dir: {folder}\n")
    assert made.recipe.data.source == ["hf://datasets/acme/few"]
    assert made.keys(KeyResult.unsupported) == {"dataset_info.json: few"}
