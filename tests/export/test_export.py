"""Exports of a model that was really trained: each loads in its own library and process, and a wrong one is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from baton.errors import BatonError, UserError
from baton.export import export, exportable, formats
from baton.export.source import ExportSource
from baton.recipe import extras
from baton.runs.run import Run
from baton.store import bundle
from baton.store.manifest import read_manifest
from tests.export.ended import CHAIN, DIGEST, ended
from tests.support import tiny

pytestmark = pytest.mark.timeout(900)  # each format is loaded in an interpreter of its own

LORA = {"adapter": {"r": 4, "target_modules": "all-linear"}}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, tiny_base: str) -> Run:
    """A run that has trained an adapter."""
    return ended(tmp_path_factory.mktemp("adapted"), tiny_base, **LORA)


def _asking(run: Run, **spec: Any) -> Run:
    """Changes what the recipe asks to be exported, which is no part of a run's identity."""
    document = run.require("recipe.json")
    document["recipe"]["export"] |= {"check_tokens": 4, **spec}
    run.put("recipe.json", document)
    return run


def _source(run: Run, scratch: Path) -> ExportSource:
    return ExportSource(run, run.recipe(), str(scratch))


def _tamper(path: Path) -> None:
    """Changes one weight a little, with everything else as it was."""
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].copy()
    tensors[name].flat[0] += np.float32(0.01)
    save_file(tensors, path, metadata={"format": "pt"})


CHAT = {"data": {"render_as": "chat", "system": "Be brief."}}


@pytest.mark.slow
def test_a_model_says_how_it_was_asked_and_ends_its_answers(tiny_base: str, tmp_path: Path) -> None:
    """In each format; what the template closes an answer with ends it for whoever loads the model."""
    from baton.models import generate, loading, prompts

    run = _asking(ended(tmp_path, tiny_base, **CHAT), formats=["safetensors", "gguf"])
    exported = export.export_run(run.uri)
    tokenizer = loading.load_tokenizer(tiny_base)
    for entry in exported.exports:
        trained = prompts.format_of_model("elsewhere", entry.uri, tokenizer)
        assert trained == prompts.PromptFormat(prompts="chat", system="Be brief.")
    model, own = generate.load(exported.model_uri)
    end = own.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == [own.eos_token_id, end]
    checkpoint = loading.load_model(_source(run, tmp_path / "scratch").folder)
    assert checkpoint.generation_config.eos_token_id == own.eos_token_id


@pytest.mark.slow
def test_what_a_killed_export_left_goes_with_the_next(adapted: Run) -> None:
    run = _asking(adapted, formats=["adapter"])
    run.storage.write(run.path("export/0123456789ab/adapter_model.safetensors"), b"half")
    export.export_run(run.uri)
    manifest = read_manifest(run.storage, run.path("export"))
    assert manifest is not None
    own = {f"{manifest.folder}/{name}" for name in manifest.files}
    assert set(run.storage.find(run.path("export"))) == {"manifest.json", "removed-0123456789ab"} | own


@pytest.mark.slow
def test_an_adapter_and_a_model_of_texts_say_how_they_were_asked(adapted: Run) -> None:
    from baton.models import prompts

    folder = export.export_run(_asking(adapted, formats=["adapter"]).uri).model_uri
    assert prompts.format_of_model(
        "elsewhere", folder, _source(adapted, Path(folder)).tokenizer
    ) == prompts.PromptFormat(prompts="prompt", separator="\n")


