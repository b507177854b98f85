"""The section `retrain`: what goes together, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load


def test_times_are_read(scratch_recipe: dict[str, Any]) -> None:
    recipe = load.validate({**scratch_recipe, "retrain": {"expires": "90m"}}, origin="r.yaml")
    assert recipe.retrain.expires_seconds == 5400


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"retrain": {"start": "accepted"}, "phases": ["pretrain", "sft"]}, "retrain.start: several phases begin"),
        (
            {
                "retrain": {"start": "accepted"},
                "model": {"base": "org/model"},
                "adapter": {"r": 4},
                "export": {"formats": ["adapter"]},
            },
            "retrain.start: continues from the whole model; add safetensors to export.formats",
        ),
        (
            {"retrain": {"start": "accepted"}, "model": {"base": "org/model"}, "training": {"method": "reward"}},
            "retrain.start: a reward model is made of one that writes",
        ),
        ({"retrain": {"replay": 1}}, "retrain.replay: Input should be less than 1"),
        ({"retrain": {"expires": "soon"}}, "retrain.expires: is 'soon'; expected a time such as 30s, 5m, 1h"),
        ({"retrain": {"concurency": "drop"}}, "did you mean 'concurrency'?"),
    ],
    ids=["phases", "adapter", "reward", "all-old", "time", "typo"],
)
def test_what_does_not_fit_is_named(scratch_recipe: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        load.validate({**scratch_recipe, **sections}, origin="r.yaml")
    assert message in str(caught.value)
