"""Scores of a model depend on the number of requests per batch.

Issue: https://github.com/EleutherAI/lm-evaluation-harness/issues/1645
Upstream: reproduced. lm-eval 0.4.13 on a tiny model in fp32: log-likelihoods of equal requests differ between batches
    of 1, 4 and 7.
Baton: evaluates all models of a verdict in the same batches. An unchanged model gets its base's scores, bit for bit, at
    any batch size. Between batch sizes losses differ by rounding; generated texts and their counts do not.
    `evaluation.json` holds the size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.evaluate.evaluate import evaluate_run
from baton.evaluate.gate import judge_run
from baton.models import loading
from tests.evaluate.finished import CHATTY, finished, recipe_of
from tests.support import tiny

SIZES = (1, 4, 7)


def test_upstream_scores_by_batch(tiny_base: str) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = loading.load_model(tiny_base).eval(), loading.load_tokenizer(tiny_base)
    asked = [(row["prompt"], f" {row[side]}") for row in tiny.PAIRS for side in ("chosen", "rejected")]
    requests = [Instance(request_type="loglikelihood", doc={}, arguments=each, idx=0) for each in asked]
    scores = []
    for size in SIZES:
        judged: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)
        scores.append([score for score, _ in judged.loglikelihood(requests, disable_tqdm=True)])
    assert len({tuple(each) for each in scores}) > 1


def test_baton_compares_like_with_like(tiny_base: str, tmp_path: Path) -> None:
    found = {}
    for size in SIZES[:2]:
        recipe = recipe_of(tiny_base, batch_size=size, metrics=["exact_match", "chrf"], gate={"loss": "<= baseline"})
        run = finished(tmp_path, recipe, {"eval": CHATTY}, train=lambda model: None, name=f"by-{size}")
        found[size] = evaluate_run(run.uri)
        assert found[size]["batch_size"] == size
        assert found[size]["after"] == found[size]["before"]
        assert judge_run(run.uri).passed
    one = found[1]
    for other in found.values():
        assert other["samples"] == one["samples"]
        assert {name: other["after"][name] for name in ("exact_match", "chrf", "tokens")} == {
            name: one["after"][name] for name in ("exact_match", "chrf", "tokens")
        }
        assert other["after"]["loss"] == pytest.approx(one["after"]["loss"], rel=1e-6)
