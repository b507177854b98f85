"""A model from scratch that Transformers cannot make is named before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.models import loading
from baton.recipe.model import FromScratch

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architecture": "lama"},
        r"architecture 'lama' is not a model type of Transformers. Did you mean 'llama'",
    ),
    "setting": ({"config": {"rms_norm_ep": 1e-6}}, r"is not a setting of llama. Did you mean 'rms_norm_eps'"),
    "method": ({"config": {"save_pretrained": "x"}}, r"save_pretrained is not a setting of llama"),
    "type": ({"config": {"rms_norm_eps": "small"}}, r"makes no llama: .* 'rms_norm_eps' expected float, got str"),
    "value": (
        {"architecture": "qwen3", "config": {"layer_types": ["odd"] * 4}},
        r"makes no qwen3: .* `layer_types` entries must be in",
    ),
    "labels": ({"config": {"id2label": 3}}, r"makes no llama: 'int' object has no attribute"),
}


@pytest.mark.parametrize(("spec", "reason"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_made_is_refused(spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.from_scratch.*{reason}"):
        loading.scratch_config(FromScratch(**spec), None, 64)


def test_what_the_architecture_has_is_taken() -> None:
    config = loading.scratch_config(FromScratch(config={"rms_norm_eps": 0.25}), None, 64)
    assert (config.model_type, config.rms_norm_eps) == ("llama", 0.25)
