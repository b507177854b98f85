"""`baton data show` prints the first rows as the model sees them and writes a page of them."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app

TALK = [
    {
        "messages": [
            {"role": "user", "content": f"Wie heißt Brücke {number}?"},
            {"role": "assistant", "content": f"橋 <b>{number}</b>" + " sehr lang" * (30 if number == 2 else 0)},
        ]
    }
    for number in range(8)
]
LINES = [
    *map(json.dumps, TALK[:3]),
    '{"broken',
    '{"messages": [{"role": "user", "content": "?"}]}',
    *map(json.dumps, TALK[3:]),
]
SCRATCH = {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `talk.jsonl`, lines 4 and 5 of which cannot be used."""
    (tmp_path / "talk.jsonl").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(here: Path, name: str = "talk", **sections: Any) -> str:
    document: dict[str, Any] = {"name": name, "model": SCRATCH, "training": {"max_steps": 1}, **sections}
    document["data"] = {"source": "talk.jsonl", "max_length": 100, **sections.get("data", {})}
    (here / f"{name}.yaml").write_text(json.dumps(document), encoding="utf-8")
    return f"{name}.yaml"


def show(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", "show", *arguments])


def shown(*arguments: str) -> dict[str, Any]:
    result = show(*arguments, "--output", "json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


class Page(HTMLParser):
    """The texts of a page by the class of their element."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.classes: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.addresses += [str(known[name]) for name in ("src", "href") if name in known]
        if tag not in ("meta", "wbr", "link", "br"):
            self.classes.append(known.get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        self.classes.pop()

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.classes[-1] if self.classes else "", []).append(data)


def test_rows_are_shown_with_their_place_their_tokens_and_what_cannot_be_used(here: Path) -> None:
    answer = shown(recipe(here, data={"train_on": "assistant"}), "--rows", "4")
    rows = answer["rows"]
    assert [row["source"] for row in rows] == [
        {"file": str(here / "talk.jsonl"), "line": line} for line in (1, 2, 3, 4, 5, 6)
    ]
    assert [bool(row["rejected"]) for row in rows] == [False, False, False, True, True, False]
    assert rows[4]["rejected"] == "messages has no assistant turn"
    first = rows[0]
    assert (
        first["text"]
        == "<|im_start|>user\nWie heißt Brücke 0?<|im_end|>\n<|im_start|>assistant\n橋 <b>0</b><|im_end|>\n"
    )
    assert set(first["tokens"][0]) == {"id", "text", "trained"}
    data = "".join(token["text"] for token in first["tokens"] if token["trained"])
    assert "<b>0</b>" in data
    assert "Brücke" not in data
    assert rows[2]["kept"] == 100 < rows[2]["length"] == len(rows[2]["tokens"])
    assert "trained on" in answer["note"]

    page = Page(here / "baton-store/pages/talk-rows.html")
    assert answer["page"] == str(here / "baton-store/pages/talk-rows.html")
    assert any("橋 <b>0</b>" in text for text in page.texts["trained"])
    assert any("sehr lang" in text for text in page.texts["cut"])
    assert "messages has no assistant turn" in page.texts["why"]
    assert page.addresses == []


def test_people_read_marks_where_there_is_no_terminal(here: Path) -> None:
    result = show(recipe(here, data={"train_on": "assistant"}), "--rows", "1", "--page", "own.html")
    assert result.exit_code == 0, result.output
    assert "⟦橋 <b>0</b><|im_end|>⟧" in result.stdout
    assert f"page: {here / 'own.html'}" in result.stdout
    assert "\x1b" not in result.stdout
    assert (here / "own.html").exists()
    assert not (here / "baton-store").exists()


def test_a_side_is_that_of_the_run(here: Path) -> None:
    """The sides are the ones that the split gives these rows."""
    from baton.kfp import processes

    name = recipe(here, data={"split": {"eval": 0.4}, "max_rejected": 1.0})
    by_side = {side: shown(name, "--rows", "9", "--side", side)["rows"] for side in ("train", "eval")}
    document = json.loads((here / name).read_text("utf-8"))
    document["data"]["source"] = str(here / "talk.jsonl")
    document |= {"store": {"uri": str(here / "store")}, "tracking": {"mlflow": None}}
    (here / "own.json").write_text(json.dumps(document), encoding="utf-8")
    processes.run(processes.DATA_SPLIT, [str(here / "own.json"), "mine"], lambda _: None)
    (folder,) = (here / "store" / "data").glob("*/split")
    for side, rows in by_side.items():
        (file,) = folder.glob(f"*/{side}.jsonl")
        written = [json.loads(line)["messages"][0]["content"] for line in file.read_text("utf-8").splitlines()]
        texts = [row["text"] for row in rows if not row["rejected"]]
        assert len(texts) == len(written) > 0
        assert all(content in text for content, text in zip(written, texts, strict=True))
        assert {row["side"] for row in rows if not row["rejected"]} == {side}
        words = show(name, "--rows", "9", "--side", side).stdout
        assert re.findall(r"tokens, \d+ (\w+)", words) == [{"train": "trained", "eval": "scored"}[side]] * len(texts)


def test_sources_take_turns_and_other_methods_have_their_own_rows(here: Path) -> None:
    for file in ("a", "b"):
        rows = [{"prompt": f"{file}{n}?", "chosen": "yes, it is", "rejected": "no"} for n in range(9)]
        (here / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    name = recipe(here, data={"source": ["a.jsonl", "b.jsonl"]}, training={"method": "dpo", "max_steps": 1})
    rows = shown(name, "--rows", "3")["rows"]
    places = [(Path(row["source"]["file"]).name, row["source"]["line"], row["part"]) for row in rows]
    assert places == [
        ("a.jsonl", 1, "chosen"), ("a.jsonl", 1, "rejected"),
        ("b.jsonl", 1, "chosen"), ("b.jsonl", 1, "rejected"),
        ("a.jsonl", 2, "chosen"), ("a.jsonl", 2, "rejected"),
    ]  # fmt: skip
    page = Page(here / "baton-store/pages/talk-rows.html")
    assert [text for text in page.texts["trained"] if "yes" in text]
    result = show(name, "--rows", "1")
    assert "prompt: a0?\n" in result.stdout
    assert "chosen: ⟦yes, it is" in result.stdout


CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "Brücke"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks a word up.", "parameters": {}}}
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_instructions_become_turns_and_tools_are_seen(here: Path) -> None:
    rows = [{"instruction": "Übersetze.", "input": "Brücke", "output": "bridge"}]
    (here / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"source": "tasks.jsonl", "render_as": "chat", "system": "Be brief."}
    (row,) = shown(recipe(here, data=data))["rows"]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nÜbersetze.\n\nBrücke<|im_end|>\n"
    assert row["text"] == f"{turns}<|im_start|>assistant\nbridge<|im_end|>\n"
    assert "".join(token["text"] for token in row["tokens"] if token["trained"]) == "bridge<|im_end|>"

    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    model = {**SCRATCH, "chat_template": TEMPLATE}
    (here / "calls.jsonl").write_text(json.dumps({"messages": talk, "tools": [TOOL]}) + "\n", encoding="utf-8")
    calls = {"source": "calls.jsonl", "train_on": "assistant", "max_length": 500}
    (row,) = shown(recipe(here, model=model, data=calls))["rows"]
    assert "Looks a word up." in row["text"]
    trained = "".join(token["text"] for token in row["tokens"] if token["trained"])
    assert trained.startswith("!look_up(")
    assert trained.endswith("<|im_end|>")

    (here / "asked.jsonl").write_text(json.dumps({"prompt": talk[:1], "tools": [TOOL], "answer": "3"}) + "\n")
    training = {"method": "grpo", "max_steps": 1, "batch_size": 8, "grpo": {"rewards": "exact"}}
    asked = {"source": "asked.jsonl", "max_length": 500}
    (row,) = shown(recipe(here, model=model, data=asked, training=training))["rows"]
    assert row["text"].endswith("<user>?<|im_end|><assistant>")
    assert "Looks a word up." in row["text"]
    assert (row["part"], row["columns"]["answer"], row["learned"]) == ("prompt", "3", 0)


def test_what_a_check_mends_or_drops_is_shown_so(here: Path) -> None:
    rows = [{"text": "clean text, long enough to learn from"}, {"text": "bell\x07 and more text to learn from"}]
    (here / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    quality = {"control_characters": "fix", "language": "fix", "languages": ["en"]}
    name = recipe(here, data={"source": "text.jsonl", "quality": quality})
    assert "\x07" not in shown(name)["rows"][1]["text"]
    (here / "text.jsonl").write_text(json.dumps({"text": "Das ist ein deutscher Satz über Brücken und Wege."}) + "\n")
    (row,) = shown(name)["rows"]
    assert row["rejected"] == "data.quality.language: language de, expected en"


WRONG = {
    "side that all rows decide": (["--side", "eval", "--set", "data.split.eval=2"], "Leave out --side."),
    "page": (["--page", "rows.txt"], "does not end in .html"),
    "source": (["--set", "data.source=absent.jsonl"], "matches no file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_message(case: str, here: Path) -> None:
    arguments, message = WRONG[case]
    result = show(recipe(here), *arguments, "--output", "json")
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]
