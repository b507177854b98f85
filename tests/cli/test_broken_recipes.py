"""Recipes as people and agents break them, each repaired by what the message says and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.app import app

GOOD = """\
name: support
store: baton-store
model:
  base: models/tiny
data:
  source: data/rows.jsonl
adapter:
  type: lora
  r: 16
training:
  method: sft
  max_steps: 40
  batch_size: 8
  learning_rate: 2.0e-4
chunks:
  count: 4
  checkpoint_every: 5m
evaluation:
  gate:
    perplexity: "<= baseline * 0.98"
"""
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 300}  # fmt: skip
GATE = GOOD[GOOD.index("evaluation:") :]
Repair = Callable[[str, str], str]
"""From a recipe's text and the message to the text to try next."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, rows to answer and pairs to choose from."""
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"What is {n}?", "completion": f"It is {n}."}) for n in range(40)]
    pairs = [json.dumps({"prompt": f"What is {n}?", "chosen": f"{n}.", "rejected": "No."}) for n in range(40)]
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (tmp_path / "data" / "pairs.jsonl").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def validated(here: Path, text: str) -> tuple[int, str]:
    """Run `baton check` on a text, and return its exit code and its message."""
    (here / "recipe.yaml").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(
        app, ["check", "recipe.yaml", "--only", "recipe"], env={"NO_COLOR": "1", "COLUMNS": "300"}
    )
    assert done.exit_code == 0 or done.stderr.count("baton: ") == 1
    return done.exit_code, done.stderr


def key_meant(text: str, message: str) -> str:
    """`PATH.KEY: unknown key; did you mean 'OTHER'?`: the key is written as the message has it."""
    found = re.search(r"(?m)^ *(\S+): unknown key; did you mean '(\w+)'\?", message)
    assert found, message
    return re.sub(rf"(?m)^( *){found[1].rpartition('.')[2]}:", rf"\g<1>{found[2]}:", text)


def key_moved(text: str, message: str) -> str:
    """`KEY: unknown key; it is SECTION.KEY here`: the line goes below its section."""
    found = re.search(r"(?m)^ *(\S+): unknown key; it is (\w+)\.(\w+) here", message)
    assert found, message
    line = re.search(rf"(?m)^ *{found[1].rpartition('.')[2]}: (.*)\n", text)
    assert line
    return text.replace(line[0], "").replace(f"{found[2]}:\n", f"{found[2]}:\n  {found[3]}: {line[1]}\n")


def value_written(text: str, message: str) -> str:
    """`… (got 'VALUE'); write OTHER`, or `did you mean 'OTHER'?`: the value becomes what the message has."""
    found = re.search(r"(?:is|got|perplexity:) '([^']+)'.*(?:; write (\S+)|did you mean '([^']+)'\?)", message)
    assert found, message
    return text.replace(found[1], found[2] or found[3])


def section_written(text: str, message: str) -> str:
    """`…; write SECTION: {KEY: VALUE}`: the section becomes what the message has."""
    found = re.search(r"write ((\w+): \{.*\})", message)
    assert found, message
    return re.sub(rf"(?m)^{found[2]}: .*$", found[1], text)


def section_given(text: str, message: str) -> str:
    """`METHOD needs …; give SECTION`: it is added where the method stands."""
    found = re.search(r"give (\w+: \{.*\})", message)
    assert found, message
    return re.sub(r"(?m)^(  method: .*)$", rf"\1\n  {found[1]}", text)


def set_to(text: str, message: str) -> str:
    """`PATH.KEY: …: set it to N or less`, or `set PATH.KEY: VALUE`."""
    found = re.search(r"(?:\w+\.)(\w+): .*set it to (\d+)", message) or re.search(r"set \w+\.(\w+): (\w+)", message)
    assert found, message
    key, value = found[1], found[2]
    return re.sub(rf"(?m)^( *){key}: .*$", lambda match: f"{match[1]}{key}: {value}", text)


def path_meant(text: str, message: str) -> str:
    """`SETTING 'PATH' … Did you mean 'OTHER'?`: the path is written as the message has it."""
    found = re.search(r"'([^']+)' (?:is not a folder|matches no file).*Did you mean '([^']+)'\?", message)
    assert found, message
    return text.replace(found[1], found[2])


