"""The `baton` command where it cannot do what it is asked: exit code 2, one message, no traceback."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from baton.cli.app import app

BATON = Path(sys.executable).with_name("baton")

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 4},
    "tracking": {"mlflow": None},
}
NO_AWS = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
ENVIRONMENT = {
    **NO_AWS,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "HF_HUB_OFFLINE": "1",
    "NO_COLOR": "1",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a good recipe, its rows, and an empty file."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n' * 9, encoding="utf-8")
    (tmp_path / "empty.jsonl").touch()
    return tmp_path


def baton(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a folder."""
    return subprocess.run(
        [str(BATON), *arguments],
        cwd=folder,
        env={**ENVIRONMENT, "BATON_CACHE": str(folder / "cache"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Check that a command failed with exactly one message, and return it."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("baton: ") == 1
    return done.stderr[done.stderr.index("baton: ") + len("baton: ") :].rstrip("\n")


def refused_as_json(done: subprocess.CompletedProcess[str]) -> str:
    """Check also that the message stands in the one JSON object on standard output."""
    message = refused(done)
    assert json.loads(done.stdout) == {"state": "failed", "error": message, "exit_code": 2}
    return message


MISTAKES = {
    "no recipe": (["absent.yaml"], "recipe 'absent.yaml' is not a file. Give the path of a YAML recipe, or a name"),
    "unknown key": (
        ["recipe.yaml", "--set", "training.lerning_rate=1"],
        "training.lerning_rate: unknown key; did you mean 'learning_rate'?",
    ),
    "override of no value": (["recipe.yaml", "--set", "training"], "override 'training' is not dotted.path=value"),
    "no chunk": (["recipe.yaml", "--chunks", "0"], "chunks.count: Input should be greater than or equal to 1 (got 0)"),
    "no data file": (["recipe.yaml", "--set", "data.source=absent.jsonl"], "'absent.jsonl' matches no file"),
    "no model folder": (["recipe.yaml", "--set", "model.base=./absent"], "model.base './absent' is not a folder"),
    "unknown store": (["recipe.yaml", "--store", "ftps://host/x"], "store 'ftps://host/x' cannot be opened"),
    "no bucket named": (["recipe.yaml", "--store", "s3://"], "store 's3://' names no bucket."),
    "store is a file": (["recipe.yaml", "--store", "rows.jsonl"], "rows.jsonl': NotADirectoryError"),
    "run name": (["recipe.yaml", "--run", "Über 1"], "run name 'Über 1' is not lower-case letters, digits and dashes"),
    "no credentials": (["recipe.yaml", "--store", "s3://bucket"], "store 's3://bucket': no credentials found."),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES)
def test_run_refuses(arguments: list[str], message: str, folder: Path):
    assert message in refused_as_json(baton(folder, "run", *arguments, "--output", "json"))
    assert not (folder / "baton-store" / "runs").exists()


def test_run_refuses_in_words(folder: Path):
    done = baton(folder, "run", "absent.yaml")

    assert refused(done) == (
        "recipe 'absent.yaml' is not a file. Give the path of a YAML recipe, or a name; `baton recipe list` lists the "
        "bundled ones."
    )
    assert done.stdout == ""


def test_an_endpoint_that_does_not_answer(folder: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "very-secret", "AWS_ENDPOINT_URL": endpoint}

    done = baton(folder, "run", "recipe.yaml", "--store", "s3://bucket", "--output", "json", **keys)

    assert refused_as_json(done) == (
        f"store 's3://bucket': {endpoint} cannot be reached. Check AWS_ENDPOINT_URL and the network."
    )
    assert "very-secret" not in done.stderr


def test_rows_that_are_none(folder: Path):
    """The first that finds out is a stage, in its own process."""
    done = baton(
        folder, "run", "recipe.yaml", "--set", "data.source=empty.jsonl", "--output", "json", BATON_FORKSERVER="0"
    )

    message = refused_as_json(done)
    assert message.startswith("data split: data.source ")
    assert message.endswith("empty.jsonl' holds no rows. Check the path and data.columns.")


OTHERS = {
    "validate": (["validate", "absent.yaml"], "recipe 'absent.yaml' is not a file."),
    "compile": (["compile", "recipe.yaml", "-o", "x.json"], "output 'x.json' does not end in .yaml."),
    "prove": (["prove", "absent.yaml"], "recipe 'absent.yaml' is not a file."),
    "submit": (["submit", "absent.yaml", "--endpoint", "http://h"], "recipe 'absent.yaml' is not a file."),
    "doctor": (["doctor", "absent.yaml"], "recipe 'absent.yaml' is not a file."),
    "doctor of no recipe": (["doctor", "--set", "seed=1"], "--set changes a recipe, and none is given."),
    "list": (["checkpoints", "list", "store/runs/absent"], "store/runs/absent/recipe.json does not exist."),
    "show": (["checkpoints", "show", "nowhere"], "no run 'nowhere' was begun here, and 'baton-store' holds none."),
    "verify": (["checkpoints", "verify", "foo://x/runs/y"], "store 'foo://x' cannot be opened"),
    "prune": (["checkpoints", "prune", "store/runs/absent"], "store/runs/absent/recipe.json does not exist."),
}


@pytest.mark.parametrize(("arguments", "message"), OTHERS.values(), ids=OTHERS)
def test_other_commands_refuse(arguments: list[str], message: str, folder: Path):
    assert message in refused(baton(folder, *arguments))


def test_validate(folder: Path):
    guarded = ("--set", "training.guard.nan=true", "--set", "training.guard.skip=[2]")
    done = baton(folder, "validate", "recipe.yaml", "--set", "chunks.count=2", *guarded)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [
        "recipe.yaml is valid: tiny, sft for 4 steps at batch size 8 (1 x 8), in 2 chunk(s).",
        "guard: skips at most 3 steps whose loss or gradient norm is not finite, or whose loss is above 3 times or "
        "gradient norm is above 10 times the median of the last 100, and step 2",
    ]
    assert done.stderr == "note: `baton validate` is now `baton check`\n"


def commands(command: Any, path: str = "") -> Iterator[str]:
    """Yields every command and group, hidden ones too."""
    yield path
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, f"{path} {name}".strip())


COMMANDS = list(commands(get_command(app)))


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str):
    done = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="baton")

    assert done.exit_code == 0
    assert f"Usage: baton {command}".rstrip() in done.output


def test_the_schema_command_prints_what_json_schema_allows(folder: Path):
    done = baton(folder, "schema")
    schema = json.loads(done.stdout)
    validator = jsonschema.Draft202012Validator(schema)

    assert done.returncode == 0
    jsonschema.Draft202012Validator.check_schema(schema)
    assert [error.message for error in validator.iter_errors(RECIPE)] == []
    assert [error.message for error in validator.iter_errors({**RECIPE, "seed": -1})] == [
        "-1 is less than the minimum of 0"
    ]


def test_the_first_help_fits_a_terminal():
    done = CliRunner().invoke(app, ["-h"], prog_name="baton", env={"COLUMNS": "80"})
    lines = done.output.splitlines()

    assert len(lines) < 24, "and a prompt below it"
    assert max(map(len, lines)) <= 80
    assert "<bool>" not in done.output


def test_help_names_no_type_for_a_flag():
    assert "<bool>" not in CliRunner().invoke(app, ["run", "-h"], env={"COLUMNS": "80"}).output


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"baton {metadata.version('baton-llm')}\n"
