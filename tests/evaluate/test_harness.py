"""The LM evaluation harness on own tasks: figures by hand, for a model that says what it is told to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from baton.errors import UserError
from baton.evaluate.evaluate import Harness, _task_figures
from baton.models import loading, metrics
from baton.recipe.evaluation import Tasks
from baton.store.storage import Storage
from tests.support import tiny

pytest.importorskip("lm_eval")

CHOICES = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
WRITTEN = """
task: tiny_written
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["END"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""
PERPLEXED = """
task: tiny_perplexed
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: byte_perplexity}
"""


@pytest.fixture(scope="module")
def base(tiny_base: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """The tiny base and its tokenizer."""
    return loading.load_model(tiny_base).eval(), loading.load_tokenizer(tiny_base)


@pytest.fixture
def own_tasks(base: tuple[Any, Any], tmp_path: Path) -> Path:
    """A folder with tasks of three kinds over ten questions, of which the model finds the first seven right."""
    from baton.models import generate as generation

    model, tokenizer = base
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, text in (("choice", CHOICES), ("written", WRITTEN), ("perplexed", PERPLEXED)):
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    rows = []
    for n in range(10):
        question = tiny.PAIRS[n]["prompt"]
        choices = [tiny.PAIRS[n]["chosen"], tiny.PAIRS[n]["rejected"]]
        likeliest = max((0, 1), key=lambda at: log_likelihood(model, tokenizer, question, f" {choices[at]}"))
        said = generation.write_all(model, tokenizer, [question], max_new_tokens=8, max_length=64)[0]
        assert "END" not in said
        right = n < 7
        rows.append(
            {
                "question": question,
                "choices": choices,
                "right": likeliest if right else 1 - likeliest,
                "said": said if right else "something else",
            }
        )
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def log_likelihood(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """Returns that of an answer behind a prompt, in nats."""
    import torch

    head, whole = tokenizer(prompt)["input_ids"], tokenizer(prompt + answer)["input_ids"]
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.tensor([whole])).logits[0], -1)
    return sum(float(scores[at - 1, whole[at]]) for at in range(len(head), len(whole)))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_figures_of_own_tasks(batch_size: int, base: tuple[Any, Any], own_tasks: Path, tmp_path: Path) -> None:
    harness = Harness(Tasks(names=["tiny_choice", "tiny_written"], include_path=str(own_tasks)), str(tmp_path))
    found = harness.run(*base, batch_size)
    assert metrics.figure_values(found) == pytest.approx({"tiny_choice.acc": 0.7, "tiny_written.exact_match": 0.7})
    assert found["tiny_choice.acc"].each == [1.0] * 7 + [0.0] * 3
    low, high = metrics.intervals({"after": found}, 0.95, 0)["after"]["tiny_choice.acc"]
    assert 0.3 < low < 0.7 < high <= 1.0


def test_a_figure_that_is_no_mean_over_documents_has_no_interval(
    base: tuple[Any, Any], own_tasks: Path, tmp_path: Path
) -> None:
    """A perplexity per byte is exp(nats in all / bytes in all)."""
    harness = Harness(Tasks(names=["tiny_perplexed"], include_path=str(own_tasks)), str(tmp_path))
    found = harness.run(*base, 4)
    model, tokenizer = base
    questions = [tiny.PAIRS[n]["prompt"] for n in range(10)]
    nats = sum(log_likelihood(model, tokenizer, tokenizer.eos_token, question) for question in questions)
    expected = math.exp(-nats / sum(len(question.encode()) for question in questions))
    assert metrics.intervals({"after": found}, 0.95, 0)["after"] == {}
    assert metrics.figure_values(found) == pytest.approx({"tiny_perplexed.byte_perplexity": expected}, rel=1e-5)
    assert found["tiny_perplexed.byte_perplexity"].better == "lower"


def test_a_limit_takes_the_first_documents(base: tuple[Any, Any], own_tasks: Path, tmp_path: Path) -> None:
    harness = Harness(Tasks(names=["tiny_choice"], include_path=str(own_tasks), limit=8), str(tmp_path))
    found = harness.run(*base, 4)
    assert metrics.figure_values(found) == pytest.approx({"tiny_choice.acc": 7 / 8})


@pytest.mark.s3
def test_tasks_from_a_store(s3_store: str, base: tuple[Any, Any], own_tasks: Path, tmp_path: Path) -> None:
    for path in own_tasks.iterdir():
        Storage(s3_store).upload(str(path), f"tasks/{path.name}")
    harness = Harness(Tasks(names=["tiny_choice"], include_path=f"{s3_store}/tasks"), str(tmp_path / "scratch"))
    assert metrics.figure_values(harness.run(*base, 4)) == pytest.approx({"tiny_choice.acc": 0.7})


@pytest.mark.slow  # reads the harness's own tasks
def test_an_unknown_task_is_named_with_the_nearest_one(own_tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'tiny_chioce' is not a task of the harness. Did you mean 'tiny_choice'\?"):
        Harness(Tasks(names=["tiny_chioce"], include_path=str(own_tasks)), str(tmp_path))


def test_a_task_whose_data_is_gone_is_named(own_tasks: Path, tmp_path: Path) -> None:
    (own_tasks / "questions.jsonl").unlink()
    with pytest.raises(UserError, match=r"evaluation.tasks: tiny_choice cannot be loaded: .*questions.jsonl"):
        Harness(Tasks(names=["tiny_choice"], include_path=str(own_tasks)), str(tmp_path))


def test_a_folder_without_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no task"):
        Harness(Tasks(names=["tiny_choice"], include_path=str(tmp_path)), str(tmp_path))


def test_a_metric_with_several_filters_has_a_figure_for_each() -> None:
    results = {
        "alias": "gsm8k",
        "exact_match,strict-match": 0.25,
        "exact_match_stderr,strict-match": 0.01,
        "exact_match,flexible-extract": 0.5,
        "acc,none": 1,
        "f1,get-answer": 0.75,
        "sample_len": 4,
        "bleu,none": float("nan"),
    }
    *numbers, (name, key, value) = _task_figures("gsm8k", results)
    assert (name, key, math.isnan(value)) == ("gsm8k.bleu", "bleu,none", True)
    assert numbers == [
        ("gsm8k.exact_match.strict-match", "exact_match,strict-match", 0.25),
        ("gsm8k.exact_match.flexible-extract", "exact_match,flexible-extract", 0.5),
        ("gsm8k.acc", "acc,none", 1.0),
        ("gsm8k.f1", "f1,get-answer", 0.75),
    ]


SHOTS = """
task: tiny_shots
dataset_path: json
dataset_kwargs: {data_files: {train: shots.jsonl, test: questions.jsonl}}
test_split: test
fewshot_split: train
fewshot_config: {sampler: first_n}
num_fewshot: 2
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{said}}"
target_delimiter: ""
generation_kwargs: {until: ["END"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def _turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


@pytest.mark.parametrize("asked", ["chat", "text"])
def test_a_chat_is_asked_in_its_turns(asked: str, base: tuple[Any, Any], own_tasks: Path, tmp_path: Path) -> None:
    """Examples are turns, the system message is in front; what the model says to exactly that is what counts."""
    from baton.models import generate as generation

    model, tokenizer = base
    shots = [{"question": "What is 1 and 2?", "said": "the value"}, {"question": "What is 2?", "said": "it"}]
    questions = [json.loads(line) for line in (own_tasks / "questions.jsonl").read_text("utf-8").splitlines()]
    for row in questions:
        examples = [text for shot in shots for text in (shot["question"], shot["said"])]
        turns = [{"role": "system", "content": "Be brief."}, *_turns(*examples, row["question"])]
        prompt = generation.rendered(turns, tokenizer)
        row["said"] = generation.write_all(model, tokenizer, [prompt], max_new_tokens=8, max_length=512)[0]
    questions = [{"question": row["question"], "said": row["said"]} for row in questions]
    assert len({row["said"] for row in questions}) > 1
    for name, rows in (("shots", shots), ("questions", questions)):
        (own_tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (own_tasks / "shots.yaml").write_text(SHOTS, encoding="utf-8")
    harness = Harness(Tasks(names=["tiny_shots"], include_path=str(own_tasks)), str(tmp_path))
    found = harness.run(model, tokenizer, 4, chat=asked == "chat", system="Be brief.")
    same = metrics.figure_values(found)["tiny_shots.exact_match"]
    assert same == 1.0 if asked == "chat" else same < 0.5


def test_an_answer_ends_where_the_template_ends_it(base: tuple[Any, Any], own_tasks: Path, tmp_path: Path) -> None:
    """A model that says nothing but the end of its turn has said nothing."""
    import copy

    model, tokenizer = copy.deepcopy(base[0]), base[1]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    before = model.generation_config.eos_token_id
    spoken: list[int] = []
    generate = model.generate

    def listening(**options: Any) -> Any:
        spoken.extend(model.generation_config.eos_token_id)
        return generate(**options)

    model.generate = listening
    harness = Harness(Tasks(names=["tiny_written"], include_path=str(own_tasks), limit=1), str(tmp_path))
    harness.run(model, tokenizer, 1, chat=True)
    assert spoken == [tokenizer.eos_token_id, end]
    assert model.generation_config.eos_token_id == before


def test_a_task_that_runs_code_is_refused(base: tuple[Any, Any], own_tasks: Path, tmp_path: Path) -> None:
    path = own_tasks / "choice.yaml"
    path.write_text(path.read_text(encoding="utf-8") + "unsafe_code: true\n", encoding="utf-8")
    harness = Harness(Tasks(names=["tiny_choice"], include_path=str(own_tasks)), str(tmp_path))
    with pytest.raises(UserError, match=r"evaluation.tasks: tiny_choice cannot be run: ValueError: .*unsafe"):
        harness.run(*base, 4)
