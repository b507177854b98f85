"""Each checkpoint of a LoRA run holds the whole base model: gigabytes that no step changes.

Issue: https://github.com/dreamzero0/dreamzero/issues/90 https://github.com/MakazhanAlpamys/Soup/issues/352
Upstream: reproduced. PEFT's `inject_adapter_in_model`, as in the first report: the model is no `PeftModel`, and each
    checkpoint of Transformers' `Trainer` holds all weights. Sharded training, as in the second report, was not tried.
Baton: saves trained weights only, and the digest of the base's files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from baton.checkpoint.store import CheckpointStore
from baton.models import loading
from baton.runs.run import Run
from tests.demands import upstream


def test_upstream_saves_the_base_each_time(tmp_path: Path, legs: Any) -> None:
    code, printed = legs.leg(upstream.saved_with_an_injected_adapter, str(tmp_path))
    assert code == 0, printed
    told = upstream.read(printed)
    first, second = told["frozen"]
    assert first == second
    assert first > 10 * told["trained"]


def test_baton_saves_what_is_trained(adapted: Run, base_model: str, legs: Any) -> None:
    checkpoint = legs.final(adapted)
    folder = CheckpointStore(adapted).uri(checkpoint)
    weights = [name for name in checkpoint.manifest.files if name.endswith((".safetensors", ".bin"))]
    assert [name for name in weights if name != "training_args.bin"] == ["adapter_model.safetensors"]
    with safe_open(f"{folder}/adapter_model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    assert [name for name in sizes if "lora_" not in name] == []
    with safe_open(f"{base_model}/model.safetensors", "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert adapted.require("model.json")["base_sha256"] == loading.model_identity(base_model)
    rank = adapted.recipe().adapter.r
    adapted_to = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in sizes}
    assert sum(sizes.values()) == sum(rank * sum(shapes[f"{name}.weight"]) for name in adapted_to)
