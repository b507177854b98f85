"""What Baton hashes: every JSON text that goes into SHA-256 on the way of a run, byte for byte.

Where such a text changes, a run in the middle is refused, rows move from one side to the other, a cache is missed or a
signature breaks. `hashed_documents.json` holds the texts, so that a renamed key or a new field shows as itself.
`make golden` writes it; tests/runs/test_format_numbers.py holds what the numbers of formats stand for, and
tests/goldens/pipelines the names in compiled pipelines.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton import retrain
from baton.checkpoint import signatures
from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.export import export
from baton.recipe import load
from baton.runs.plan import Plan
from baton.runs.run import Run, Sweep, state_identity
from baton.store.manifest import Manifest
from baton.store.storage import Storage
from baton.sweep.trials import preparation_name
from tests.support import tiny

GOLDEN = Path(__file__).parent / "hashed_documents.json"
SCRATCH = {
    "from_scratch": {
        "architecture": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    "tokenizer": {"train": {"vocab_size": 300}},
}
PLAIN: dict[str, Any] = {
    "name": "golden",
    "seed": 7,
    "store": "store",
    "model": SCRATCH,
    "data": {"source": "./rows.jsonl", "columns": {"prompt": "question", "completion": "good"}},
    "training": {"batch_size": 4, "max_steps": 8, "threads": 1},
    "chunks": {"count": 2},
    "tracking": {"mlflow": None},
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapter": {
        "model": {"base": "./base"},
        "adapter": {"type": "lora", "r": 4, "alpha": 8, "dropout": 0.3, "target_modules": ["q_proj"]},
        "data": {"render_as": "chat", "system": "Be brief.", "train_on": "assistant"},
        "training": {"neftune_alpha": 5.0},
    },
    "dpo": {
        "model": {"base": "./base"},
        "data": {"columns": {"prompt": "question", "chosen": "good", "rejected": "story"}},
        "training": {"method": "dpo", "dpo": {"beta": 0.2}},
        "evaluation": {"every": 3},
    },
    "grpo": {
        "model": {"base": "./base"},
        "data": {"columns": {"prompt": "question", "answer": "good"}},
        "training": {"method": "grpo", "grpo": {"rewards": ["judging:variety"], "num_generations": 2}},
        "hooks": {"source": "judging.py"},
    },
    "pinned": {
        "data": {
            "split": {"eval": 6, "test": 4, "stratify_by": "kind"},
            "extra_columns": ["kind"],
            "max_samples": 30,
            "shuffle": True,
            "quality": {"duplicates": "fix", "truncation": "fix"},
        },
        "training": {
            "guard": {"skip": [3]},
            "curriculum": {"by": "length"},
            "parallel": {"virtual_workers": 2},
            "micro_batch_size": 2,
        },
    },
    "packed": {
        "data": {"columns": {"text": "story"}, "packing": True, "max_length": 64},
        "training": {"method": "pretrain"},
        "export": {"formats": ["safetensors", "gguf"], "dtype": "bfloat16", "licence": "mit"},
        "sweep": {"parameters": {"training.learning_rate": [1e-4, 1e-3]}},
    },
}
"""Sections beside those of `PLAIN`, merged one deep but for the model."""
MANIFEST = Manifest(
    folder="files-1",
    kind="checkpoint",
    files={"model.safetensors": {"size": 3, "sha256": "ab" * 32}, "optimizer.pt": {"size": 4, "sha256": "cd" * 32}},
    meta={
        "run": "golden", "step": 4, "chunk": 1, "identity": "e" * 64, "digest": "f" * 64, "chain": "0" * 64,
        "parent": {"step": 2, "digest": "1" * 64}, "sources": {"recipe": "2" * 64}, "state": {"weights": "3" * 64},
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model whose files are the same on every machine."""
    folder = Path(tmp_path_factory.mktemp("hashed"), "base")
    tiny.make_chat_base(folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    """The JSON texts that were hashed, in their order."""
    found: dict[str, None] = {}
    take = hashlib.sha256

    def sha256(data: Any = b"", **options: Any) -> Any:
        with contextlib.suppress(ValueError):
            text = bytes(data).decode()
            # Seals name all objects of a run, with times and writers: they decide no address and no identity.
            is_sealing = sys._getframe(1).f_code.co_filename.endswith(("seals.py", "storage.py"))
            if not is_sealing and isinstance(json.loads(text), dict | list):
                found[text] = None
        return take(data, **options)

    monkeypatch.setattr(hashlib, "sha256", sha256)
    return found


@pytest.fixture(scope="module")
def golden() -> Iterator[dict[str, Any]]:
    """Texts kept from the last look; `make golden` replaces them."""
    kept = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    yield kept
    if os.environ.get("BATON_GOLDEN"):
        GOLDEN.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compare(name: str, texts: list[str], golden: dict[str, Any], folder: Path) -> None:
    """Compares texts with those of the golden file; versions of libraries and the place of the test are left out."""
    versions = {version(package) for package in ("tokenizers", "transformers", "trl")}
    names = {str(folder): "FOLDER", **{f'"{each}"': '"VERSION"' for each in versions}}
    for before, after in names.items():
        texts = [text.replace(before, after) for text in texts]
    if os.environ.get("BATON_GOLDEN"):
        golden[name] = texts
    assert texts == golden.get(name), "run `make golden` and read the diff"


def recipe(name: str) -> dict[str, Any]:
    """Returns a recipe of the table."""
    document = copy.deepcopy(PLAIN)
    for section, values in RECIPES[name].items():
        replaces = section == "model" or section not in document
        document[section] = values if replaces else {**document[section], **values}
    return document


def write_inputs(folder: Path, base: Path) -> None:
    """Writes rows with columns for every recipe, a reward, and the base model."""
    rows = (
        {"question": f"What is {n} and 1?", "good": f"It is {n + 1}.", "story": f"{n} foxes", "kind": "ab"[n % 2]}
        for n in range(40)
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "judging.py").write_text("def variety(completions, **_):\n    return [0.0 for _ in completions]\n")
    (folder / "base").symlink_to(base)


def hashed_by(name: str, folder: Path, base: Path, hashed: dict[str, None], **changes: Any) -> list[str]:
    """Takes a recipe up to its first chunk, and returns what was hashed on the way, rows aside."""
    write_inputs(folder, base)
    document = recipe(name)
    document["data"] |= changes
    with contextlib.chdir(folder):
        given = load.validate(document, origin="golden.yaml")
        split_data(given, "golden")
        tokenize_run("store/runs/golden")
        run = Run.open("store/runs/golden")
        state_identity(run, run.recipe(), run.need(Plan))
        signatures.sources_of(run)
        signatures.statement(MANIFEST)
        if given.sweep:
            preparation_name(Sweep(Storage("store"), "golden"), given)
        source: Any = SimpleNamespace(recipe=given, digest="f" * 64)
        main: Any = SimpleNamespace(manifest=MANIFEST)
        for written in given.export.formats:
            export._settings(source, written, main)
        retrain.data_digest(given, Storage("store"))
        retrain.recipe_digest(given)
    # Rows are in the goldens of their way; a run's recipe is hashed as it was stored, whatever keys came since.
    rows = {line for path in Path(folder, "store").rglob("*.jsonl") for line in path.read_text().splitlines()}
    stored = json.dumps(json.loads((folder / "store/runs/golden/recipe.json").read_text())["recipe"], sort_keys=True)
    documents = [text for text in hashed if "\n" not in text and text not in rows | {stored}]
    # Parts of tokens have random names, `datasets` writes a random fingerprint, Transformers whether it is offline, and
    # their manifest's digest follows.
    for pattern in (
        r"(?<=\d{5})-[0-9a-f]{8}(?=\.)",
        r'(?<=state.json": {"sha256": ")[0-9a-f]{64}',
        r'(?<=tokenizer_config.json": ){[^}]*}',
        r'(?<=}, ")\w{64}(?="]$)',
    ):
        documents = [re.sub(pattern, "", text) for text in documents]
    return documents


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_run_hashes(
    name: str, base: Path, hashed: dict[str, None], golden: dict[str, Any], tmp_path: Path
) -> None:
    compare(name, hashed_by(name, tmp_path, base, hashed), golden, tmp_path)


def test_what_is_signed(golden: dict[str, Any], tmp_path: Path) -> None:
    compare("statement", [json.dumps(signatures.statement(MANIFEST), sort_keys=True)], golden, tmp_path)


@pytest.mark.skipif("BATON_GOLDEN" in os.environ, reason="the goldens are being written")
def test_another_value_is_seen(base: Path, hashed: dict[str, None], golden: dict[str, Any], tmp_path: Path) -> None:
    found = hashed_by("plain", tmp_path, base, hashed, separator=" ")
    with pytest.raises(AssertionError, match="make golden"):
        compare("plain", found, golden, tmp_path)
