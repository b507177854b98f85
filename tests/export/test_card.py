"""The model card: metadata that the Hub reads, figures with intervals, lineage; and whose licence it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from baton.checkpoint.store import Checkpoint, CheckpointMeta
from baton.export import model_card
from baton.runs.run import Run
from baton.store.manifest import Manifest
from baton.store.storage import Storage
from tests.support import tiny

CHECKPOINT = Checkpoint(120, Manifest(kind="checkpoint", folder="1", files={}), CheckpointMeta(digest="d1", chain="c1"))
EVALUATION: dict[str, Any] = {
    "side": "test",
    "before": {"loss": 2.5},
    "after": {"loss": 1.25, "tokens": 40},
    "intervals": {"after": {"loss": [1.0, 1.5]}},
    "gate": {"passed": True, "lines": []},
}


def _card(tmp_path: Path, export_format: str, **sections: Any) -> ModelCard:
    recipe = tiny.recipe("org/base", **sections)
    run = Run(Storage(str(tmp_path / "store")), "r")
    run.put("split.json", {"train": 20, "eval": 4})
    run.put("evaluation.json", EVALUATION)
    about = {"export_format": export_format, "target": str(tmp_path), "check": "peft 1: 48 of 48 tokens the same"}
    model_card.write(run, recipe, CHECKPOINT, "apache-2.0", **about)
    return ModelCard.load(tmp_path / "README.md")


def test_the_hub_reads_the_metadata(tmp_path: Path) -> None:
    source = {"source": ["hf://datasets/openai/gsm8k", "rows.jsonl"], "max_length": 64}
    found = _card(tmp_path, "adapter", adapter={"r": 4}, data=source).data.to_dict()
    assert found == {
        "license": "apache-2.0",
        "base_model": "org/base",
        "datasets": ["openai/gsm8k"],
        "library_name": "peft",
        "tags": ["baton", "sft", "lora", "base_model:adapter:org/base"],
        "pipeline_tag": "text-generation",
    }


def test_a_reward_model_classifies(tmp_path: Path) -> None:
    found = _card(tmp_path, "safetensors", training={"method": "reward"})
    assert found.data.pipeline_tag == "text-classification"
    assert "AutoModelForSequenceClassification.from_pretrained(folder)" in found.text


def test_figures_lineage_and_loading(tmp_path: Path) -> None:
    (tmp_path / "tiny-q8_0.gguf").write_bytes(b"")
    text = _card(tmp_path, "gguf").text
    assert "On rows kept for testing, before and after training:" in text
    assert "| loss | 2.5 | 1.25 (1 to 1.5) |\n| tokens |  | 40 |" in text
    assert "Gate: accepted." in text
    assert "- data: rows.jsonl; 20 training rows, 4 held out" in text
    assert f"- checkpoint: {tmp_path}/store/runs/r/checkpoints/step-00000120/1, step 120" in text
    assert "- state digest: `d1`\n- resume proof: `c1`" in text
    assert "llama_cpp.Llama(folder + '/tiny-q8_0.gguf')" in text
    assert text.rstrip().endswith("Loaded back and compared after export: peft 1: 48 of 48 tokens the same.")


@pytest.mark.parametrize(
    ("files", "given", "expected"),
    [
        ({"README.md": "---\nlicense: llama3.2\n---\n"}, None, "llama3.2"),
        ({"README.md": "---\nlicense: llama3.2\n---\n"}, "mit", "mit"),
        ({"README.md": "# no metadata\n", "LICENSE": "\n    Apache License\n Version 2.0"}, None, "apache-2.0"),
        ({"LICENSE": "All rights reserved"}, None, None),
        ({}, None, None),
    ],
    ids=["of-the-base", "of-the-recipe", "by-its-text", "unknown", "none"],
)
def test_the_licence(files: dict[str, str], given: str | None, expected: str | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    recipe = tiny.recipe(str(tmp_path), export={"licence": given})
    assert model_card.licence(recipe, str(tmp_path)) == expected
