"""The whole stage on runs made by hand: which models, which rows, and what is kept of them."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.errors import BatonError, ExactnessError, UserError
from baton.evaluate.evaluate import evaluate_run
from baton.models import generate, loading, user_code
from baton.runs.documents import PinnedModels
from baton.runs.run import Run, state_identity
from tests.evaluate.finished import CHATTY, finished, lines_of, recipe_of, saved, scoring
from tests.support import tiny

HOOKS = """
def words(prompts, completions, references, times=1):
    return [times * len(text.split()) for text in completions]

def asks_for_an_even_number(prompts, completions, references):
    return [None if "3" in prompt else float("2" in prompt) for prompt in prompts]

def no_numbers(prompts, completions, references):
    return [float("inf"), float("nan"), None, 1.0, 1.0, 1.0][: len(prompts)]

def fails(prompts, completions, references):
    raise RuntimeError("no such luck")

def words_only(prompts, completions, references):
    return "many"

def too_few(prompts, completions, references):
    return [1.0]
"""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a user's functions."""
    (tmp_path / "own_functions.py").write_text(HOOKS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def loss_of(folder: str, rows: list[dict[str, Any]]) -> float:
    """Returns nats per token of completions, by a plain loop."""
    model, tokenizer = loading.load_model(folder).eval(), loading.load_tokenizer(folder)
    total, count = 0.0, 0
    for row in rows:
        head = tokenizer(f"{row['prompt']}\n")["input_ids"]
        ids = tokenizer(f"{row['prompt']}\n{row['completion']}{tokenizer.eos_token}", return_tensors="pt")["input_ids"]
        labels = torch.cat([torch.full((1, len(head)), -100), ids[:, len(head) :]], 1)
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * int((labels != -100).sum())
        count += int((labels != -100).sum())
    return total / count


def test_before_and_after_training(tiny_base: str, tmp_path: Path, hooks: None) -> None:
    functions = [
        {"use": "own_functions:words", "options": {"times": 2}},
        "own_functions:asks_for_an_even_number",
        "own_functions:no_numbers",
    ]
    metrics = ["exact_match", "numeric_match", "bleu", "chrf", "rouge"]
    recipe = recipe_of(tiny_base, metrics=metrics, functions=functions)
    run = finished(tmp_path, recipe, {"eval": CHATTY})
    found = evaluate_run(run.uri)
    assert run.require("evaluation.json") == json.loads(json.dumps(found, allow_nan=False))
    texts = {"exact_match", "numeric_match", "bleu", "chrf", "rouge1", "rouge2", "rougeL"}
    named = {"loss", "perplexity", "tokens", "words", "asks_for_an_even_number", "no_numbers"} | texts
    assert found["before"].keys() == found["after"].keys() == named
    assert found["before"]["loss"] == pytest.approx(loss_of(tiny_base, CHATTY), rel=1e-5)
    trained = saved(tiny_base, tmp_path / "trained")
    assert found["after"]["loss"] == pytest.approx(loss_of(trained, CHATTY), rel=1e-5)
    assert found["after"]["loss"] != found["before"]["loss"]
    assert (found["side"], found["production"], found["production_model"]) == ("eval", None, None)
    assert found["without_reference"] == 0
    assert found["signatures"]["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert found["parameters"] == sum(parameter.numel() for parameter in loading.load_model(tiny_base).parameters())

    examples = lines_of(run)
    assert found["examples"] == {"count": 6, "path": "examples.jsonl"}
    assert [line["number"] for line in examples] == list(range(6))
    assert [(line["prompt"], line["reference"]) for line in examples] == [
        (f"{row['prompt']}\n", row["completion"]) for row in CHATTY[:6]
    ]
    model, tokenizer = generate.load(trained)
    said = [generate.write_all(model, tokenizer, [x["prompt"]], max_new_tokens=8, max_length=64)[0] for x in examples]
    assert [line["after"] for line in examples] == said
    assert [line["before"] for line in examples] != said
    assert found["after"]["words"] == pytest.approx(sum(2 * len(text.split()) for text in said) / 6)
    assert [line["scores"]["after"]["words"] for line in examples] == [2.0 * len(text.split()) for text in said]
    # Of "0 and 0", "1 and 1", …, "5 and 5" the fourth does not count, and one in five asks for a 2.
    assert found["after"]["asks_for_an_even_number"] == pytest.approx(1 / 5)
    assert "asks_for_an_even_number" not in examples[3]["scores"]["after"]
    assert found["after"]["no_numbers"] is found["before"]["no_numbers"] is None
    assert found["not_measured"] == {when: {"no_numbers": "not finite"} for when in ("before", "after")}
    assert ["no_numbers" in line["scores"]["after"] for line in examples] == [False] * 3 + [True] * 3
    json.dumps(examples, allow_nan=False)
    better = {name: found["better"][name] for name in ("loss", "perplexity", "bleu", "words")}
    assert better == {"loss": "lower", "perplexity": "lower", "bleu": "higher", "words": None}
    assert found["samples"] == [{key: x[key] for key in ("prompt", "reference", "before", "after")} for x in examples]


def test_intervals_surround_their_figures_and_the_gain_is_paired(tiny_base: str, tmp_path: Path) -> None:
    run = finished(tmp_path, recipe_of(tiny_base, confidence=0.9), {"eval": CHATTY})
    found = evaluate_run(run.uri)
    intervals = found["intervals"]
    assert intervals.keys() == {"before", "after", "gain", "gain_on_production"}
    for when in ("before", "after"):
        for name in ("loss", "perplexity"):
            low, high = intervals[when][name]
            assert low < found[when][name] < high
    low, high = intervals["gain"]["loss"]
    assert low < found["after"]["loss"] - found["before"]["loss"] < high
    wide = intervals["after"]["loss"][1] - intervals["before"]["loss"][0]
    assert high - low < wide, "pairs take the rows' own spread out of the difference"
    assert "tokens" not in intervals["after"]


def test_test_rows_judge_the_result_where_there_are_any(tiny_base: str, tmp_path: Path) -> None:
    run = finished(tmp_path, recipe_of(tiny_base), {"eval": CHATTY[:12], "test": CHATTY[12:]})
    found = evaluate_run(run.uri)
    assert found["side"] == "test"
    assert found["before"]["loss"] == pytest.approx(loss_of(tiny_base, CHATTY[12:]), rel=1e-5)
    assert found["samples"][0]["prompt"] == f"{CHATTY[12]['prompt']}\n"
    empty = finished(tmp_path, recipe_of(tiny_base), {"eval": CHATTY[:12], "test": []}, name="empty")
    assert evaluate_run(empty.uri)["side"] == "eval"


def test_pairs_are_judged_by_what_both_models_gained_on_the_base(tiny_base: str, tmp_path: Path) -> None:
    in_use = saved(tiny_base, tmp_path / "in-use", lambda model: None)
    run = finished(tmp_path, recipe_of(tiny_base, "dpo", production=in_use, samples=2), {"eval": tiny.PAIRS})
    found = evaluate_run(run.uri)
    assert 0 < found["after"]["reward_accuracy"] < 1
    assert found["after"]["reward_margin"] != 0
    assert found["production"]["reward_accuracy"] == found["production"]["reward_margin"] == 0, "it is the base"
    assert "reward_margin" not in found["before"]
    assert all(0 <= found[when]["accuracy"] <= 1 for when in ("before", "after", "production"))
    assert found["production"]["accuracy"] == found["before"]["accuracy"]
    gained = found["intervals"]["gain_on_production"]["reward_margin"]
    assert gained == found["intervals"]["after"]["reward_margin"]
    assert "reward accuracy" in found["summary"]


def test_a_row_without_an_answer_is_counted_and_left_out(tiny_base: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": row["prompt"], "completion": row["completion"], "label": n % 3 > 0} for n, row in enumerate(CHATTY)
    ]
    run = finished(tmp_path, recipe_of(tiny_base, "kto", metrics=["exact_match"]), {"eval": rows})
    found = evaluate_run(run.uri)
    assert found["without_reference"] == 2, "the first and the fourth of six"
    assert [len(line["scores"]["after"]) for line in lines_of(run)] == [0, 1, 1, 0, 1, 1]


def test_a_teacher_is_loaded_once_for_all_that_are_judged(
    tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = saved(tiny_base, tmp_path / "teacher")
    loaded: list[str] = []
    original = AutoModelForCausalLM.from_pretrained

    def noted(folder: str, **settings: Any) -> Any:
        loaded.append(folder)
        return original(folder, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    taught = {"method": "distillation", "distillation": {"teacher": teacher, "max_completion_length": 4}}
    in_use = saved(tiny_base, tmp_path / "in-use", lambda model: None)
    recipe = tiny.recipe(tiny_base, training=taught, evaluation={"samples": 2, "production": in_use})
    run = finished(tmp_path, recipe, {"eval": [{"prompt": pair["prompt"]} for pair in tiny.PAIRS[:4]]})
    loaded.clear()
    found = evaluate_run(run.uri)
    assert loaded.count(teacher) == 1
    assert found["before"]["divergence"] == found["production"]["divergence"] > 0
    assert found["after"]["divergence"] == pytest.approx(0, abs=1e-6), "it was moved to where the teacher is"
    assert found["better"]["divergence"] == "lower"


def test_a_reward_model_is_judged_by_its_scores_and_writes_nothing(tiny_base: str, tmp_path: Path) -> None:
    in_use = scoring(tiny_base, tmp_path / "in-use")
    loading.load_tokenizer(tiny_base).save_pretrained(in_use)
    run = finished(tmp_path, recipe_of(tiny_base, "reward", production=in_use), {"eval": tiny.PAIRS})
    found = evaluate_run(run.uri)
    assert found["production"] == found["before"] != found["after"]
    assert found["examples"]["count"] == 0
    assert found["intervals"]["after"].keys() == {"loss", "accuracy", "margin"}


def test_what_is_drawn_is_the_same_each_time(tiny_base: str, tmp_path: Path) -> None:
    texts = []
    for name, size in (("one", 1), ("four", 4)):
        recipe = recipe_of(tiny_base, temperature=1.0, batch_size=size)
        run = finished(tmp_path, recipe, {"eval": CHATTY[:6]}, name=name)
        evaluate_run(run.uri)
        texts.append([line["after"] for line in lines_of(run)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("own_functions:fails", "fails failed: RuntimeError: no such luck"),
        ("own_functions:too_few", "too_few returned 1 numbers for 6 rows"),
        ("own_functions:words_only", "words_only returned 'many', expected a list of numbers"),
        ("own_functions:missing", "'own_functions:missing' does not exist"),
        ("os:getcwd", "getcwd failed: TypeError"),
        ("own_functions.inner:bleu", "has the name of another figure, 'bleu'"),
    ],
)
def test_a_function_that_does_not_do_is_named(
    function: str, message: str, tiny_base: str, tmp_path: Path, hooks: None
) -> None:
    run = finished(tmp_path, recipe_of(tiny_base, functions=[function]), {"eval": CHATTY})
    with pytest.raises(UserError, match=message):
        evaluate_run(run.uri)


def test_tasks_of_the_harness_are_figures_like_the_others(tiny_base: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").write_text(
        "task: own\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{prompt}}"\ndoc_to_choice: ["yes", "no"]\ndoc_to_target: 0\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n",
        encoding="utf-8",
    )
    (tasks / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATTY), encoding="utf-8")
    settings = {"names": ["own"], "include_path": str(tasks), "few_shot": 0}
    found = evaluate_run(finished(tmp_path, recipe_of(tiny_base, tasks=settings), {"eval": CHATTY}).uri)
    for when in ("before", "after"):
        assert math.isclose(found[when]["own.acc"] * 24, round(found[when]["own.acc"] * 24), abs_tol=1e-9)
    assert found["intervals"]["gain"]["own.acc"][0] <= found["after"]["own.acc"] - found["before"]["own.acc"]


def test_an_unfinished_run_is_told_before_anything_is_judged(tiny_base: str, tmp_path: Path) -> None:
    run = finished(tmp_path, recipe_of(tiny_base), {"eval": CHATTY})
    shutil.rmtree(tmp_path / "store/runs/r/checkpoints")
    with pytest.raises(BatonError, match="is at step 0 of 3"):
        evaluate_run(run.uri)


def test_other_code_than_the_checkpoint_was_trained_with_is_not_imported(
    tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to the store may name other code in `code.json`; a checkpoint knows what it was made of."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    mark = tmp_path / "mark"
    for name in ("judging", "theirs"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n{HOOKS}", encoding="utf-8")
    recipe = recipe_of(tiny_base, functions=["judging:words"])
    run = finished(tmp_path, recipe, {"eval": CHATTY})
    run.write_once(PinnedModels(base_sha256=None))
    user_code.ship(run, str(tmp_path / "judging.py"))
    manifest = run.storage.key(f"runs/r/checkpoints/step-{run.plan().num_steps:08}/manifest.json")
    document = json.loads(Path(manifest).read_text())
    document["meta"]["identity"] = state_identity(run, recipe, run.plan())
    Path(manifest).write_text(json.dumps(document))
    assert evaluate_run(run.uri)["after"]["words"] >= 0
    assert mark.read_text() == "judging"
    mark.unlink()
    user_code.ship(Run(run.storage, "other"), str(tmp_path / "theirs.py"))
    run.put("code.json", Run(run.storage, "other").require("code.json"))
    with pytest.raises(ExactnessError, match=r"are not those that its checkpoint of step .* was trained from"):
        evaluate_run(run.uri)
    assert not mark.exists()
