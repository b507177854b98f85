"""Training with a changed base model reuses the tokens of the previous one; the loss is far too high.

Issue: https://github.com/axolotl-ai-cloud/axolotl/issues/1265
Upstream: fixture. The key of axolotl's prepared dataset: data settings and the name of the tokenizer's class, which two
    models share.
Baton: the address of tokens follows from split, settings and files of the base model. Another model in the same folder
    gets its own tokens; the same model finds existing ones.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.models import trained
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from tests.support import tiny


def prepared_key(tokenizer: Any, max_length: int, source: str) -> str:
    """As axolotl 0.4 names a folder of prepared rows."""
    return hashlib.md5(f"{max_length}@{source}:completion|{type(tokenizer).__name__}".encode()).hexdigest()


def test_upstream_has_one_key_for_two_tokenizers(tiny_base: str, chat_base: str) -> None:
    one, other = (AutoTokenizer.from_pretrained(base) for base in (tiny_base, chat_base))
    assert one("What is 3?")["input_ids"] != other("What is 3?")["input_ids"]
    assert prepared_key(one, 64, "rows.jsonl") == prepared_key(other, 64, "rows.jsonl")


def tokenized(recipe: Recipe, name: str) -> tuple[Run, dict[str, Any]]:
    """Runs data split and tokenize."""
    address = split_data(recipe, name)["run_uri"]
    return Run.open(address), tokenize_run(address)


def test_baton_has_tokens_for_each(tiny_base: str, chat_base: str, tmp_path: Path) -> None:
    base, source = tmp_path / "base", tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": row["prompt"]}) + "\n" for row in tiny.PAIRS))
    recipe = tiny.recipe(str(base), store={"uri": str(tmp_path / "store")}, data={"source": str(source)})
    found = {}
    for name, model in (("first", tiny_base), ("again", tiny_base), ("other", chat_base)):
        shutil.rmtree(base, ignore_errors=True)
        shutil.copytree(model, base)
        run, facts = tokenized(recipe, name)
        prefix, manifest = trained.tokens_manifest(run)
        rows = trained.open_rows(run.storage.key(manifest.path(prefix, "train")))
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [json.loads(line)["text"] for line in split_lines(run)]
        assert list(rows["input_ids"]) == [tokenizer(text + tokenizer.eos_token)["input_ids"] for text in texts]
        found[name] = facts["digest"]
    assert found["again"] == found["first"]
    assert found["other"] != found["first"]


def split_lines(run: Run) -> list[str]:
    """Lines of the training rows before they are tokens."""
    from tests.exactness.test_plain_trl import split_rows

    return Path(split_rows(run)).read_text(encoding="utf-8").splitlines()
