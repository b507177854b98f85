"""`baton data check` runs the real stages, shows what is wrong with rows, and touches nothing of the user's."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app

KEY = "AKIAQ3EGRIPRNLTLY5ZW"
GOOD = [
    {"question": f"What is {number} times three, asked for the {number}th time?", "response": f"It is {number * 3}."}
    for number in range(1, 121)
]
ROWS: list[Any] = [
    *GOOD,
    {"question": "Log in, please.", "response": f"Use {KEY}."},
    {"question": "Is the cafÃ© open?", "response": "It is open until six."},
    GOOD[7],
    '{"question": "broken',
    {"question": "nothing else"},
]
"""120 good rows, a secret in line 121, mojibake in line 122, line 8 again in line 123, and two unusable rows."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with `rows.jsonl` in a folder beside it that nobody may write to."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [row if isinstance(row, str) else json.dumps(row) for row in ROWS]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "rows.jsonl").chmod(0o444)
    folder.chmod(0o555)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return work


def check(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the command, and return its exit code and what it printed."""
    result = CliRunner().invoke(app, ["data", "check", *arguments, "--output", "json"])
    return result.exit_code, json.loads(result.stdout)


def found(answer: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Verdict and count of each check that found something."""
    return {
        each["name"]: (each["verdict"], each["rows"])
        for each in answer["checks"]
        if each["verdict"] not in ("ok", "off")
    }


def test_sources_are_shown_with_what_is_wrong_in_them(here: Path):
    before = Path("../data/rows.jsonl").read_bytes()

    code, answer = check(
        "../data/rows.jsonl", "--set", "data.max_rejected=0.05", "--set", "data.quality.duplicates=fix"
    )

    assert code == 0
    assert found(answer) == {
        "rejected": ("warn", 2),
        "secrets": ("warn", 1),
        "encoding": ("warn", 1),
        "duplicates": ("fixed", 1),
    }
    assert answer["state"] == "warn"
    assert answer["sentence"] == "Check unusable rows, encoding and secrets before you pay for a GPU."
    assert {name: answer["rows"][name] for name in ("looked_at", "rejected", "dropped")} == {
        "looked_at": 123, "rejected": 2, "dropped": 1,
    }  # fmt: skip
    assert answer["lengths"] is None
    page = here.parent / "cache/pages/rows-quality.html"
    assert answer["report"] == str(page)
    assert KEY not in page.read_text("utf-8")
    findings = [json.loads(line) for line in Path(answer["findings_uri"]).read_text("utf-8").splitlines()]
    assert [(line["check"], line["outcome"], line["line"]) for line in findings] == [
        ("secrets", "kept", 121),
        ("encoding", "kept", 122),
        ("duplicates", "dropped", 123),
    ]
    rejected = [json.loads(line) for line in Path(answer["rejected_uri"]).read_text("utf-8").splitlines()]
    assert [line["line"] for line in rejected] == [124, 125]
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "rows-quality.html", "rows-quality.quality.jsonl", "rows-quality.rejected.jsonl",
    ]  # fmt: skip
    assert list(here.iterdir()) == []
    assert Path("../data/rows.jsonl").read_bytes() == before
    assert [path.name for path in Path("../data").iterdir()] == ["rows.jsonl"]


@pytest.mark.slow
def test_a_recipe_is_judged_by_its_own_words_and_counted_in_tokens(here: Path):
    """Everything is looked at and told, although two settings would have ended the run early."""
    recipe = here / "recipe.yaml"
    document = {
        "name": "mine",
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {
            "source": "../data/rows.jsonl",
            "max_length": 16,
            "quality": {"secrets": "fail", "truncation": "fail"},
        },
        "training": {"max_steps": 1},
    }
    recipe.write_text(json.dumps(document), encoding="utf-8")

    code, answer = check(str(recipe), "--report", "mine.html")

    assert code == 1
    assert answer["state"] == "failed"
    verdicts = found(answer)
    assert {name: verdicts[name][0] for name in ("secrets", "truncation", "rejected")} == dict.fromkeys(
        ("secrets", "truncation", "rejected"), "failed"
    )
    assert answer["lengths"]["rows"] == 123
    assert answer["lengths"]["over"] == verdicts["truncation"][1] == 123
    page = (here / "mine.html").read_text("utf-8")
    assert "do not train" in page
    assert "123 rows (100.0%) are longer than max_length, 16 tokens." in page


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere.jsonl"], "data.source 'nowhere.jsonl' matches no file"),
        (["../data/rows.jsonl", "--method", "magic"], "training.method"),
        (["../data/rows.jsonl", "--report", "page.txt"], "report 'page.txt' does not end in .html"),
        (["recipe.yaml", "--base", "org/model"], "--base is for sources, not for a recipe"),
        (["../data/rows.jsonl", "--method", "dpo"], "has columns question, response, which fit no format that dpo"),
    ],
    ids=["no source", "no method", "no page", "an option too many", "another method's rows"],
)
def test_mistakes_are_named(here: Path, arguments: list[str], error: str):
    code, answer = check(*arguments)

    assert code == 2
    assert error in answer["error"]
    assert list(here.iterdir()) == []


def test_people_get_a_table(here: Path):
    result = CliRunner().invoke(app, ["data", "check", "../data/rows.jsonl", "--set", "data.max_rejected=0.05"])

    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("Unusable rows ! warning 2 rows (1.6%) broken JSON: Un") for line in lines)
    assert "lengths: not counted; give --base or --tokenizer" in lines
    assert "Turns ✓ fine nothing found" in lines
    assert KEY not in result.output


@pytest.mark.slow
def test_each_phase_has_its_page(here: Path):
    """The second learns preferences; its rows are too few to hold any out, which ends its split after the look."""
    (here / "pairs.jsonl").write_text(
        json.dumps({"prompt": "Why?", "chosen": "So it is.", "rejected": "Not so."}) + "\n"
    )
    document = {
        "name": "two",
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "../data/rows.jsonl", "max_rejected": 0.05},
        "training": {"max_steps": 1},
        "phases": ["sft", {"name": "dpo", "data": {"source": "pairs.jsonl"}, "training": {"method": "dpo"}}],
    }
    (here / "recipe.yaml").write_text(json.dumps(document), encoding="utf-8")

    code, answer = check("recipe.yaml")

    assert code == 1
    first, second = answer["phases"]
    assert [first["state"], second["state"]] == ["warn", "failed"]
    assert first["lengths"]["rows"] == 123
    assert "leaves no" in second["error"]
    assert found(second) == {"few_rows": ("warn", second["rows"]["train"])}
    for phase in ("sft", "dpo"):
        assert (here / f"baton-store/pages/two-quality-{phase}.html").exists()
