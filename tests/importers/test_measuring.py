"""The measurement of other projects' examples: what it counts, and that it can fail."""

from pathlib import Path

import pytest
import yaml

from baton.importers import axolotl
from tests.importers.measuring import __main__ as measuring
from tests.importers.measuring import made_up, twins

EXAMPLE = {
    "base_model": "Qwen/Qwen2.5-0.5B-Instruct",
    "datasets": [{"path": "org/d", "type": "chat_template", "field_messages": "conversations"}],
    "chat_template": "qwen_25",
    "special_tokens": {"pad_token": "<|endoftext|>"},
    "eot_tokens": ["<|im_end|>"],
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_target_linear": True,
    "learning_rate": 1e-4,
    "sequence_len": 4096,
    "output_dir": "out",
}


def measured(folder: Path, changed: dict[str, object], *, steps: bool = True) -> measuring.Measured | None:
    """Returns what is measured of the example with some keys changed."""
    path = folder / "examples/one.yml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(EXAMPLE | changed), encoding="utf-8")
    return measuring.measure(axolotl.TRAINER, path, folder, folder / "twins" if steps else None)


def test_an_example_takes_two_steps(tmp_path: Path):
    made = measured(tmp_path, {})

    assert made
    assert (made.refused, made.left, made.failed) == ("", [], "")
    assert made.kept_house


def test_what_keeps_an_example_from_training_is_said(tmp_path: Path):
    made = measured(tmp_path, {"base_model": "org/Llama-2-7b", "chat_template": "tokenizer_default", "relora": True})

    assert made
    assert made.left == ["relora"]
    assert not made.kept_house
    assert "the tokenizer has no chat template" in (made.failed or "")


@pytest.mark.parametrize(
    ("changed", "refused", "sees"),
    [({"rl": "ppo"}, True, False), ({"processor_type": "AutoProcessor"}, False, True)],
    ids=["no such method", "pictures"],
)
def test_what_is_refused_takes_no_steps(changed: dict[str, object], refused: bool, sees: bool, tmp_path: Path):
    made = measured(tmp_path, changed)

    assert made
    assert (bool(made.refused), made.sees, made.failed) == (refused, sees, None)
    assert not made.kept_house


def test_a_file_for_no_training_is_none(tmp_path: Path):
    assert measured(tmp_path, {"base_model": None}) is None


def test_rows_are_in_the_shape_that_is_named():
    entry = {"type": "chat_template", "field_messages": "talk", "message_property_mappings": {"role": "from"}}

    assert [turn["from"] for turn in made_up.axolotl_row(entry, "", 0)["talk"]] == ["human", "gpt"]
    assert made_up.axolotl_row({"type": "completion", "field": "chapter"}, "", 0).keys() == {"chapter"}
    assert made_up.axolotl_row({"type": "llama3.ultra"}, "kto", 0).keys() == {"prompt", "completion", "label"}


@pytest.mark.parametrize(
    ("name", "kind"),
    {"Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe_text", "mistralai/Mixtral-8x7B-v0.1": "mixtral", "Qwen/Qwen-7B": ""}.items(),
)
def test_names_tell_architectures(name: str, kind: str):
    assert twins.architecture(name) == kind
