"""`baton init` looks at rows and writes a recipe for them, which is valid as it stands."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from baton.cli.app import app
from baton.data.ingest import survey
from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.runs.documents import Survey
from baton.source import prepare, starter
from baton.source.origin import RecipeSource

BATON = Path(sys.executable).with_name("baton")
USER, ASSISTANT = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
ROWS: dict[str, list[dict[str, Any]]] = {
    "questions": [{"question": f"What is {n} and 1?", "answer": f"It is {n + 1}"} for n in range(300)],
    "talks": [{"messages": [USER, ASSISTANT, {**USER, "content": f"{n}?"}, ASSISTANT]} for n in range(300)],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": f"{n}."}]} for n in range(50)
    ],
    "instructions": [{"instruction": f"Say {n}.", "input": "", "output": f"{n}."} for n in range(300)],
    "pairs": [{"prompt": f"Say {n}.", "chosen": f"{n}.", "rejected": "No."} for n in range(300)],
    "ranked": [{"prompt": f"Say {n}.", "responses": ["No.", f"{n}."], "scores": [1, 5]} for n in range(300)],
    "rated": [{"prompt": f"Say {n}.", "completion": f"{n}.", "label": n % 3 > 0} for n in range(300)],
    "texts": [{"text": f"Some words about {n}."} for n in range(3000)],
    "sums": [{"prompt": f"What is {n} and 1?", "ground_truth": str(n + 1)} for n in range(300)],
    "prompts": [{"prompt": f"What is {n}?"} for n in range(300)],
    "odd": [{"height": n, "colour": "red"} for n in range(50)],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rows of every shape in `rows/`."""
    (tmp_path / "rows").mkdir()
    for name, rows in ROWS.items():
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / "rows" / f"{name}.jsonl").write_text(f"{lines}\n", encoding="utf-8")
    (tmp_path / "rows" / "book.txt").write_text("\n".join(f"Line {n} of a book." for n in range(300)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def init(*arguments: str) -> Result:
    """Run the command in this process, where there is no terminal."""
    return CliRunner().invoke(app, ["init", *arguments], env={"NO_COLOR": "1", "COLUMNS": "300"})


def made(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run the command with `--json`, and return what it answers and the recipe's plain values."""
    done = init(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    answer = json.loads(done.stdout)
    return answer, yaml.safe_load(answer["yaml"])


def valid(recipe: str) -> dict[str, Any]:
    """Check a recipe's text as a pipe gives it."""
    done = CliRunner().invoke(app, ["validate", "-", "--json"], input=recipe)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SUITS = {
    "questions": ("sft", "prompt-completion", ["sft", "grpo", "rloo", "distillation"]),
    "talks": ("sft", "messages", ["sft"]),
    "sharegpt": ("sft", "sharegpt", ["sft"]),
    "instructions": ("sft", "instruction", ["sft"]),
    "pairs": ("dpo", "preference", ["dpo", "kto", "grpo", "reward", "orpo", "cpo", "rloo", "distillation"]),
    "ranked": ("dpo", "ranked", ["dpo", "kto", "grpo", "reward", "orpo", "cpo", "rloo", "distillation"]),
    "rated": ("kto", "rated", ["kto", "sft", "grpo", "rloo", "distillation"]),
    "texts": ("pretrain", "text", ["sft", "pretrain"]),
    "sums": ("grpo", "prompt", ["grpo", "rloo", "distillation"]),
}


@pytest.fixture(scope="module")
def surveys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Survey]]:
    """What is found in rows of every shape."""
    folder = tmp_path_factory.mktemp("rows")
    found = {}
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        found[name] = path, survey([str(path)])
    return found


@pytest.mark.parametrize(("rows", "expected"), SUITS.items(), ids=SUITS)
def test_the_method_is_what_the_rows_serve(
    rows: str, expected: tuple[str, str, list[str]], surveys: dict[str, tuple[Path, Survey]]
) -> None:
    _, found = surveys[rows]
    method = starter.method_for(found, rows)

    assert (method, found.of(method).format, starter.usable_by(found)) == expected
    assert found.rows == len(ROWS[rows])


def fitting() -> list[tuple[str, str]]:
    """Every method with rows that serve it."""
    return [(method, rows) for rows, (_, _, methods) in SUITS.items() for method in methods]


@pytest.mark.parametrize(("method", "rows"), fitting(), ids=[f"{method} of {rows}" for method, rows in fitting()])
def test_what_it_writes_is_a_recipe(method: str, rows: str, surveys: dict[str, tuple[Path, Survey]]) -> None:
    path, found = surveys[rows]
    teacher = "Qwen/Qwen3-8B" if method == "distillation" else None
    models = [("o/m", False), ("o/m", True), *([] if teacher else [("scratch", False)])]
    for model, full in models:
        plan = starter.plan(found, method, model, full=full, teacher=teacher, lengths=[7, 9], source=rows)
        text = starter.to_yaml(plan, found, name="first", model=model, sources=[path.name])
        recipe = prepare.load(RecipeSource("first", text, str(path.parent))).localised()
        assert recipe.training.method == method
        assert bool(recipe.adapter) == (model == "o/m" and not full)
        assert max(map(len, text.splitlines())) <= 120


def test_what_it_writes_is_valid(here: Path) -> None:
    rows = "rated"
    answer, recipe = made("--data", f"rows/{rows}.jsonl", "--model", "Qwen/Qwen3-0.6B")

    assert (answer["method"], answer["format"], answer["methods"]) == SUITS[rows]
    assert recipe["data"]["source"] == f"rows/{rows}.jsonl"
    checked = valid(answer["yaml"])
    assert checked["method"] == answer["method"]
    assert checked["rows"][0].startswith(f"{rows}.jsonl holds rows of {answer['format']}")


def test_every_method_is_among_them() -> None:
    assert {method for method, _ in fitting()} == SPECS.keys()


REFUSED = {
    "pairs for sft": (
        ["--method", "sft", "--data", "rows/pairs.jsonl"],
        "sft does not learn from rows/pairs.jsonl, whose rows have columns chosen, prompt, rejected: it needs text or "
        "a prompt and a completion or messages. dpo, kto, grpo, reward, orpo, cpo, rloo, distillation would do: "
        "--method dpo.",
    ),
    "answers for dpo": (
        ["--method", "dpo", "--data", "rows/questions.jsonl"],
        "it needs chosen and rejected. sft, grpo, rloo, distillation would do: --method sft.",
    ),
    "talks for pretrain": (["--method", "pretrain", "--data", "rows/talks.jsonl"], "it needs text. sft would do"),
    "texts for kto": (
        ["--method", "kto", "--data", "rows/book.txt"],
        "it needs prompt, completion and label or chosen and rejected. sft, pretrain would do",
    ),
    "prompts alone": (
        ["--data", "rows/prompts.jsonl"],
        "holds prompts without answers, so the rows alone teach nothing. Name the method, one "
        "of grpo, rloo, distillation: grpo and rloo take rewards, distillation --teacher.",
    ),
    "rows of no shape": (
        ["--data", "rows/odd.jsonl"],
        "no training method learns from its rows (columns colour, height)",
    ),
    "no such method": (
        ["--method", "sftt", "--data", "rows/talks.jsonl"],
        "method 'sftt' is unknown; expected one of sft",
    ),
    "no such file": (["--data", "rows/talk.jsonl"], "matches no file"),
    "no data": ([], "--data is left out, and there is no terminal to ask at. Give --data rows.jsonl."),
    "no teacher": (
        ["--method", "distillation", "--data", "rows/prompts.jsonl"],
        "distillation learns from a teacher. Name it: --teacher",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_rows_cannot_serve_is_refused_with_what_would_do(arguments: list[str], message: str, here: Path) -> None:
    done = init(*arguments, "--model", "o/m", "-o", "my.yaml")

    assert done.exit_code == 2
    assert message in done.stderr
    assert not (here / "my.yaml").exists()


def test_a_model_is_needed_and_a_path_must_exist(here: Path) -> None:
    assert "--model is left out" in init("--data", "rows/talks.jsonl").stderr
    (here / "tiny").mkdir()
    assert (
        "--model './tinny' does not exist. Did you mean './tiny'?"
        in init("--data", "rows/talks.jsonl", "--model", "./tinny").stderr
    )


def test_a_file_is_not_overwritten(here: Path) -> None:
    (here / "my.yaml").write_text("mine", encoding="utf-8")
    arguments = ["--data", "rows/talks.jsonl", "--model", "o/m", "-o", "my.yaml"]

    assert "'my.yaml' exists already. Give another name, or --force to overwrite it." in init(*arguments).stderr
    assert (here / "my.yaml").read_text("utf-8") == "mine"
    assert init(*arguments, "--force").exit_code == 0
    assert load.load("my.yaml").name == "talks-sft"


def test_paths_begin_where_the_recipe_is(here: Path) -> None:
    assert init("--data", "rows/talks.jsonl", "--model", "o/m", "-o", "made/my.yaml").exit_code == 0

    assert load.load("made/my.yaml").data.source == ["../rows/talks.jsonl"]
    assert CliRunner().invoke(app, ["validate", "made/my.yaml"]).exit_code == 0


def test_comments_say_where_to_read_on(surveys: dict[str, tuple[Path, Survey]]) -> None:
    _, found = surveys["rated"]
    plan = starter.plan(found, "kto", "o/m", full=False, teacher=None, lengths=[], source="rows")
    text = starter.to_yaml(plan, found, name="first", model="o/m", sources=["rated.jsonl"])
    links = set(re.findall(r"docs/reference/recipe/(\w+\.md(?:#\w+)?)", text))
    pages = {
        f"{path.name}{anchor}"
        for path in (Path(__file__).parents[2] / "docs/reference/recipe").glob("*.md")
        for anchor in ("", *("#" + name.replace(".", "") for name in re.findall("^## (.+)$", path.read_text(), re.M)))
    }

    assert links >= {"model.md", "data.md", "adapter.md", "training.md", "training.md#trainingkto", "chunks.md"}
    assert links <= pages
    assert "kto: {undesirable_weight: 2.00}" in text, "200 good answers and 100 bad ones count alike"


def test_lengths_are_counted_where_there_is_a_tokenizer(here: Path) -> None:
    """One of a model from scratch is learned from the rows; that of a hub's model is not here, and none is fetched."""
    counted, recipe = made("--data", "rows/questions.jsonl", "--model", "scratch")
    assert counted["lengths_counted"]
    assert recipe["data"]["max_length"] == 128
    assert "# In tokens: of 200 rows half have up to" in counted["yaml"]
    guessed, _ = made("--data", "rows/questions.jsonl", "--model", "o/m")
    assert not guessed["lengths_counted"]
    assert "The tokenizer of o/m is not on this" in guessed["yaml"]


def test_steps_and_chunks_come_from_the_number_of_rows(surveys: dict[str, tuple[Path, Survey]]) -> None:
    few, many = (
        starter.plan(found, method, "o/m", full=False, teacher=None, lengths=[], source="rows")
        for found, method in ((surveys["sharegpt"][1], "sft"), (surveys["texts"][1], "pretrain"))
    )

    assert few.batch_size < many.batch_size == 32
    assert (few.held_out, many.held_out) == (5, 0.05)
    assert (few.chunks, many.chunks) == (1, 1)
    assert many.steps == 90


@pytest.mark.slow
def test_what_it_writes_trains(here: Path) -> None:
    """The tokens are as counted: what is valid also splits, tokenizes and shows its rows."""
    assert init("--data", "rows/questions.jsonl", "--model", "scratch", "-o", "my.yaml").exit_code == 0

    shown = CliRunner().invoke(app, ["data", "show", "my.yaml", "--json"])

    assert shown.exit_code == 0, shown.stderr
    assert all(0 < row["length"] <= 128 for row in json.loads(shown.stdout)["rows"])


def at_terminal(folder: Path, arguments: Sequence[str], answers: Sequence[str]) -> tuple[int, str]:
    """Run the command at a terminal, and answer when it asks; returns its exit code and what was to be seen."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [str(BATON), "init", *arguments], cwd=folder, stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TERM": "dumb"},
    )  # fmt: skip
    os.close(follower)
    seen, left = "", list(answers)
    while select.select([leader], [], [], 60)[0]:
        try:
            seen += os.read(leader, 4096).decode()
        except OSError:
            break
        if left and seen.rstrip(" ").endswith(":"):
            os.write(leader, f"{left.pop(0)}\n".encode())
            seen += "\n"
    os.close(leader)
    return process.wait(), seen


def test_a_person_is_asked_for_what_is_left_out(here: Path) -> None:
    code, seen = at_terminal(here, ["--data", "rows/pairs.jsonl"], ["orpo", "o/m", ""])

    assert code == 0, seen
    assert "Method (dpo, kto, grpo, reward, orpo, cpo, rloo, distillation) [dpo]:" in seen
    assert "Model (hub id, folder, or scratch) [Qwen/Qwen3-0.6B]:" in seen
    recipe = load.load(str(here / "pairs-orpo.yaml"))
    assert (recipe.training.method, recipe.model.base) == ("orpo", "o/m")
