"""`baton import` as it is called."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.app import app
from baton.importers import draft as drafts
from baton.recipe import load


def baton(*arguments: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(app, ["init", "--from", *arguments], prog_name="baton")


def refused(done: Result) -> str:
    """Check that a command failed with one message, and return it."""
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    assert done.stderr.startswith("baton: ")
    return done.stderr.removeprefix("baton: ").strip()


def test_writes_a_recipe_and_prints_what_became_of_every_key(folder: Path):
    done = baton("llamafactory", "llamafactory/dpo.yaml", "-o", "made/dpo.yaml")

    assert done.exit_code == 0, done.output
    recipe = load.load("made/dpo.yaml")
    assert recipe.data.source == ["../llamafactory/data/pairs.jsonl"]
    lines = done.stdout.splitlines()
    assert lines[0] == "made/dpo.yaml: from LLaMA-Factory's llamafactory/dpo.yaml, 23 of 25 settings carried over"
    assert lines[1] == "carried over, with a difference:"
    assert "  output_dir: saves/dpo – what a run writes goes to the store; set store, a folder or s3://bucket" in lines
    assert lines[-1] == "next: baton check made/dpo.yaml"


def test_prints_the_recipe_without_a_file(folder: Path):
    done = baton("axolotl", "axolotl/dpo.yml")

    assert done.exit_code == 0
    assert done.stdout.startswith("# Made from axolotl's dpo.yml by `baton init --from`; see docs/reference/recipe.\n")
    (folder / "printed.yaml").write_text(done.stdout, encoding="utf-8")
    assert load.load("printed.yaml").training.method == "dpo"
    assert "set elsewhere, without effect on training:" in done.stderr


def test_secrets_are_not_repeated(folder: Path):
    done = baton("llamafactory", "llamafactory/qlora_kto.yaml")

    assert "hf_do_not_repeat_me" not in done.stdout + done.stderr
    assert "hf_hub_token: (not shown)" in done.stderr


def test_does_not_write_over_a_file(folder: Path):
    (folder / "mine.yaml").write_text("mine", encoding="utf-8")

    assert refused(baton("axolotl", "axolotl/dpo.yml", "-o", "mine.yaml")) == (
        "'mine.yaml' exists already. Give another name, or remove it."
    )
    assert (folder / "mine.yaml").read_text() == "mine"


def test_a_place_that_cannot_be_written(folder: Path):
    message = refused(baton("axolotl", "axolotl/dpo.yml", "-o", "axolotl/dpo.yml/recipe.yaml"))

    there = folder / "axolotl/dpo.yml"
    assert message == f"{str(there)!r} cannot be used: File exists. Check the path and its rights."


BAD = {
    "broken": ("a: [", "'bad.yaml' is not YAML: "),
    "empty": ("", "'bad.yaml' holds nothing, expected keys and values, as axolotl reads them."),
    "list": ("- 1", "'bad.yaml' holds a list, expected keys and values, as axolotl reads them."),
    "python": ("!!python/object/apply:os.getcwd []", "'bad.yaml' is not YAML: "),
    "another's": (
        "model_name_or_path: x",
        "model_name_or_path is a key of LLaMA-Factory. Use `baton init --from llamafactory`",
    ),
    "no model": ("datasets: []", "bad.yaml: base_model is missing. Give an axolotl training file"),
    "no data": ("base_model: x", "bad.yaml: datasets is missing. Name the data sets to train on."),
    "no path": ("base_model: x\ndatasets: [{type: alpaca}]", "bad.yaml: datasets[0] has no path."),
    "in itself": ("base_model: x\ndatasets: &a [{path: *a}]", "an alias (*) repeats the section around it"),
    "invalid": (
        "base_model: x\nlearning_rate: -1\ndatasets: [{path: org/d, type: alpaca}]",
        "recipe 'made from bad.yaml' has 1 problem(s):\n  training.learning_rate: Input should be greater than 0",
    ),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_bad_file(content: str, message: str, folder: Path):
    (folder / "bad.yaml").write_text(content, encoding="utf-8")

    assert message in refused(baton("axolotl", "bad.yaml"))


def test_bytes_that_are_no_text(folder: Path):
    (folder / "bad.yaml").write_bytes(b"\xfe\x00a")

    assert refused(baton("axolotl", "bad.yaml")).startswith("'bad.yaml' is not YAML: ")


def test_no_file(folder: Path):
    assert refused(baton("llamafactory", "absent.yaml")) == (
        "'absent.yaml' is not a file. Give the path of a training file of LLaMA-Factory."
    )
    assert (
        refused(baton("axolotl", "axolotl")) == "'axolotl' is not a file. Give the path of a training file of axolotl."
    )


def test_axolotls_file_given_as_llamafactorys(folder: Path):
    assert "Use `baton init --from axolotl` for this file." in refused(baton("llamafactory", "axolotl/dpo.yml"))


@pytest.mark.parametrize("command", ["", "llamafactory", "axolotl"])
def test_help(command: str):
    done = CliRunner().invoke(app, ["import", *command.split(), "--help"], prog_name="baton")

    assert done.exit_code == 0
    assert f"Usage: baton import {command}".rstrip() in done.output


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("examples/train_lora/Llama3_Lora SFT.yaml", "llama3-lora-sft"),
        ("__.yaml", "imported"),
        (f"{'x' * 62}-y.yml", "x" * 62),
        ("Größe.yaml", "gr-e"),
    ],
)
def test_a_name_is_made_of_the_files(path: str, name: str):
    assert drafts.name_for(path) == name
