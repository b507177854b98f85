"""Evaluation: figures on held-out rows and samples, of the model before and after training and of the one in use."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.components.evaluate import measures, production
from baton.components.evaluate.evaluation_set import EvaluationSet, Findings
from baton.components.evaluate.production import Production
from baton.components.shared.core import events, machine
from baton.components.shared.core.scratch import scratch_folder
from baton.components.shared.models import loading, placement, trained
from baton.components.shared.models.counting import count
from baton.components.shared.models.metrics import figures
from baton.components.shared.runs import tracking
from baton.components.shared.runs.documents.outcome import Evaluation, Figures
from baton.components.shared.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWN = 8
"""Examples that are part of `evaluation.json`, at most; all are in `examples.jsonl`."""

Builder = Callable[[], "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]"]


def evaluate_run(run_uri: str) -> dict[str, Any]:
    """Compares the trained model with what it started from and with the one in use, on rows it has not seen.

    Returns:
        `before`, `after` and `production` (None without one), each the figures of `measures.measure`, of the
        recipe's metrics and tasks, None for one that is `not_measured`, which has the reasons; `better`, which way
        each is; `production_model`, what that is or why there is none; `side`, the rows that
        were taken, in passes of `batch_size` rows; `intervals`, see `figures.intervals`; `signatures` of
        metrics; `without_reference`, the number of samples that no metric counts; the first `samples` and where
        all `examples` are; `parameters`, and a `summary` in words.

    Raises:
        BatonError: the run has not come to its end.
        UserError: the model in use, a function, an encoder or a task that the recipe names cannot be had.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    started = time.time()
    run = Run.open(run_uri)
    recipe = run.resolved_recipe()
    machine.require_gpus(recipe.resources.image)
    last = trained.final_checkpoint(run)  # an unfinished run is told before anything is judged
    with scratch_folder("evaluate") as scratch:
        evaluation_set = EvaluationSet(run, recipe, scratch)
        rival = production.find(run, recipe, scratch)
        judged, words, parameters = _judge_all(evaluation_set, rival, scratch)
        evaluation = _document(evaluation_set, judged, evaluation_set.compare(judged))
    evaluation |= {"production_model": words, "parameters": parameters}
    for when in ("before", "after"):
        events.emit(events.Evaluated(when, evaluation[when]))
    # In the store before it is sent on: a tracking server may be out of reach.
    run.put(Evaluation.NAME, evaluation)
    logged = {
        f"final_{when}_{name}": value
        for when in judged
        for name, value in evaluation[when].items()
        if value is not None
    }
    tracking.log_metrics(run, logged, last.step)
    run.record("evaluate", {"seconds": time.time() - started})
    return evaluation


def summary(before: Figures, after: Figures, in_use: Figures | None = None) -> str:
    """Returns the figures that say most, in words, each followed by that of the model in use, if there is one."""

    def told(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.4g}"

    named = {"loss": "held-out loss", "reward": "reward", "accuracy": "accuracy", "divergence": "divergence"}
    scored = ("exact_match", "numeric_match", "bleu", "chrf", "rougeL", "bertscore")
    parts = []
    for key, words in (named | {key: key.replace("_", " ") for key in scored}).items():
        if key in after and key in before:
            rival = f" (production {told(in_use[key])})" if in_use and key in in_use else ""
            parts.append(f"{words} {told(before[key])} → {told(after[key])}{rival}")
    if "reward_accuracy" in after:
        accuracy, margin = after["reward_accuracy"], after["reward_margin"]
        known = accuracy is not None and margin is not None
        told_gain = f"{accuracy:.0%}, margin {margin:.3g} nats" if known else "not measured"
        parts.append(f"preference accuracy {told_gain}")
    return ", ".join(parts)


def _judge_all(
    evaluation_set: EvaluationSet, rival: Production | None, scratch: str
) -> tuple[dict[str, Findings], str | None, int]:
    """Judges the models one after the other, so that one is in memory at a time.

    Returns:
        What was found of each, what the production model is in words, and the trained model's parameters.
    """
    import torch

    recipe, tokenizer, run = evaluation_set.recipe, evaluation_set.tokenizer, evaluation_set.run
    builders: dict[str, Builder] = {
        "before": lambda: (loading.start_model(recipe, tokenizer, trained.base_folder(recipe)), None),
        "after": lambda: (trained.trained_model(recipe, tokenizer, trained.final_folder(run, scratch)), None),
    }
    words = rival.words if rival else None
    if rival and rival.folder:
        folder = rival.folder
        builders = {"production": lambda: production.load(folder, recipe), **builders}
    judged: dict[str, Findings] = {}
    parameters = 0
    for when, build in builders.items():
        model, own = build()
        if own is not None and production.same_tokens(own, tokenizer):
            own = None
        if own is not None:
            words = f"{words}; it has another vocabulary, so that figures on tokens are left out"
        model = placement.place(model).eval()
        judged[when] = evaluation_set.judge(when, model, own)
        parameters = count(model.parameters())
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    for when in judged.keys() - {"before"}:
        if judged["before"].likelihoods and judged[when].likelihoods:
            judged[when].figures |= measures.preference(judged["before"].likelihoods, judged[when].likelihoods)
    return judged, words, parameters


def _document(evaluation_set: EvaluationSet, judged: dict[str, Findings], signatures: dict[str, str]) -> dict[str, Any]:
    """Returns what `evaluation.json` says of the models, and writes all examples beside it."""
    recipe = evaluation_set.recipe
    values: dict[str, Any] = {when: figures.values(each.figures) | each.counts for when, each in judged.items()}
    values.setdefault("production", None)
    rows = []
    for number, (prompt, reference) in enumerate(evaluation_set.prompts):
        writes = {when: findings.writes[number] for when, findings in judged.items()}
        scores = {
            when: {
                name: each
                for name, figure in findings.scores.items()
                if (each := figure.each[number]) is not None and math.isfinite(each)
            }
            for when, findings in judged.items()
        }
        rows.append({"number": number, "prompt": prompt, "reference": reference, **writes, "scores": scores})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    evaluation_set.run.storage.write(
        evaluation_set.run.path("examples.jsonl"), text.encode("utf-8", "backslashreplace")
    )
    by_model = {when: each.figures for when, each in judged.items()}
    return values | {
        "side": evaluation_set.side,
        "batch_size": evaluation_set.recipe.evaluation_batch_size,
        "intervals": figures.intervals(by_model, recipe.evaluation.confidence, recipe.seed),
        "not_measured": {
            when: reasons
            for when, each in by_model.items()
            if (reasons := {name: why for name, figure in each.items() if (why := figure.not_measured)})
        },
        "better": {name: figure.better for each in by_model.values() for name, figure in each.items()},
        "signatures": signatures,
        "without_reference": evaluation_set.without_reference,
        "samples": [{key: row[key] for key in ("prompt", "reference", *judged)} for row in rows[:SHOWN]],
        "examples": {"count": len(rows), "path": "examples.jsonl"},
        "summary": summary(values["before"], values["after"], values["production"]),
    }
