"""The model in use: from wherever it is, and named where it cannot be compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from baton.data import encoding
from baton.errors import UserError
from baton.evaluate.evaluate import evaluate_run
from baton.models import generate, loading
from baton.recipe.model import TrainTokenizer
from tests.evaluate.finished import CHATTY, finished, lines_of, recipe_of, saved, scoring
from tests.support import tiny


def test_the_model_in_use_is_compared_with(tiny_base: str, tmp_path: Path) -> None:
    """It is the trained one: nothing is gained on it, for certain."""
    in_use = saved(tiny_base, tmp_path / "in-use")
    run = finished(tmp_path, recipe_of(tiny_base, production=in_use, metrics=["chrf"]), {"eval": CHATTY})
    found = evaluate_run(run.uri)
    assert found["production_model"] == in_use
    assert found["production"] == found["after"]
    assert found["intervals"]["gain_on_production"] == {name: [0.0, 0.0] for name in ("loss", "perplexity", "chrf")}
    line = lines_of(run)[0]
    assert line["production"] == line["after"]
    assert line["scores"].keys() == {"before", "after", "production"}
    assert f"(production {found['after']['loss']:.4g})" in found["summary"]


def test_a_model_in_use_with_other_tokens_is_compared_by_what_it_writes_alone(tiny_base: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "quite other words than the ones before " * 9}) + "\n", encoding="utf-8")
    in_use = saved(tiny_base, tmp_path / "in-use")
    tokenizer = encoding.train_bpe(str(rows), TrainTokenizer(vocab_size=300), 64)
    tokenizer.save_pretrained(in_use)
    run = finished(tmp_path, recipe_of(tiny_base, production=in_use, metrics=["chrf"]), {"eval": CHATTY})
    found = evaluate_run(run.uri)
    assert found["production"].keys() == {"chrf"}
    assert "another vocabulary" in found["production_model"]
    expected = generate.write_all(
        loading.load_model(in_use).eval(), tokenizer, [f"{CHATTY[0]['prompt']}\n"], max_new_tokens=8, max_length=64
    )[0]
    assert lines_of(run)[0]["production"] == expected


def bert(base: str, folder: Path) -> str:
    """Saves a model that writes nothing."""
    BertForMaskedLM(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(folder)
    return str(folder)


def torn(base: str, folder: Path) -> str:
    """Saves a model without its weights."""
    saved(base, folder)
    (folder / "model.safetensors").unlink()
    return str(folder)


def emptied(base: str, folder: Path) -> str:
    """Makes an empty folder."""
    folder.mkdir()
    return str(folder)


def gone(base: str, folder: Path) -> str:
    """Names a folder that is not there."""
    return str(folder)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bert, "is a BertForMaskedLM; expected …ForCausalLM"),
        (scoring, "is a LlamaForSequenceClassification; expected …ForCausalLM"),
        (torn, "cannot be loaded: OSError"),
        (emptied, "holds no config.json"),
        (gone, "is not a folder"),
    ],
)
def test_a_model_in_use_that_cannot_be_is_named(make: Any, message: str, tiny_base: str, tmp_path: Path) -> None:
    in_use = make(tiny_base, tmp_path / "in-use")
    run = finished(tmp_path, recipe_of(tiny_base, production=in_use), {"eval": CHATTY})
    with pytest.raises(UserError, match="in-use.*" + message.replace("…", ".")):
        evaluate_run(run.uri)
    assert run.raw("evaluation.json") is None


@pytest.mark.s3
def test_a_model_in_use_from_a_store(s3_store: str, tiny_base: str, tmp_path: Path, monkeypatch: Any) -> None:
    from baton.store.storage import Storage

    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    for path in Path(saved(tiny_base, tmp_path / "in-use")).iterdir():
        Storage(s3_store).upload(str(path), f"in-use/{path.name}")
    recipe = recipe_of(tiny_base, production=f"{s3_store}/in-use", samples=0)
    found = evaluate_run(finished(tmp_path, recipe, {"eval": CHATTY}).uri)
    assert found["production"] == found["after"]


@pytest.fixture
def registry(tiny_base: str, tmp_path: Path) -> str:
    """Tracking address of an MLflow whose registry has `ours`, version 1, alias `production`: the trained model."""
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    mlflow.set_tracking_uri(uri)
    number = mlflow.create_experiment("e", artifact_location=str(tmp_path / "artifacts"))
    folder = saved(tiny_base, tmp_path / "in-use")
    with mlflow.start_run(experiment_id=number):
        parts = {"model": loading.load_model(folder), "tokenizer": loading.load_tokenizer(folder)}
        mlflow.transformers.log_model(
            parts, name="model", registered_model_name="ours", task="text-generation", pip_requirements=["transformers"]
        )
    mlflow.MlflowClient(uri).set_registered_model_alias("ours", "production", 1)
    return uri


@pytest.mark.slow  # MLflow makes its tables first
def test_a_model_in_use_from_mlflow_s_registry(registry: str, tiny_base: str, tmp_path: Path) -> None:
    found = {}
    for name, in_use in {
        "alias": "models:/ours@production",
        "nobody": "models:/ours@nobody",
        "unknown": "models:/none@production",
    }.items():
        settings = {"samples": 2, "max_new_tokens": 8, "production": in_use}
        recipe = tiny.recipe(tiny_base, evaluation=settings, tracking={"mlflow": registry})
        found[name] = evaluate_run(finished(tmp_path, recipe, {"eval": CHATTY}, name=name).uri)
    assert found["alias"]["production_model"] == "models:/ours@production, version 1"
    assert found["alias"]["production"] == pytest.approx(found["alias"]["after"], rel=1e-4)
    for name, words in (("nobody", "models:/ours@nobody: there is none yet"), ("unknown", "models:/none@production: ")):
        assert found[name]["production"] is None
        assert found[name]["production_model"].startswith(words)
        assert (
            "gain_on_production" not in found[name]["intervals"] or not found[name]["intervals"]["gain_on_production"]
        )


def test_a_registry_needs_a_tracking_server(tiny_base: str, tmp_path: Path) -> None:
    run = finished(tmp_path, recipe_of(tiny_base, production="models:/ours@production"), {"eval": CHATTY})
    with pytest.raises(UserError, match=r"the run has no MLflow. Set tracking.mlflow"):
        evaluate_run(run.uri)
