"""Figures on held-out rows: those that TRL's own evaluation gives, and some by hand."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from baton.errors import UserError
from baton.evaluate import evaluate
from baton.models import loading, metrics
from baton.recipe.recipe import Recipe
from tests.support import tiny

QUIET = {"report_to": "none", "bf16": False, "per_device_eval_batch_size": 64}
"""One batch for all rows: then the mean over batches that `Trainer` reports is the mean over tokens."""


@pytest.fixture(scope="module")
def tokenizer(tiny_base: str) -> PreTrainedTokenizerBase:
    """The tiny base's tokenizer."""
    return loading.load_tokenizer(tiny_base)


def rows_of(method: str, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns pairs as the rows a method learns from."""
    if method == "sft":
        return [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    if method == "kto":
        rated = [(pair["prompt"], pair[side], side == "chosen") for pair in pairs for side in ("chosen", "rejected")]
        return [{"prompt": prompt, "completion": said, "label": label} for prompt, said, label in rated]
    return pairs


def recipe_of(base: str, method: str, **evaluation_settings: Any) -> Recipe:
    """Returns a recipe of a method."""
    writes = {"rewards": ["length"], "num_generations": 2, "max_completion_length": 6}
    own = {method: writes} if method in ("grpo", "rloo") else {}
    return tiny.recipe(base, training={"method": method, **own}, evaluation=evaluation_settings)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_held_out_loss_is_that_of_trl(
    batch_size: int, tiny_base: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    recipe = recipe_of(tiny_base, "sft", batch_size=batch_size)
    rows = tiny.tokens(recipe, rows_of("sft", tiny.PAIRS))
    model = loading.load_model(tiny_base)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(str(tmp_path), **QUIET),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
    )
    theirs = trainer.evaluate()["eval_loss"]
    measured = evaluate.measure(model.eval(), tokenizer, rows, recipe)
    found = metrics.figure_values(measured.figures)
    assert found["loss"] == pytest.approx(theirs, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(theirs), rel=1e-4)
    assert measured.counts == {"tokens": sum(label != -100 for labels in rows["labels"] for label in labels[1:])}
    assert measured.likelihoods == {}


def test_perplexity_is_that_of_a_loop_over_the_model_s_own_loss(
    tiny_base: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    recipe = recipe_of(tiny_base, "sft", batch_size=5)
    rows = tiny.tokens(recipe, rows_of("sft", tiny.PAIRS))
    model = loading.load_model(tiny_base).eval()
    total, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        counted = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * counted
        count += counted
    found = metrics.figure_values(evaluate.measure(model, tokenizer, rows, recipe).figures)
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


class Uniform(torch.nn.Module):
    """A language model that finds every one of its tokens as likely."""

    device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        logits = torch.zeros(*input_ids.shape, 8)
        return type("Output", (), {"logits": logits})


@given(
    rows=st.lists(
        st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=9), min_size=1, max_size=9
    ),
    batch_size=st.integers(1, 10),
)
def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary(rows: Any, batch_size: int) -> None:
    ids = [[token for token, _ in row] for row in rows]
    labels = [[token if counts else -100 for token, counts in row] for row in rows]
    counted = sum(counts for row in rows for _, counts in row[1:])
    held_out = datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})
    found = evaluate.held_out(evaluate.row_losses(Uniform(), held_out, batch_size))  # type: ignore[arg-type]
    assert found.counts == {"tokens": counted}
    expected = {"loss": pytest.approx(math.log(8), rel=1e-6), "perplexity": pytest.approx(8.0, rel=1e-5)}
    assert metrics.figure_values(found.figures) == (expected if counted else {"loss": None, "perplexity": None})


def test_likelihoods_of_pairs_are_those_of_trl(
    tiny_base: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    recipe = recipe_of(tiny_base, "dpo", batch_size=5)
    rows = tiny.tokens(recipe, tiny.PAIRS)
    model = loading.load_model(tiny_base)
    texts = [{**pair, "prompt": pair["prompt"] + "\n"} for pair in tiny.PAIRS]
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(str(tmp_path), max_length=64, **QUIET),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=tokenizer,
    )
    batch = trainer.data_collator(trainer.train_dataset.to_list())
    chosen, rejected = trainer.compute_ref_log_probs(model, batch)
    measured = evaluate.measure(model.eval(), tokenizer, rows, recipe)
    found, likelihoods = metrics.figure_values(measured.figures), measured.likelihoods
    assert likelihoods["chosen"] == pytest.approx(chosen.tolist(), rel=1e-5)
    assert likelihoods["rejected"] == pytest.approx(rejected.tolist(), rel=1e-5)
    count = sum(len(ids) for ids in rows["chosen_ids"])
    assert measured.counts == {"tokens": count}
    assert found["loss"] == pytest.approx(-sum(chosen.tolist()) / count, rel=1e-5)


def test_good_answers_alone_count_where_answers_are_rated(tiny_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = loading.load_model(tiny_base).eval()
    rated, pairs = (recipe_of(tiny_base, method) for method in ("kto", "dpo"))
    ours = evaluate.measure(model, tokenizer, tiny.tokens(rated, rows_of("kto", tiny.PAIRS)), rated)
    theirs = evaluate.measure(model, tokenizer, tiny.tokens(pairs, tiny.PAIRS), pairs)
    del theirs.figures["accuracy"]  # takes both answers
    assert metrics.figure_values(ours.figures) == pytest.approx(metrics.figure_values(theirs.figures), rel=1e-5)


def test_rated_rows_of_which_none_is_good_have_no_loss(tiny_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    recipe = recipe_of(tiny_base, "kto")
    bad = [row for row in rows_of("kto", tiny.PAIRS) if not row["label"]]
    model = loading.load_model(tiny_base).eval()
    found = evaluate.measure(model, tokenizer, tiny.tokens(recipe, bad), recipe)
    assert metrics.figure_values(found.figures) == {"loss": None, "perplexity": None}
    assert found.counts == {"tokens": 0}


LOSSES = {
    "a number": ([[3.0, 2.0], [0.0, 0.0]], (1.5, math.exp(1.5))),
    "no row": (np.zeros((0, 2)), (None, None)),
    "no token": ([[0.0, 0.0]], (None, None)),
    "beyond the largest number": ([[4000.0, 2.0]], (2000.0, None)),
    "infinite": ([[math.inf, 2.0], [1.0, 1.0]], (None, None)),
    "not a number": ([[math.nan, 2.0], [1.0, 1.0]], (None, None)),
}


@pytest.mark.parametrize(("sums", "expected"), LOSSES.values(), ids=LOSSES)
def test_a_loss_or_perplexity_that_is_not_finite_is_not_measured(sums: Any, expected: tuple[float, float]) -> None:
    found = metrics.figure_values(evaluate.held_out(np.asarray(sums)).figures)
    assert found == dict(zip(("loss", "perplexity"), expected, strict=True))


def test_a_share_of_margins_that_are_no_numbers_is_not_measured() -> None:
    """A model that has diverged prefers neither answer."""
    broken = {"chosen": [math.nan, -8.0], "rejected": [-9.0, -7.0]}
    found = evaluate.preference({side: [-5.0, -5.0] for side in broken}, broken)
    assert metrics.figure_values(found) == {"reward_accuracy": None, "reward_margin": None}


def test_scores_are_those_of_trl(tiny_base: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_base, "reward", batch_size=5)
    rows = tiny.tokens(recipe, tiny.PAIRS)
    model = loading.start_model(recipe, tokenizer, tiny_base)
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(str(tmp_path), max_length=64, **QUIET),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
    )
    theirs = trainer.evaluate()
    measured = evaluate.measure(model.eval(), tokenizer, rows, recipe)
    found = metrics.figure_values(measured.figures)
    assert found["loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    assert found["accuracy"] == pytest.approx(theirs["eval_accuracy"], rel=1e-6)
    assert found["margin"] == pytest.approx(theirs["eval_margin"], rel=1e-5, abs=1e-5)
    assert 0 < found["accuracy"] < 1
    assert measured.likelihoods == {}


def test_gains_of_pairs_by_hand() -> None:
    """Chosen gain 2, -1 and 0; rejected -1, 1 and 0: margins 3, -2 and 0, of which one is above 0."""
    before = {"chosen": [-10.0, -8.0, -5.0], "rejected": [-9.0, -7.0, -5.0]}
    after = {"chosen": [-8.0, -9.0, -5.0], "rejected": [-10.0, -6.0, -5.0]}
    found = metrics.figure_values(evaluate.preference(before, after))
    assert found == pytest.approx({"reward_accuracy": 1 / 3, "reward_margin": 1 / 3})


def test_preferred_pairs_by_hand() -> None:
    """Nats per token: 2 against 3, 2 against 1, and as much on both sides; longer answers have no handicap."""
    chosen, rejected = np.array([[20.0, 10], [4.0, 2], [6.0, 3]]), np.array([[6.0, 2], [2.0, 2], [2.0, 1]])
    assert evaluate.preferred(chosen, rejected).value == pytest.approx(1 / 3)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_rewards_are_those_of_greedy_completions(
    method: str, tiny_base: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    judges = [{"use": "length", "weight": 2.0, "options": {"target": 6}}, {"use": "exact", "weight": 0.5}]
    settings = {"rewards": judges, "num_generations": 2, "max_completion_length": 6}
    recipe = tiny.recipe(tiny_base, training={"method": method, method: settings}, evaluation={"samples": 0})
    model = loading.load_model(tiny_base).eval()
    prompts = [pair["prompt"] + "\n" for pair in tiny.PAIRS[:3]]
    said = []
    for prompt in prompts:
        given_ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(given_ids, max_new_tokens=6, do_sample=False)[0, given_ids.shape[1] :]
        said.append(tokenizer.decode(out, skip_special_tokens=True))
    lengths = [len(tokenizer(text)["input_ids"]) for text in said]
    mean_length = sum(1 - abs(length - 6) / 6 for length in lengths) / 3
    answers = [said[0], "something else", f" {said[2]} "]
    rows = [{"prompt": pair["prompt"], "answer": answer} for pair, answer in zip(tiny.PAIRS, answers, strict=False)]
    found = metrics.figure_values(evaluate.measure(model, tokenizer, tiny.tokens(recipe, rows), recipe).figures)
    exact = 2 / 3
    assert found["reward_length"] == pytest.approx(mean_length)
    assert found["reward_exact"] == pytest.approx(exact)
    assert found["reward"] == pytest.approx(2.0 * mean_length + 0.5 * exact)


REWARDS: dict[str, tuple[str, dict[str, float | None] | str]] = {
    "numbers": ("[1.0, 2.0, 3.0]", {"reward": 2.0 + 0.5, "reward_judge": 2.0}),
    "none of one": ("[None, 2.0, 4.0]", {"reward": 2.0 + 0.5, "reward_judge": 3.0}),
    "nan of one": ("[float('nan'), 2.0, 4.0]", {"reward": 2.0 + 0.5, "reward_judge": 3.0}),
    "none of all": ("[None] * 3", {"reward": 0.5, "reward_judge": None}),
    "infinite": ("[float('inf'), 2.0, 3.0]", {"reward": None, "reward_judge": None}),
    "both infinities": ("[float('inf'), -float('inf'), 3.0]", {"reward": None, "reward_judge": None}),
    "words": ("['good'] * 3", "reward 'judge' returned ['good', 'good', 'good'], expected a list of numbers"),
    "one number": ("1.0", "reward 'judge' returned 1.0, expected a list of numbers"),
    "too few": ("[1.0, 2.0]", "reward 'judge' returned 2 numbers for 3 rows, expected one for each"),
}


@pytest.mark.parametrize("beside", [True, False], ids=["beside another", "alone"])
@pytest.mark.parametrize(("answer", "expected"), REWARDS.values(), ids=REWARDS)
def test_rewards_that_are_no_numbers(
    answer: str,
    expected: Any,
    beside: bool,
    tiny_base: str,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As TRL has it: None and NaN say nothing, and a completion that no function has judged does not count."""
    (tmp_path / "own_rewards.py").write_text(
        f"def judge(completions, **_):\n    return {answer}\ndef half(completions, **_):\n    return [0.5] * 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    judges = [{"use": f"own_rewards:{name}"} for name in (["judge", "half"] if beside else ["judge"])]
    settings = {"rewards": judges, "num_generations": 2, "max_completion_length": 4}
    recipe = tiny.recipe(tiny_base, training={"method": "grpo", "grpo": settings})
    rows = tiny.tokens(recipe, [{"prompt": pair["prompt"], "answer": ""} for pair in tiny.PAIRS[:3]])
    model = loading.load_model(tiny_base).eval()
    if isinstance(expected, str):
        with pytest.raises(UserError, match=re.escape(expected)):
            evaluate.measure(model, tokenizer, rows, recipe)
        return
    found = metrics.figure_values(evaluate.measure(model, tokenizer, rows, recipe).figures)
    alone = {"reward": expected["reward_judge"], "reward_judge": expected["reward_judge"]}
    assert found == ({**expected, "reward_half": 0.5} if beside else alone)


def test_the_divergence_from_a_teacher_is_that_of_the_whole_distributions(
    tiny_base: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    teacher = loading.load_model(tiny_base)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in teacher.parameters():
            value.add_(0.05 * torch.randn_like(value))
    for folder, of_itself in ((tiny_base, True), (str(tmp_path / "teacher"), False)):
        if not of_itself:
            teacher.save_pretrained(folder)
        taught = {"method": "distillation", "distillation": {"teacher": folder, "max_completion_length": 6}}
        recipe = tiny.recipe(tiny_base, training=taught)
        rows = [{"prompt": pair["prompt"]} for pair in tiny.PAIRS[:3]]
        model = loading.load_model(tiny_base).eval()
        second = loading.second_model(recipe, folder)
        measured = evaluate.measure(model, tokenizer, tiny.tokens(recipe, rows), recipe, second_model=second).figures
        found = metrics.figure_values(measured)
        assert measured["divergence"].better == "lower"
        sums, count = 0.0, 0
        for row in rows:
            ids = tokenizer(row["prompt"] + "\n", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                said = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :])
                written = tokenizer(said, add_special_tokens=False, return_tensors="pt")["input_ids"]
                whole = torch.cat([ids, written], dim=1)
                ours, theirs = (
                    each(input_ids=whole).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
                    for each in (model, model if of_itself else teacher.eval())
                )
            sums += float(torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="sum"))
            count += whole.shape[1] - ids.shape[1]
        assert found == {"divergence": pytest.approx(sums / count, rel=1e-3, abs=1e-6)}
        assert (found["divergence"] > 0.01) != of_itself


SUMMARIES = {
    "loss": ({"loss": 8.31234, "perplexity": 4000.0}, {"loss": 3.2, "perplexity": 24.5}, "held-out loss 8.312 → 3.2"),
    "reward": ({"reward": 0.1}, {"reward": 0.75}, "reward 0.1 → 0.75"),
    "scores": (
        {"loss": 0.7, "accuracy": 0.5},
        {"loss": 0.25, "accuracy": 0.875},
        "held-out loss 0.7 → 0.25, accuracy 0.5 → 0.875",
    ),
    "pairs": (
        {"loss": 2.0},
        {"loss": 1.5, "reward_accuracy": 0.755, "reward_margin": 1.2345},
        "held-out loss 2 → 1.5, reward accuracy 76%, margin 1.23 nats",
    ),
    "texts": (
        {"loss": 2.0, "exact_match": 0.0, "rougeL": 0.25},
        {"loss": 1.5, "exact_match": 0.125, "rougeL": 0.5},
        "held-out loss 2 → 1.5, exact match 0 → 0.125, rougeL 0.25 → 0.5",
    ),
    "not measured": (
        {"loss": 2.0, "bleu": None},
        {"loss": None, "bleu": None, "reward_accuracy": None, "reward_margin": None},
        "held-out loss 2 → not measured, bleu not measured → not measured, reward accuracy not measured",
    ),
    "nothing": ({}, {}, ""),
}


@pytest.mark.parametrize(("before", "after", "words"), SUMMARIES.values(), ids=SUMMARIES)
def test_the_figures_that_say_most(before: Any, after: Any, words: str) -> None:
    assert evaluate.summary(before, after) == words


def test_the_figures_that_say_most_have_those_of_the_model_in_use_behind_them() -> None:
    words = evaluate.summary({"loss": 2.0, "bleu": 1.0}, {"loss": 1.5, "bleu": 12.345}, {"bleu": 9.5, "tokens": 7})
    assert words == "held-out loss 2 → 1.5, bleu 1 → 12.35 (production 9.5)"


@pytest.mark.parametrize(("processes", "most"), [pytest.param(1, 8, id="one"), pytest.param(4, 2, id="four")])
def test_an_evaluation_takes_no_more_rows_at_once_than_training_on_the_same_device(
    processes: int, most: int, tiny_base: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Left out, `micro_batch_size` is a batch with one process, and its share of that with several."""
    recipe = tiny.recipe(tiny_base, training={"method": "sft", "parallel": {"processes": processes}})
    model = loading.start_model(recipe, tokenizer, tiny_base)
    taken: list[int] = []
    model.register_forward_pre_hook(lambda _, __, inputs: taken.append(len(inputs["input_ids"])), with_kwargs=True)
    evaluate.measure(model, tokenizer, tiny.tokens(recipe, rows_of("sft", tiny.PAIRS)), recipe)
    assert max(taken) == most == recipe.micro_batch_size_per_process
