"""A run from before rows of texts could become turns keeps its tokens of text, and is asked as it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.data import tokenize
from baton.errors import FormatError
from baton.models import loading, prompts
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(6)]


def split(base: str, folder: Path, name: str, **data: Any) -> Run:
    """Returns a run whose rows are split."""
    run = Run(Storage(str(folder / "store")), name)
    run.create(tiny.recipe(base, data={"separator": "###", **data}))
    rows = folder / "rows"
    rows.mkdir(exist_ok=True)
    for side in ("train", "eval"):
        (rows / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    bundle.publish(run.storage, "data/digest/split", str(rows), kind="split", meta={})
    run.set_once("data.json", {"digest": "digest", "rows": 2 * len(ROWS)})
    return run


@pytest.fixture
def old(chat_base: str, tmp_path: Path) -> Run:
    """A run as it was left then: its recipe knows of no choice, and nothing says what it was made with."""
    text = split(chat_base, tmp_path, "text", render_as="text")
    tokenize.tokenize_run(text.uri)
    run = split(chat_base, tmp_path, "old")
    head = run.require("recipe.json")
    del head["made"], head["recipe"]["data"]["render_as"]
    run.put("recipe.json", head)
    run.put("tokens.json", text.require("tokens.json"))
    return run


def test_it_keeps_its_tokens(old: Run, chat_base: str, tmp_path: Path) -> None:
    own = old.require("tokens.json")
    assert "rendered" not in own
    made = tokenize.tokenize_run(old.uri)
    assert made["digest"] == own["digest"]
    assert old.require("tokens.json") == own
    control = split(chat_base, tmp_path, "new")
    assert tokenize.tokenize_run(control.uri)["digest"] != own["digest"]
    assert control.require("tokens.json")["rendered"]


def test_it_is_asked_as_it_was_trained(old: Run, chat_base: str, tmp_path: Path) -> None:
    tokenizer = loading.load_tokenizer(chat_base)
    asked = prompts.format_of_run(old, old.recipe(), tokenizer)
    assert asked == prompts.PromptFormat(prompts="prompt", separator="###")
    assert prompts.held_out_prompts(old, old.recipe(), tokenizer, 1) == [("What is 0?###", "It is 0.")]
    control = split(chat_base, tmp_path, "new")
    tokenize.tokenize_run(control.uri)
    asked = prompts.format_of_run(control, control.recipe(), tokenizer)
    assert asked is not None
    assert asked.is_chat


def test_tokens_that_are_gone_are_not_made_otherwise(old: Run) -> None:
    prefix = old.require("tokens.json")["prefix"]
    for name in old.storage.list(prefix):
        if name.startswith("manifest"):
            (Path(old.storage.key(prefix)) / name).unlink()
    with pytest.raises(FormatError, match=r"its tokens, .*, are gone, and this Baton, .*, makes other ones\."):
        tokenize.tokenize_run(old.uri)
