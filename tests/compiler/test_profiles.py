"""Hardware profiles: what they choose, that the user's word wins, and where they are applied."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import machine
from baton.recipe import load
from baton.runs import ref
from baton.source import hardware, prepare

BATON = str(Path(sys.executable).parent / "baton")
ADAPTER = {"model": {"base": "org/model"}, "adapter": {"r": 8}}


def document(profile: str, **more: Any) -> dict[str, Any]:
    """A recipe that leaves to the profile what it can."""
    scratch = {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}}
    found = {"name": "tiny", "model": scratch, "data": {"source": "rows.jsonl"}, "resources": {"profile": profile}}
    return copy.deepcopy({**found, **more})


def values(found: dict[str, Any]) -> dict[str, Any]:
    """The values that profiles choose among, by path."""
    paths = {choice.path for profile in hardware.PROFILES.values() for choice in profile(True)}
    return {path: found[path.partition(".")[0]][path.partition(".")[2]] for path in paths}


FULL = {
    "cpu": {
        "training.precision": "fp32", "training.optimizer": "adamw_torch", "training.gradient_checkpointing": False,
        "training.workers": 0, "model.dtype": "float32", "model.attention": "sdpa",
        "resources.gpus": 0, "resources.cpu": "4", "resources.memory": "16Gi", "resources.shm": "2Gi",
    },
    "mps": {
        "training.precision": "fp32", "training.optimizer": "adamw_torch", "training.gradient_checkpointing": True,
        "training.workers": 0, "model.dtype": "float32", "model.attention": "sdpa",
        "resources.gpus": 0, "resources.cpu": None, "resources.memory": None, "resources.shm": "2Gi",
    },
    "cuda-small": {
        "training.precision": "bf16", "training.optimizer": "paged_adamw_8bit",
        "training.gradient_checkpointing": True, "training.workers": 2, "model.dtype": "float32",
        "model.attention": "sdpa", "resources.gpus": 1, "resources.cpu": "4", "resources.memory": "32Gi",
        "resources.shm": "8Gi",
    },
    "cuda-large": {
        "training.precision": "bf16", "training.optimizer": "adamw_torch_fused",
        "training.gradient_checkpointing": False, "training.workers": 4, "model.dtype": "float32",
        "model.attention": "sdpa", "resources.gpus": 1, "resources.cpu": "8", "resources.memory": "96Gi",
        "resources.shm": "32Gi",
    },
}  # fmt: skip


@pytest.mark.parametrize("profile", FULL)
def test_what_a_profile_chooses_for_the_full_weights(profile: str) -> None:
    found, _ = hardware.apply_profile(document(profile))
    assert values(load.validate(found, origin="r").model_dump()) == FULL[profile]


@pytest.mark.parametrize("profile", ["cuda-small", "cuda-large"])
def test_an_adapter_gets_exact_moments_on_a_base_of_16_bits(profile: str) -> None:
    found, _ = hardware.apply_profile(document(profile, **ADAPTER))
    changed = {"training.optimizer": "adamw_torch_fused", "model.dtype": "bfloat16"}
    assert values(load.validate(found, origin="r").model_dump()) == {**FULL[profile], **changed}


PHASES = {
    "each has one": (["sft", "dpo"], True),
    "one turns it off": (["sft", {"name": "dpo", "adapter": None}], False),
    "one of its own": ([{"name": "sft", "adapter": {"r": 2}}], True),
}


@pytest.mark.parametrize(("phases", "adapted"), PHASES.values(), ids=PHASES)
def test_phases_count_as_adapters_where_all_of_them_are(phases: list[Any], adapted: bool) -> None:
    found, _ = hardware.apply_profile(document("cuda-small", **ADAPTER, phases=phases))
    assert found["model"]["dtype"] == ("bfloat16" if adapted else "float32")


@pytest.mark.parametrize("profile", hardware.PROFILES)
def test_each_choice_yields_to_the_user(profile: str) -> None:
    for choice in hardware.PROFILES[profile](False):
        section, _, key = choice.path.partition(".")
        given = document(profile)
        given.setdefault(section, {})[key] = "the user's"
        found, chosen = hardware.apply_profile(given)
        assert found[section][key] == "the user's"
        assert choice.path not in [other.path for other in chosen]


def test_null_is_a_word_too() -> None:
    found, chosen = hardware.apply_profile(document("cuda-small", model={"base": "org/model", "attention": None}))
    assert found["model"]["attention"] is None
    assert "model.attention" not in [choice.path for choice in chosen]


@pytest.mark.parametrize("profile", [*hardware.PROFILES, "auto"])
def test_a_second_time_changes_nothing(profile: str) -> None:
    once, chosen = hardware.apply_profile(document(profile))
    assert chosen
    assert hardware.apply_profile(once) == (once, [])
    resolved = load.validate(once, origin="r").model_dump(mode="json")
    assert hardware.apply_profile(resolved) == (resolved, [])


def test_the_document_given_stays_as_it_is() -> None:
    given = document("cuda-small")
    before = copy.deepcopy(given)
    hardware.apply_profile(given)
    assert given == before


NONE = {
    "no profile": {"resources": {"gpus": 1}},
    "no resources": {"resources": None},
    "an unknown one": {"resources": {"profile": "tpu"}},
    "not a name": {"resources": {"profile": ["cpu"]}},
    "resources of another kind": {"resources": ["cpu"]},
    "another section of another kind": {"training": "sft"},
}


@pytest.mark.parametrize("more", NONE.values(), ids=NONE)
def test_what_is_no_profile_is_left_to_the_schema(more: dict[str, Any]) -> None:
    given = document("none", **more)
    assert hardware.apply_profile(given) == (given, [])


MACHINES = {
    "24 GB": (machine.GPU("NVIDIA L4", 24 * 10**9), False, "cuda-small"),
    "40 GB": (machine.GPU("NVIDIA A100-SXM4-40GB", 40 * 10**9), False, "cuda-large"),
    "a Mac": (None, True, "mps"),
    "neither": (None, False, "cpu"),
}


@pytest.mark.parametrize(("gpu", "mps", "profile"), MACHINES.values(), ids=MACHINES)
def test_auto_looks_at_this_machine(
    gpu: machine.GPU | None, mps: bool, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: gpu)
    monkeypatch.setattr(machine, "has_mps", lambda: mps)
    found, chosen = hardware.apply_profile(document("auto"))
    assert found == hardware.apply_profile(document(profile))[0]
    assert (chosen[0].path, chosen[0].value) == ("resources.profile", profile)
    assert chosen[0].reason.startswith("this machine has")


PODS: dict[str, tuple[dict[str, Any], str]] = {
    "no GPU": ({}, "cpu"),
    "an unknown GPU": ({"gpus": 1}, "cuda-small"),
    "24 GB": ({"gpus": 1, "gpu_memory": "24Gi"}, "cuda-small"),
    "80 GB": ({"gpus": 8, "gpu_memory": "80Gi"}, "cuda-large"),
    "a node's label": ({"gpus": 1, "node_selector": {"nvidia.com/gpu.product": "H100-SXM5"}}, "cuda-large"),
    "memory of another kind": ({"gpus": 1, "gpu_memory": ["much"]}, "cuda-small"),
}


@pytest.mark.parametrize(("resources", "profile"), PODS.values(), ids=PODS)
def test_auto_follows_the_resources_of_pods(resources: dict[str, Any], profile: str) -> None:
    found, chosen = hardware.apply_profile(document("auto", resources={"profile": "auto", **resources}), here=False)

    assert found["resources"]["profile"] == profile
    assert (chosen[0].path, chosen[0].value) == ("resources.profile", profile)


@pytest.fixture
def recipe_path(tmp_path: Path) -> str:
    """A recipe with a profile, and its rows."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n' * 20, encoding="utf-8")
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document("cuda-small", training={"workers": 1})), encoding="utf-8")
    return str(path)