def test_a_whole_model_is_the_checkpoints_own_files(tiny_base: str, tmp_path: Path) -> None:
    run = _asking(ended(tmp_path, tiny_base))
    found = export.export_run(run.uri).to_json()
    folder = Path(found["model_uri"])
    checkpoint = tmp_path / "local-r/checkpoint"
    assert (folder / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert not (folder / "optimizer.pt").exists()
    assert CHAIN in (folder / "README.md").read_text(encoding="utf-8")
    (entry,) = found["exports"]
    assert "weights the same bit for bit, 12 of 12 tokens the same" in entry["checked"]["words"]
    assert entry["checked"]["tokens"] == 12  # three prompts, four tokens
    manifest = read_manifest(run.storage, run.path("export"))
    assert manifest
    assert (manifest.meta["digest"], manifest.meta["step"]) == (DIGEST, 3)
    assert run.require("export.json") == found
    assert export.export_run(run.uri).to_json() == found  # there already

    (folder / "config.json").write_bytes(b"damaged")
    again = export.export_run(run.uri).to_json()
    assert again["model_uri"] != found["model_uri"]
    assert json.loads((Path(again["model_uri"]) / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(
    ("export_format", "file"),
    [
        ("safetensors", "model.safetensors"),
        pytest.param("adapter", "adapter_model.safetensors", marks=pytest.mark.slow),
    ],
)
def test_a_weight_that_is_not_the_trained_one_does_not_count(
    export_format: str, file: str, adapted: Run, tmp_path: Path
) -> None:
    source = _source(_asking(adapted), tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    draft = formats.ExportDraft(source, str(target))
    formats.FORMATS[export_format].write(draft)
    _tamper(target / file)
    with pytest.raises(BatonError, match=f"the {export_format} export.*does not count"):
        formats.FORMATS[export_format].check(draft)


def test_what_cannot_be_loaded_back_does_not_count(adapted: Run, tmp_path: Path) -> None:
    source = _source(_asking(adapted), tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    draft = formats.ExportDraft(source, str(target))
    formats.FORMATS["safetensors"].write(draft)
    (target / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BatonError, match="the safetensors export cannot be loaded back: "):
        formats.FORMATS["safetensors"].check(draft)


def test_shards_and_type_are_as_asked(adapted: Run, tmp_path: Path) -> None:
    source = _source(_asking(adapted, dtype="bfloat16", shard_size="1MB"), tmp_path)
    formats.FORMATS["safetensors"].write(formats.ExportDraft(source, str(tmp_path)))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype.itemsize for value in subject_tensors(tmp_path)} == {2}
    _asking(adapted, dtype=None, shard_size="5GB")


def subject_tensors(folder: Path) -> list[Any]:
    """Returns the tensors of a folder's safetensors files."""
    from safetensors.torch import load_file as load

    return [tensor for path in folder.glob("*.safetensors") for tensor in load(path).values()]


def test_other_settings_get_a_place_of_their_own(adapted: Run, tmp_path: Path) -> None:
    source = _source(_asking(adapted), tmp_path)
    settings = export._settings(source, "safetensors", None)
    assert export._prefix(adapted, "export-x", settings) == adapted.path("export-x")
    (tmp_path / "one").mkdir()
    (tmp_path / "one/file").write_bytes(b"")
    bundle.publish(
        adapted.storage, adapted.path("export-x"), str(tmp_path / "one"), kind="model", meta={"settings": "f" * 64}
    )
    assert export._prefix(adapted, "export-x", settings) == adapted.path(f"export-x-{settings[:8]}")
    assert export._prefix(adapted, "export-x", "f" * 64) == adapted.path("export-x")


@pytest.mark.parametrize(
    ("sections", "architecture", "said"),
    [
        (
            {"export": {"formats": ["safetensors", "gguf"]}},
            "mamba",
            "gguf does not hold the architecture 'mamba', only",
        ),
        (
            {"export": {"formats": ["safetensors", "gguf"]}, "training": {"method": "reward"}},
            "llama",
            "a reward model scores",
        ),
        ({"export": {"formats": ["safetensors", "kserve"]}}, None, "kserve cannot fetch a model from the folder"),
        (
            {"export": {"formats": ["adapter", "kserve"]}, "store": {"uri": "s3://b"}, **LORA},
            None,
            "only the adapter is exported",
        ),
    ],
    ids=["architecture", "reward", "folder", "adapter-only"],
)
def test_what_cannot_be_handed_out_is_said_before_training(
    sections: dict[str, Any], architecture: str | None, said: str, tiny_base: str
) -> None:
    with pytest.raises(UserError, match=said):
        exportable.check(tiny.recipe(tiny_base, **sections), architecture)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exportable.PACKAGES, "gguf", ("no_such_package",))
    monkeypatch.setitem(extras.EXTRAS, "no_such_package", "export")
    with pytest.raises(UserError, match=r"needs no_such_package.*pip install 'baton-llm\[export\]'"):
        exportable.require_packages("gguf")


ALL = ["safetensors", "adapter", "gguf", "onnx", "mlflow", "oci", "kserve"]
LOADERS = {
    "safetensors": "from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])",
    "adapter": "from peft import AutoPeftModelForCausalLM as M; M.from_pretrained(sys.argv[1])",
    "gguf": "import gguf; assert gguf.GGUFReader(sys.argv[1] + '/tiny-q4_0.gguf').tensors",
    "onnx": "import onnx; onnx.checker.check_model(sys.argv[1] + '/model.onnx')",
    "mlflow": ("import mlflow; (said,) = mlflow.pyfunc.load_model(sys.argv[1]).predict(['What is 5?']); assert said"),
}


@pytest.mark.slow
def test_every_format_counts_and_loads_elsewhere(tiny_base: str, tmp_path: Path) -> None:
    run = ended(tmp_path, tiny_base, **LORA)
    spec = {"formats": ALL, "gguf": {"types": ["f32", "q4_0"]}, "kserve": {"model_uri": "oci://registry/m:1"}}
    found: Any = export.export_run(_asking(run, **spec).uri).to_json()
    by_format = {entry["format"]: entry for entry in found["exports"]}
    assert list(by_format) == ALL
    assert found["model_uri"] == by_format["safetensors"]["uri"]
    for name in ("safetensors", "adapter", "mlflow"):
        assert "weights the same bit for bit" in by_format[name]["checked"]["words"]
    files = by_format["gguf"]["checked"]["files"]
    assert files.keys() == {"tiny-f32.gguf", "tiny-q4_0.gguf"}
    assert all("weights the same bit for bit" in finding["words"] for finding in files.values())
    assert files["tiny-q4_0.gguf"]["from_trained"]["max_abs_difference"] > 1e-4
    assert files["tiny-f32.gguf"]["from_trained"]["max_abs_difference"] < 1e-4
    assert by_format["onnx"]["checked"]["max_abs_difference"] < 1e-3
    for name, code in LOADERS.items():
        command = [sys.executable, "-c", f"import sys; {code}", by_format[name]["uri"]]
        done = subprocess.run(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
    assert export.export_run(run.uri).to_json() == found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_tokens_that_an_adapter_learned_are_in_every_format(tied: bool, tmp_path: Path) -> None:
    base = tiny.make_base(tmp_path / "base", tied=tied)
    tokenizer = {"add_tokens": ["value", " Think"], "special_tokens": {"bos_token": "<s>"}, "end_of_turn": "<|im_end|>"}
    run = ended(tmp_path, base, model={"base": base, "tokenizer": tokenizer}, **LORA)
    found: Any = export.export_run(_asking(run, formats=ALL[:5], gguf={"types": ["f32", "q4_0"]}).uri).to_json()
    by_format = {entry["format"]: entry for entry in found["exports"]}
    for name in ("safetensors", "adapter", "mlflow"):
        assert "weights the same bit for bit" in by_format[name]["checked"]["words"]
    assert by_format["gguf"]["checked"]["files"]["tiny-f32.gguf"]["from_trained"]["max_abs_difference"] < 1e-4
    card = Path(by_format["adapter"]["uri"], "README.md").read_text(encoding="utf-8")
    assert "The base lacks 3 of the tokens" in card
    assert "`value`, ` Think`, `<s>`" in card
    for name in ("safetensors", "adapter"):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; {LOADERS[name]}", by_format[name]["uri"]],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    settings = json.loads(Path(by_format["safetensors"]["uri"], "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, 3]


WEIGHTS = (".gguf", ".onnx.data", "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("export_format", ["gguf", "onnx", "mlflow"])
def test_a_wrong_weight_is_noticed_in_every_format(export_format: str, adapted: Run, tmp_path: Path) -> None:
    source = _source(_asking(adapted, gguf={"types": ["f32"]}), tmp_path)
    target = tmp_path / "out"
    target.mkdir()
    draft = formats.ExportDraft(source, str(target))
    formats.FORMATS[export_format].write(draft)
    (path,) = (path for path in target.rglob("*") if path.name.endswith(WEIGHTS))
    if path.suffix == ".safetensors":
        _tamper(path)
    else:  # the weights are at the end of the file: one of them becomes another number
        data = bytearray(path.read_bytes())
        data[-4096:] = np.full(1024, 0.5, dtype=np.float32).tobytes()
        path.write_bytes(data)
    with pytest.raises(BatonError, match="does not count"):
        formats.FORMATS[export_format].check(draft)


@pytest.mark.slow
def test_a_reward_model_gives_the_same_scores(tiny_base: str, tmp_path: Path) -> None:
    run = ended(tmp_path, tiny_base, training={"method": "reward"})
    found: Any = export.export_run(_asking(run, formats=["safetensors", "onnx", "mlflow"]).uri).to_json()
    checked = [entry["checked"] for entry in found["exports"]]
    assert ["weights the same bit for bit" in entry["words"] for entry in checked] == [True, False, True]
    assert "scores compared" in checked[0]["words"]
    assert checked[1]["max_abs_difference"] < 1e-4