def address_written(text: str, message: str) -> str:
    """`PATH: the address holds a credential … Write 'ADDRESS' and …`."""
    found = re.search(r"(\w+)\.\w+: the address holds a credential.*Write '([^']+)'", message)
    assert found, message
    return re.sub(rf"(?m)^{found[1]}: .*$", f"{found[1]}: {found[2]}", text)


def line_removed(text: str, message: str) -> str:
    """`the key 'KEY' occurs twice, in line A and in line B. Remove one of them`."""
    found = re.search(r"occurs twice, in line (\d+) and in line (\d+)\. Remove one", message)
    assert found, message
    lines = text.splitlines(keepends=True)
    del lines[int(found[2]) - 1]
    return "".join(lines)


def line_written(text: str, message: str) -> str:
    """`Write line N so: LINE`."""
    found = re.search(r"Write line (\d+) so: (.*)", message)
    assert found, message
    lines = text.splitlines()
    old = lines[int(found[1]) - 1]
    lines[int(found[1]) - 1] = old[: len(old) - len(old.lstrip())] + found[2]
    return "\n".join(lines) + "\n"


def command_run(text: str, message: str) -> str:
    """`as `sed -i … FILE` does`: the command of the message is run."""
    found = re.search(r"as `(sed .*) FILE` does", message)
    assert found, message
    subprocess.run(["bash", "-c", f"{found[1]} recipe.yaml"], check=True)
    return Path("recipe.yaml").read_text(encoding="utf-8")


BROKEN: dict[str, tuple[tuple[str, ...], Repair]] = {
    "a key misspelt": (("learning_rate:", "lerning_rate:"), key_meant),
    "a key of another trainer": (("  max_steps: 40", "  num_train_epochs: 3"), key_meant),
    "a key in the wrong section": (("  learning_rate: 2.0e-4\n", ""), key_moved),
    "a number in words": (("batch_size: 8", "batch_size: 8 rows"), value_written),
    "a value misspelt": (("type: lora", "type: LoRA"), value_written),
    "an adapter's field of PEFT": (("  r: 16", "  lora_alpha: 16"), key_meant),
    "an adapter by its name alone": (("adapter:\n  type: lora\n  r: 16\n", "adapter: lora\n"), section_written),
    "a method without its section": (("  method: sft", "  method: grpo", GATE, ""), section_given),
    "a folder misspelt": (("models/tiny", "./modles/tiny"), path_meant),
    "a folder that could be a hub id": (("models/tiny", "models/tinny"), path_meant),
    "a file misspelt": (("data/rows.jsonl", "data/row.json"), path_meant),
    "more chunks than steps": (("count: 4", "count: 50"), set_to),
    "a duration in another unit": (("5m", "5min"), value_written),
    "pairs for sft": (("rows.jsonl", "pairs.jsonl"), set_to),
    "a gate the wrong way round": (('"<= baseline * 0.98"', '"<= 0.98 x baseline"'), value_written),
    "a gate without quotes": (('"<= baseline * 0.98"', ">= baseline * 0.98"), line_written),
    "keys in the address": (("store: baton-store", "store: s3://AKIAX:s3cr/et@bucket/runs"), address_written),
    "a key twice": (("chunks:\n", "  batch_size: 16\nchunks:\n"), line_removed),
    "tabs": (("  method: sft\n  max_steps", "\tmethod: sft\n\tmax_steps"), command_run),
    "a colon in a value": (
        ("data:\n", "data:\n  system: Your task: answer.\n"),
        line_written,
    ),
    "no space behind a colon": (("name: support", "name: support\nseed:7"), line_written),
}


@pytest.mark.parametrize(("change", "repair"), BROKEN.values(), ids=BROKEN)
def test_a_broken_recipe_is_repaired_from_the_message_alone(
    change: tuple[str, ...], repair: Repair, here: Path
) -> None:
    text = GOOD
    for old, new in zip(change[::2], change[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    if repair is key_moved:
        text = f"learning_rate: 2.0e-4\n{text}"
    assert text != GOOD

    code, message = validated(here, text)
    assert code == 2, message
    assert "s3cr" not in message
    code, message = validated(here, repair(text, message))

    assert code == 0, message


def test_the_good_recipe_is_valid(here: Path) -> None:
    assert validated(here, GOOD) == (0, "")
