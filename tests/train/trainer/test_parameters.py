"""What is frozen, and groups of parameters: who is in which, and how an optimizer's step moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from baton.errors import UserError
from baton.models.trainable import freeze
from baton.recipe.training import Trainable
from tests.support import tiny


def llama(**changes: Any) -> LlamaForCausalLM:
    """Returns a Llama of two blocks."""
    settings = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**settings, "num_hidden_layers": 2, **changes}))


BLOCK = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
SECOND = {f"model.layers.1.{layer}.weight" for layer in BLOCK}
NORMS = {f"model.layers.{n}.{which}_layernorm.weight" for n in (0, 1) for which in ("input", "post_attention")}

WANTED = {
    "last block": ({"last_layers": 1}, SECOND),
    "a pattern": ({"patterns": ["norm"]}, NORMS | {"model.norm.weight"}),
    "block and patterns": (
        {"last_layers": 1, "patterns": ["lm_head", r"^model\.norm"]},
        SECOND | {"lm_head.weight", "model.norm.weight"},
    ),
    "block and pattern overlap": ({"last_layers": 1, "patterns": [r"layers\.1\.mlp"]}, SECOND),
}


@pytest.mark.parametrize(("settings", "wanted"), WANTED.values(), ids=WANTED)
def test_exactly_what_is_wanted_is_trained(settings: dict[str, Any], wanted: set[str]) -> None:
    model = llama()
    freeze(model, Trainable(**settings))
    assert {name for name, value in model.named_parameters() if value.requires_grad} == wanted


UNFIT = {
    "no such name": ({"patterns": ["adapter"]}, "training.trainable ['adapter'] fits no parameter. Layers of this"),
    "more blocks than there are": ({"last_layers": 3}, "training.trainable.last_layers is 3, the model has 2 blocks."),
}


@pytest.mark.parametrize(("settings", "message"), UNFIT.values(), ids=UNFIT)
def test_what_leaves_nothing_to_train_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        freeze(llama(), Trainable(**settings))
    assert message in str(caught.value)


def test_an_output_layer_that_is_the_embedding_has_its_name() -> None:
    with pytest.raises(UserError, match="fits no parameter") as caught:
        freeze(llama(tie_word_embeddings=True), Trainable(patterns=["lm_head"]))
    assert caught.value.remedy
    assert "embed_tokens" in caught.value.remedy


GROUPS = [
    {"pattern": "embed|lm_head", "name": "ends", "learning_rate": 1e-3},
    {"pattern": r"mlp\.", "weight_decay": 0.5},
    {"pattern": "norm", "learning_rate": 0.0, "weight_decay": 0.25},
]
ADAMW = {"optimizer": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1, "groups": GROUPS}
EXPECTED = {"ends": (1e-3, 0.1), r"mlp\.": (1e-2, 0.5), "norm": (0.0, 0.25), None: (1e-2, 0.1)}
"""Learning rate and weight decay by the group's name; biases aside, all matrices decay."""


def grouped(base: str, folder: Path, **training: Any) -> Any:
    """Returns a trainer with its optimizer."""
    given = tiny.recipe(base, training={**ADAMW, **training})
    trainer = tiny.trainer(given, tiny.tokens(given, [_row(pair) for pair in tiny.PAIRS]), folder)
    trainer.create_optimizer()
    return trainer


