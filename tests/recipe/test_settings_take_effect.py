"""Settings do what they name, with another value of each as the control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.export import formats
from baton.models import loading
from baton.models.metrics import Judge
from baton.recipe.evaluation import ONNX
from tests.models.test_bertscore import save_encoder
from tests.support import tiny

LORA = {"type": "lora", "r": 4, "target_modules": ["q_proj", "v_proj"]}


def built(base: str, folder: Path, **sections: Any) -> Any:
    """Returns the trainer of a recipe on rows that fit its method."""
    given = tiny.recipe(base, **sections)
    rows = tiny.PAIRS
    if given.training.method == "sft":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    tokens = tiny.tokens(given, rows)
    return tiny.trainer(given, tokens, folder, tokens if given.training.early_stopping else None)


def test_more_simpo_margin_is_more_loss(tiny_base: str, tmp_path: Path) -> None:
    found = {}
    for margin in (0.5, 1.5):
        settings = {"method": "cpo", "cpo": {"loss": "simpo", "simpo_margin": margin}}
        trainer = built(tiny_base, tmp_path / str(margin), training=settings)
        trainer.train()
        found[margin] = tiny.losses(trainer)[0]
    assert found[1.5] > found[0.5] + 0.1


def test_rank_pattern_gives_a_module_its_rank(tiny_base: str, tmp_path: Path) -> None:
    trainer = built(tiny_base, tmp_path, adapter={**LORA, "rank_pattern": {"v_proj": 2}})
    ranks = {name.split(".")[-4]: len(value) for name, value in trainer.model.named_parameters() if "lora_A" in name}
    assert ranks == {"q_proj": 4, "v_proj": 2}


@pytest.mark.parametrize(("layers", "expected"), [(None, {"0", "1"}), ([1], {"1"})])
def test_layers_to_transform_are_the_ones_with_an_adapter(
    layers: list[int] | None, expected: set[str], tiny_base: str, tmp_path: Path
) -> None:
    trainer = built(tiny_base, tmp_path, adapter={**LORA, "layers_to_transform": layers})
    names = [name.split(".layers.")[1] for name, _ in trainer.model.named_parameters() if "lora_A" in name]
    assert {name.split(".")[0] for name in names} == expected


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_repetition_penalty_keeps_the_model_from_repeating_itself(method: str, tiny_base: str, tmp_path: Path) -> None:
    """With top_k 1 the likeliest token is written; a penalty far beyond all logits leaves no token that was there."""
    repeated = {}
    for penalty in (1.0, 1e6):
        own = {"rewards": ["length"], "num_generations": 2, "max_completion_length": 24, "top_k": 1}
        training = {"method": method, method: {**own, "repetition_penalty": penalty}}
        trainer = built(tiny_base, tmp_path / str(penalty), training=training)
        ids = torch.tensor([trainer.processing_class("What is")["input_ids"]])
        written = trainer.model.generate(ids, generation_config=trainer.generation_config)[0].tolist()
        repeated[penalty] = len(written) - len(set(written))
    assert repeated[1.0] > 0
    assert repeated[1e6] == 0


@pytest.mark.parametrize(("greater", "steps"), [(True, 6), (False, 3)])
def test_greater_is_better_decides_what_an_improvement_is(
    greater: bool, steps: int, tiny_base: str, tmp_path: Path
) -> None:
    stopping = {"metric": "eval_rewards/margins", "patience": 2, "greater_is_better": greater}
    settings = {"method": "dpo", "max_steps": 6, "learning_rate": 1e-2, "optimizer": "adamw_torch"}
    trainer = built(tiny_base, tmp_path, training={**settings, "early_stopping": stopping}, evaluation={"every": 1})
    trainer.train()
    margins = [entry["eval_rewards/margins"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert margins == sorted(margins), "training is for margins that grow"
    assert trainer.state.global_step == steps


@pytest.mark.parametrize("role", ["sep_token", "cls_token", "mask_token"])
@pytest.mark.parametrize("token", ["<own>", "the"])
def test_special_tokens_are_one_token_with_their_task(role: str, token: str, tiny_base: str) -> None:
    given = tiny.recipe(tiny_base, model={"tokenizer": {"special_tokens": {role: token}}})
    tokenizer = loading.build_tokenizer(given, tiny_base)
    assert tokenizer is not None
    number = getattr(tokenizer, f"{role}_id")
    assert tokenizer(f"{token} x", add_special_tokens=False)["input_ids"][0] == number
    assert tokenizer.decode([number], skip_special_tokens=True) == ""
    assert getattr(AutoTokenizer.from_pretrained(tiny_base), role) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compute_dtype_is_the_one_that_4_bit_products_are_taken_in(dtype: str, tiny_base: str) -> None:
    model = {"quantization": {"bits": 4, "compute_dtype": dtype}}
    given = tiny.recipe(tiny_base, model=model, adapter=LORA)
    config: Any = loading.load_settings(given)["quantization_config"]
    assert config.bnb_4bit_compute_dtype == getattr(torch, dtype)


def test_bertscore_model_is_the_encoder_that_compares(tiny_base: str, tmp_path: Path) -> None:
    scores = []
    for seed in (0, 1):
        encoder = save_encoder(tmp_path / f"encoder-{seed}", seed=seed)
        evaluation = {"metrics": ["bertscore"], "bertscore_model": encoder}
        judge = Judge(tiny.recipe(tiny_base, evaluation=evaluation).evaluation, [("", "the cat sat on the mat")], 4)
        scores.append(judge.judge(["the cat sat"]).figures["bertscore"].value)
    assert scores[0] != scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21])
def test_opset_is_the_version_of_the_graph_s_operators(opset: int, tiny_base: str, tmp_path: Path) -> None:
    import onnx

    model = AutoModelForCausalLM.from_pretrained(tiny_base)
    formats.save_onnx(model, AutoTokenizer.from_pretrained(tiny_base), ONNX(opset=opset), str(tmp_path))
    (main,) = [each for each in onnx.load(str(tmp_path / formats.ONNX_FILE)).opset_import if each.domain == ""]
    assert main.version == opset