def test_a_recipe_is_loaded_with_its_choices(recipe_path: str) -> None:
    loaded = prepare.load(recipe_path, ["training.precision=fp16"])
    recipe, chosen = loaded.recipe, loaded.choices
    assert (recipe.training.workers, recipe.training.precision, recipe.resources.gpus) == (1, "fp16", 1)
    assert {"training.workers", "training.precision"}.isdisjoint(choice.path for choice in chosen)
    lines = list(hardware.explain_profile(recipe, chosen))
    assert lines[0] == "profile cuda-small chose:"
    assert any(re.match(r"  training\.gradient_checkpointing: true  +activations of one block", line) for line in lines)


def test_no_profile_explains_nothing(recipe_path: str) -> None:
    unprofiled = prepare.load(recipe_path, ["resources.profile=null"])
    assert list(hardware.explain_profile(unprofiled.recipe, unprofiled.choices)) == []


def test_the_compiled_recipe_has_the_values(recipe_path: str, tmp_path: Path) -> None:
    done = _baton("compile", recipe_path, "-o", str(tmp_path / "p.yaml"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "p.yaml").read_text(encoding="utf-8")
    task = next(yaml.safe_load_all(text))["root"]["dag"]["tasks"]["data-split"]
    compiled = json.loads(ref.decode_texts(task["inputs"]["parameters"]["recipe"]["runtimeValue"]["constant"]))
    assert compiled["training"]["optimizer"] == "paged_adamw_8bit"
    assert "nvidia.com/gpu" in text


def test_auto_is_compiled_too(recipe_path: str, tmp_path: Path) -> None:
    done = _baton("compile", recipe_path, "-o", str(tmp_path / "p.yaml"), "--set", "resources.profile=auto")
    assert done.returncode == 0, done.stderr


def _baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BATON, *arguments], capture_output=True, text=True, check=False)