def _row(pair: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": pair["prompt"], "completion": pair["chosen"]}


def group_of(name: str) -> str | None:
    """Tells a parameter's group by hand."""
    if "embed" in name or "lm_head" in name:
        return "ends"
    return r"mlp\." if ".mlp." in name else "norm" if "norm" in name else None


def test_every_parameter_is_in_the_first_group_that_fits(tiny_base: str, tmp_path: Path) -> None:
    trainer = grouped(tiny_base, tmp_path)
    names = {id(value): name for name, value in trainer.model.named_parameters()}
    found = [(names[id(x)], part) for part in trainer.optimizer.param_groups for x in part["params"]]
    assert sorted(name for name, _ in found) == sorted(names.values())
    for name, part in found:
        assert part.get("name") == group_of(name), name
        learning_rate, weight_decay = EXPECTED[group_of(name)]
        assert part["lr"] == learning_rate, name
        assert part["weight_decay"] == weight_decay, name


def test_a_step_moves_each_parameter_as_its_group_says(tiny_base: str, tmp_path: Path) -> None:
    """AdamW's first step is p·(1 - lr·wd) - lr·g/(|g| + ε), since both moments are corrected to g and g²."""
    trainer = grouped(tiny_base, tmp_path)
    torch.manual_seed(1)
    before = tiny.weights(trainer)
    for value in trainer.model.parameters():
        value.grad = torch.randn_like(value)
    trainer.optimizer.step()
    for name, value in trainer.model.named_parameters():
        learning_rate, weight_decay = EXPECTED[group_of(name)]
        old, gradient = before[name].double(), value.grad.double()
        expected = old * (1 - learning_rate * weight_decay) - learning_rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(value.detach().double(), expected, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(value.detach(), before[name]) == (learning_rate == 0), name


def _norm(values: list[Any]) -> float:
    return float(torch.cat([value.grad.flatten() for value in values]).norm())


@pytest.mark.parametrize(
    ("overall", "scale_of_all", "mlp_norm"),
    [(0.0, 1.0, 0.5), (1.0, 0.1, 0.5), (0.1, 0.01, 0.09)],
    ids=["its own alone", "after that of all", "already below"],
)
def test_a_group_is_clipped_to_a_norm_of_its_own(
    overall: float, scale_of_all: float, mlp_norm: float, tiny_base: str, tmp_path: Path
) -> None:
    """Gradients of norm 10: 9 in the group, and what is left of it in the others."""
    groups = [{"pattern": r"mlp\.", "max_grad_norm": 0.5}]
    trainer = grouped(tiny_base, tmp_path, groups=groups, max_grad_norm=overall)
    inside = [value for name, value in trainer.model.named_parameters() if ".mlp." in name]
    outside = [value for name, value in trainer.model.named_parameters() if ".mlp." not in name]
    for values, norm in ((inside, 9.0), (outside, 19**0.5)):
        count = sum(value.numel() for value in values)
        for value in values:
            value.grad = torch.full_like(value, norm / count**0.5)
    assert trainer.args.max_grad_norm > 0, "Trainer calls no clipping at 0"
    logged = trainer._clip_grad_norm(trainer.model)
    assert float(logged) == pytest.approx(10.0, rel=1e-5)
    assert _norm(inside) == pytest.approx(mlp_norm, rel=1e-4)
    assert _norm(outside) == pytest.approx(scale_of_all * 19**0.5, rel=1e-4)


def test_each_group_follows_the_schedule_and_is_logged(tiny_base: str, tmp_path: Path) -> None:
    """Linear from the peak to 0 over 3 steps, each logged with the rate that it was taken with."""
    trainer = grouped(tiny_base, tmp_path, max_grad_norm=0.0)
    before = tiny.weights(trainer)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    for key, peak in {"learning_rate": 1e-2, "learning_rate/ends": 1e-3, r"learning_rate/mlp\.": 1e-2}.items():
        assert [entry[key] for entry in logged] == pytest.approx([peak, peak * 2 / 3, peak / 3]), key
    after = tiny.weights(trainer)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {name for name in before if "norm" in name}


UNFIT_GROUPS = {
    "nothing": ([{"pattern": "lora_"}], "training.groups: pattern 'lora_' fits no trained parameter"),
    "taken by an earlier group": (
        [{"pattern": "layers"}, {"pattern": r"layers\.1\.mlp"}],
        r"training.groups: pattern 'layers\\.1\\.mlp' fits no trained parameter that an earlier group left.",
    ),
}


@pytest.mark.parametrize(("groups", "message"), UNFIT_GROUPS.values(), ids=UNFIT_GROUPS)
def test_a_group_that_is_empty_is_refused(
    groups: list[dict[str, Any]], message: str, tiny_base: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        grouped(tiny_base, tmp_path, groups=groups)
    assert message in str(caught.value)


def test_frozen_parameters_are_in_no_group(tiny_base: str, tmp_path: Path) -> None:
    trainer = grouped(tiny_base, tmp_path, trainable={"last_layers": 1}, groups=[{"pattern": "mlp"}])
    names = {id(value): name for name, value in trainer.model.named_parameters()}
    held = {names[id(value)] for part in trainer.optimizer.param_groups for value in part["params"]}
    assert held == SECOND
