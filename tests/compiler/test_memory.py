"""`baton validate` on memory: what a recipe runs on, whether it fits, and what would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import machine
from baton.recipe import load
from baton.recipe.cluster import Resources
from baton.recipe.recipe import Recipe
from baton.source import hardware

BATON = str(Path(sys.executable).parent / "baton")
LARGE = {
    "from_scratch": {
        "architecture": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "intermediate_size": 8192,
    },
    "tokenizer": {"train": {"vocab_size": 32000}},
}
"""A model of about 1.2 billion weights."""


def recipe(**sections: Any) -> Recipe:
    """A recipe of a large model on one GPU, with sections merged one deep."""
    document: dict[str, Any] = {
        "name": "large",
        "model": LARGE,
        "data": {"source": "rows.jsonl", "max_length": 2048},
        "training": {"batch_size": 32, "precision": "bf16"},
        "resources": {"gpus": 1},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section} if isinstance(section, dict) else section
    return load.validate(document, origin="large")


DEVICES: dict[str, tuple[dict[str, Any], float | None]] = {
    "told": ({"gpu_memory": "48Gi", "node_selector": {"nvidia.com/gpu.product": "Tesla-T4"}}, 48 * 2**30),
    "MiB of a label": ({"node_selector": {"nvidia.com/gpu.memory": "23034"}}, 23034 * 2**20),
    "an A100 that says it": ({"node_selector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}, 80e9),
    "an A100 that does not": ({"node_selector": {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}}, 40e9),
    "a part of one": ({"node_selector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}}, 10e9),
    "T4": ({"node_selector": {"nvidia.com/gpu.product": "Tesla-T4"}}, 16e9),
    "L40S, no L4": ({"node_selector": {"nvidia.com/gpu.product": "NVIDIA-L40S"}}, 48e9),
    "A10G": ({"node_selector": {"karpenter.k8s.aws/instance-gpu-name": "a10g"}}, 24e9),
    "RTX": ({"node_selector": {"nvidia.com/gpu.product": "NVIDIA-GeForce-RTX-4090"}}, 24e9),
    "unheard of": ({"node_selector": {"nvidia.com/gpu.product": "NVIDIA-X9"}}, None),
    "nothing said": ({}, None),
}


@pytest.mark.parametrize(("resources", "expected"), DEVICES.values(), ids=DEVICES)
def test_memory_of_the_gpu_asked_for(resources: dict[str, Any], expected: float | None) -> None:
    found = hardware.device(Resources(gpus=1, **resources))
    assert (found and found.bytes) == expected


def test_memory_of_a_pod_without_a_gpu() -> None:
    found = hardware.device(Resources(memory="16Gi", shm="2Gi"))
    assert found
    assert found.bytes == 14 * 2**30
    assert hardware.device(Resources()) is None


def test_nothing_is_imported_where_nothing_is_asked() -> None:
    code = (
        "import sys; from baton.recipe import load as recipe_file; "
        "from baton.source import hardware;"
        "r = recipe_file.validate({'name': 'x', 'model': {'base': 'a/b'}, 'data': {'source': 'x'}}, origin='x');"
        "print(list(hardware.memory_report(r)), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False False\n"


def test_what_fits_is_said_to() -> None:
    lines = list(hardware.memory_report(recipe(resources={"gpu_memory": "1Ti"})))
    assert lines[0] == "memory of one GPU, estimated:"
    assert re.fullmatch(r"  total +\d+\.\d\d GiB  of 1024\.0 GiB \(resources\.gpu_memory\): \d+%", lines[-1])
    assert sum(map(_gib, lines[1:-1])) == pytest.approx(_gib(lines[-1]), abs=0.05)


def test_what_does_not_fit_is_told_what_would() -> None:
    lines = list(hardware.memory_report(recipe(resources={"gpu_memory": "40Gi"})))
    at = lines.index("warning: this does not fit into 40.0 GiB. Smaller:")
    remedies = {line.split(":")[0].strip(): line for line in lines[at + 1 :]}
    assert set(remedies) == {
        "training.micro_batch_size", "training.gradient_checkpointing", "training.optimizer",
    }  # fmt: skip
    total = _gib(lines[at - 1])
    assert all(_gib(line) < total for line in remedies.values())
    assert re.fullmatch(
        r"  training\.micro_batch_size: [124] +\d+\.\d\d GiB  fits", remedies["training.micro_batch_size"]
    )


def test_remedies_are_true(tmp_path: Path) -> None:
    given = recipe(resources={"gpu_memory": "40Gi"})
    line = next(x for x in hardware.memory_report(given) if x.startswith("  training.micro_batch_size"))
    size = int(line.split()[1])
    smaller = recipe(resources={"gpu_memory": "40Gi"}, training={"micro_batch_size": size})
    assert _gib(list(hardware.memory_report(smaller))[-1]) == _gib(line)
    larger = recipe(resources={"gpu_memory": "40Gi"}, training={"micro_batch_size": 2 * size})
    assert any(line.startswith("warning:") for line in hardware.memory_report(larger))


def test_quantization_is_a_remedy_for_an_adapter(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=16).save_pretrained(tmp_path)
    base = {"base": str(tmp_path), "from_scratch": None, "tokenizer": None}
    lines = list(
        hardware.memory_report(recipe(model=base, resources={"gpu_memory": "4Gi"}, training={"batch_size": 1}))
    )
    assert any(line.startswith("  adapter: {r: 16}") for line in lines)
    lines = list(hardware.memory_report(recipe(model=base, adapter={"r": 16}, resources={"gpu_memory": "4Gi"})))
    assert any(line.startswith("  model.quantization: {bits: 4}") for line in lines)


def test_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: None)
    assert "of an unknown GPU; name its memory in resources.gpu_memory" in list(hardware.memory_report(recipe()))[-1]


def test_this_machine_s_gpu_where_the_recipe_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", lambda: machine.GPU("NVIDIA H200", 150 * 10**9))
    assert any("of 139.7 GiB (NVIDIA H200 of this machine)" in line for line in hardware.memory_report(recipe()))


def test_a_model_that_cannot_be_read_is_no_error() -> None:
    base = {"base": "/absent/model", "from_scratch": None, "tokenizer": None}
    (line,) = hardware.memory_report(recipe(model=base))
    assert line.startswith("memory: not estimated: the configuration of model '/absent/model' cannot be read")


def test_auto_is_estimated_at_the_whole_batch() -> None:
    lines = list(hardware.memory_report(recipe(training={"micro_batch_size": "auto"}, resources={"gpu_memory": "1Ti"})))
    whole = list(hardware.memory_report(recipe(resources={"gpu_memory": "1Ti"})))
    assert lines[1:] == whole[1:]
    assert lines[0].startswith("memory of one GPU, estimated at 32 rows per forward pass; auto takes fewer")


def test_each_phase_is_estimated() -> None:
    phases = ["pretrain", {"name": "dpo", "training": {"method": "dpo", "batch_size": 2}}]
    lines = list(hardware.memory_report(recipe(phases=phases, resources={"gpu_memory": "1Ti"})))
    heads = [line for line in lines if line.startswith("memory")]
    assert heads == ["memory of one GPU of large-pretrain, estimated:", "memory of one GPU of large-dpo, estimated:"]
    assert sum(line.startswith("  reference") for line in lines) == 1


@pytest.fixture
def recipe_path(tmp_path: Path) -> str:
    """A recipe on a small GPU, and its rows."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a b c"}\n' * 20, encoding="utf-8")
    document = {
        "name": "small", "model": LARGE, "data": {"source": "rows.jsonl", "max_length": 512},
        "resources": {"profile": "cuda-small", "node_selector": {"nvidia.com/gpu.product": "NVIDIA-L4"}},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_validate_says_what_the_profile_chose_and_what_it_takes(recipe_path: str) -> None:
    done = subprocess.run([BATON, "validate", recipe_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "profile cuda-small chose:" in lines
    assert any(line.startswith("  training.optimizer: paged_adamw_8bit") for line in lines)
    assert "memory of one GPU, estimated:" in lines
    assert any("of 22.4 GiB (nvidia.com/gpu.product: NVIDIA-L4)" in line for line in lines)


def _gib(line: str) -> float:
    match = re.search(r"(\d+\.\d\d) ([GM])iB", line)
    assert match, line
    return float(match[1]) / (1 if match[2] == "G" else 1024)
