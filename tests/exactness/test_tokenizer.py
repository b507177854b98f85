"""Tokens that a run adds: their rows are made the same in every chunk, learned, and handed out with the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton import fork
from baton.errors import UserError
from baton.models import generate, loading, trained, vocabulary
from baton.recipe.recipe import Recipe
from baton.runs.run import Run

CHANGES = {
    "add_tokens": ["Return", "def ", "<|end|>"],
    "special_tokens": {"bos_token": "<s>"},
    "end_of_turn": "<|im_end|>",
}
NEW = ["Return", "def ", "<s>"]
KINDS = {"full": {"adapter": None}, "lora": {}}
"""What is trained: all weights, or an adapter with dropout."""


@pytest.fixture(scope="module")
def grown(recipes: dict[str, Recipe], legs: Any) -> dict[str, Run]:
    """A run of each kind in one chunk."""
    runs = {}
    for kind in KINDS:
        runs[kind] = legs.prepare(recipe(kind, recipes, legs, 1), f"grown-{kind}")
        legs.train(runs[kind])
    return runs


def recipe(kind: str, recipes: dict[str, Recipe], legs: Any, count: int) -> Recipe:
    formats = ["safetensors", "gguf"] if kind == "full" else ["safetensors", "adapter", "gguf"]
    changed: Recipe = legs.changed(
        recipes["lora"],
        model__tokenizer=CHANGES,
        training__epochs=1,
        chunks__count=count,
        export__formats=formats,
        **KINDS[kind],
    )
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_end_on_the_bits_of_one_run(
    kind: str, grown: dict[str, Run], recipes: dict[str, Recipe], legs: Any
) -> None:
    run = legs.prepare(recipe(kind, recipes, legs, 2), f"grown-{kind}-2")
    legs.train(run)
    assert legs.final(run).meta.restored.step == run.plan().targets[0]
    assert legs.final(run).meta.state == legs.final(grown[kind]).meta.state


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_export_is_the_trained_model(kind: str, grown: dict[str, Run], legs: Any) -> None:
    run = grown[kind]
    for stage in (legs.evaluate, legs.export):
        code, printed = legs.leg(stage, run.uri)
        assert code == 0, printed
    made = {export["format"]: export for export in run.require("export.json")["exports"]}
    assert "weights the same bit for bit" in made["safetensors"]["checked"]["words"]
    model, tokenizer = generate.load(made["safetensors"]["uri"])
    start = loading.load_model(run.recipe().model.base or "")
    rows = start.get_input_embeddings().weight.shape[0]
    ids = [rows, rows + 1, rows + 2]
    assert tokenizer.convert_tokens_to_ids(NEW) == vocabulary.new_ids(tokenizer) == ids
    assert model.generation_config.eos_token_id == [0, 3]
    for before, after in (
        (start.get_input_embeddings(), model.get_input_embeddings()),
        (start.get_output_embeddings(), model.get_output_embeddings()),
    ):
        learned = after.weight.detach()
        assert learned.shape[0] == rows + 3
        moved = (learned[ids] - before.weight.detach().double().mean(0).float()).abs().max(1).values
        assert moved[:2].min() > 0, "those that are in the data"
    if kind == "lora":
        of_adapter, _ = generate.load(made["adapter"]["uri"])
        asked = torch.arange(rows + 3)[None]
        with torch.inference_mode():
            torch.testing.assert_close(of_adapter(asked).logits, model(asked).logits, rtol=1e-4, atol=1e-5)
        assert Path(made["adapter"]["uri"], "adapter_model.safetensors").stat().st_size < 60_000


def test_a_fork_starts_with_the_tokens_and_their_rows(grown: dict[str, Run], legs: Any, tmp_path: Path) -> None:
    parent = grown["lora"]
    with pytest.raises(UserError, match=r"a warm fork cannot change\n  model\.tokenizer"):
        fork.fork(parent, None, "grown-warm", ["model.tokenizer.add_tokens=[more]"])
    made = fork.fork(parent, None, "grown-cold", warm=False)
    run = legs.prepare(made.recipe, "grown-cold")
    legs.train(run)
    base = loading.local_model(made.recipe.model.base or "")
    model = loading.load_model(base)
    tokenizer = loading.load_tokenizer(f"{trained.tokens_folder(run, str(tmp_path), ['tokenizer'])}/tokenizer")
    assert vocabulary.new_ids(tokenizer) == [], "its base has them"
    assert tokenizer.convert_tokens_to_ids(NEW)[-1] == model.get_input_embeddings().weight.shape[0] - 1
    assert generate.stop_ids(model, tokenizer) == model.generation_config.eos_token_id == [0, 3]
    code, printed = legs.leg(legs.evaluate, run.uri)
    assert code == 0, printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "changes"),
    [
        pytest.param("full", "fsdp", {}, id="all weights in shards"),
        pytest.param("lora", "fsdp", {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}, id="adapter in shards"),
        pytest.param("lora", "ddp", {}, id="adapter in two processes"),
    ],
)
def test_several_processes_learn_them_exactly(
    kind: str, strategy: str, changes: dict[str, Any], grown: dict[str, Run], recipes: dict[str, Recipe], legs: Any
) -> None:
    runs = []
    for count in (1, 2):
        parallel = {"training__parallel": {"strategy": strategy, "processes": 2}}
        several = legs.changed(recipe(kind, recipes, legs, count), **parallel, **changes)
        runs.append(legs.prepare(several, f"grown-{kind}-{strategy}-{count}"))
        legs.train(runs[-1])
    assert legs.final(runs[1]).meta.restored.step == runs[1].plan().targets[0]
    assert legs.final(runs[0]).meta.state == legs.final(runs[1]).meta.state
    if kind == "full":  # an adapter's dropout draws in each process for itself
        ours, theirs = ([loss for _, loss in legs.losses(run)] for run in (runs[0], grown[kind]))
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    for stage in (legs.evaluate, legs.export):
        code, printed = legs.leg(stage, runs[1].uri)
        assert code == 0, printed
    assert "weights the same bit for bit" in printed
