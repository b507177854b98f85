"""LLaMA-Factory's files: what each setting becomes, and what is said of the others."""

from collections.abc import Callable
from typing import Any

import pytest

from components.shared.errors import UserError
from pipelines.importing.draft import Fate

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
            "trust_remote_code": True,
        },
        "data": {
            "source": ["hf://datasets/acme/tickets?config=en&split=train_sft"],
            "format": "messages",
            "max_length": 4096,
            "packing": "best-fit",
            "assistant_only_loss": True,
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
    }
    assert made.recipe.training.batch_size == 8
    assert made.keys(Fate.left) == {"template", "output_dir"}
    assert made.keys(Fate.changed) == {"report_to"}


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
        "columns": {"prompt": "question", "chosen": "better", "rejected": "worse"},
        "split": {"eval": 0.05},
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
    assert "'system_prompt'" in made.text("dataset_info.json: pairs")


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
    assert made.keys(Fate.left) == {"deepspeed", "run_name"}


def test_freeze(imported: Make):
    made = imported("llamafactory/freeze_sft.yaml")
    recipe = made.recipe

    assert recipe.training.trainable.model_dump() == {"last_layers": 4, "patterns": ["embed_tokens", "norm"]}
    assert (recipe.model.dtype, recipe.training.precision) == ("float32", "bf16")
    assert (recipe.data.format, recipe.data.columns) == ("instruction", {})
    assert not recipe.data.completion_only_loss
    assert (recipe.training.batch_size, recipe.training.micro_batch_size) == (4, None)
    assert made.draft.idle == ["use_galore"]
    assert made.keys(Fate.changed) == {"val_size"}


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
    assert "per_device_train_batch_size" in made.keys(Fate.changed)


def test_reward(imported: Make):
    made = imported("llamafactory/reward.yaml")

    assert made.recipe.training.method == "reward"
    assert made.recipe.data.format == "preference"
    assert "sequence classifier" in made.text("stage")


BASE = "model_name_or_path: org/model\ndataset: house_rules\ndataset_dir: llamafactory/data\n"
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


SAID = {
    "pref_loss: kto_pair": ("pref_loss", "sigmoid is used"),
    "dpo_label_smoothing: 0.1": ("dpo_label_smoothing", "loss: robust, label_smoothing: 0.1"),
    "packing: true": ("packing", "pairs are not packed"),
    "optim: came": ("optim", "adamw_torch is used"),
    "lr_scheduler_type: reduce_lr_on_plateau": ("lr_scheduler_type", "linear is used"),
    "quantization_bit: 3": ("quantization_bit", "4 and 8 bits"),
    "quantization_bit: 4\nquantization_method: hqq": ("quantization_method", "only bitsandbytes"),
    "val_size: 200": ("val_size", "a number of rows"),
    "save_steps: 0.1": ("save_steps", "a share of all steps"),
    "logging_steps: 0.1": ("logging_steps", "a share of all steps"),
    "save_strategy: epoch": ("save_strategy", "every chunk ends on a checkpoint"),
    "eval_strategy: epoch": ("eval_strategy", "set evaluation.every"),
    "early_stopping_steps: 2": ("early_stopping_steps", "training.early_stopping: {patience: 2}"),
    "load_best_model_at_end: true": ("load_best_model_at_end", "export.checkpoint: best"),
    "dataset: absent": ("dataset", "'absent' is in no dataset_info.json"),
    "dataset: house_rules,pairs": ("dataset_info.json: pairs", "another shape than 'house_rules'"),
    "dataset: old_chats": ("dataset_info.json: old_chats", "role and content"),
    "my_own_key: 7": ("my_own_key", "unknown: no setting of LLaMA-Factory"),
    "report_to: comet_ml": ("report_to", "comet_ml: Baton logs to MLflow"),
    "use_galore: true\ngalore_rank: 64": ("galore_rank", "does not have this optimizer"),
}


@pytest.mark.parametrize(("lines", "expected"), SAID.items(), ids=[name.splitlines()[-1] for name in SAID])
def test_what_is_not_carried_over_is_said(lines: str, expected: tuple[str, str], written: Write):
    made = written("llamafactory", f"{BASE}stage: dpo\n{lines}\n")
    key, text = expected

    assert key in made.keys(Fate.left)
    assert text in made.text(key)
    assert f"Not carried over: {key}" in made.yaml or f", {key}" in made.yaml


def test_their_defaults_hold_where_the_file_is_silent(written: Write):
    recipe = written("llamafactory", BASE).recipe

    assert (recipe.adapter.r, recipe.adapter.alpha, recipe.adapter.target_modules) == (8, 16, "all-linear")
    assert (recipe.training.learning_rate, recipe.training.epochs) == (5e-5, 3)
    assert (recipe.training.batch_size, recipe.training.accumulation, recipe.data.max_length) == (8, 1, 2048)
    assert recipe.training.gradient_checkpointing
    assert recipe.evaluation.every is None


def test_first_layers_are_named(written: Write):
    made = written("llamafactory", f"{BASE}finetuning_type: freeze\nfreeze_trainable_layers: -2\n")

    assert made.recipe.training.trainable.patterns == [r"\.(layers|h|blocks)\.(0|1)\."]
    assert "check the pattern" in made.text("freeze_trainable_layers")


def test_names_on_the_hub(written: Write):
    made = written("llamafactory", "model_name_or_path: m\ndataset: org/a, org/b\ndataset_dir: ONLINE\n")

    assert made.recipe.data.source == ["hf://datasets/org/a", "hf://datasets/org/b"]


WRONG = {
    "not a number": ("learning_rate: fast", "train.yaml: learning_rate is 'fast', expected a number."),
    "not a whole number": ("lora_rank: 8.5", "lora_rank is 8.5, expected a whole number above 0."),
    "not a switch": ("bf16: perhaps", "bf16 is 'perhaps', expected true or false."),
    "ppo": ("stage: ppo", "Baton has no PPO. Take training.method grpo or rloo with a reward function"),
    "stage": ("stage: sftt", "stage is 'sftt', expected one of pt, sft, rm, kto, dpo."),
    "oft": ("finetuning_type: oft", "expected lora, freeze or full, which Baton has. Choose one of them."),
    "out of range": ("lora_dropout: 2", "adapter.dropout: Input should be less than 1"),
    "no layers": ("finetuning_type: freeze\nfreeze_trainable_layers: 0", "a number of layers other than 0"),
}


@pytest.mark.parametrize(("lines", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_an_error(lines: str, message: str, written: Write):
    with pytest.raises(UserError) as error:
        written("llamafactory", f"{BASE}{lines}\n")

    assert message in str(error.value)


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
