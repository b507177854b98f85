"""`--json`: on every command one object on standard output, and nothing else there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from baton.cli import options
from baton.cli.app import app
from baton.cli.options import print_json
from baton.recipe import load
from baton.runs.run import Run
from baton.store.storage import Storage

BATON = Path(sys.executable).with_name("baton")
ENDPOINT = ("--endpoint", "http://127.0.0.1:9")
"""Where nothing answers."""
RECIPE: dict[str, Any] = {
    "name": "tiny",
    "store": "store",
    "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 4},
    "tracking": {"mlflow": None},
}
AXOLOTL = {"base_model": "org/model", "datasets": [{"path": "rows.jsonl", "type": "completion"}], "micro_batch_size": 1}
FACTORY = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "do_train": True,
    "dataset": "identity",
    "template": "default",
}


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every command that does something by itself, with what is typed for it."""
    for name, each in getattr(command, "commands", {}).items():
        inner = f"{path} {name}".strip()
        if not hasattr(each, "commands") or each.invoke_without_command:
            yield inner, each
        yield from commands(each, inner)


COMMANDS = dict(commands(get_command(app)))


def test_every_command_has_it() -> None:
    without = {
        name for name, command in COMMANDS.items() if not any("--json" in option.opts for option in command.params)
    }

    assert without == set()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a recipe, rows, files of other trainers, and a run that has just begun."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "words of row {n}"}}\n' for n in range(60)), "utf-8")
    (tmp_path / "axolotl.yml").write_text(yaml.safe_dump(AXOLOTL), encoding="utf-8")
    (tmp_path / "factory.yaml").write_text(yaml.safe_dump(FACTORY), encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"identity": {"file_name": "rows.jsonl"}}), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("BATON_KFP_ENDPOINT", "KF_PIPELINES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    run = Run(Storage(str(tmp_path / "store")), "begun")
    run.create(load.load("recipe.yaml"))
    return tmp_path


DONE: dict[str, tuple[list[str], dict[str, Any]]] = {
    "check": (["recipe.yaml", "--only", "recipe"], {"state": "ready", "method": "sft", "problems": []}),
    "kfp compile": (["recipe.yaml", "-o", "package.yaml"], {"state": "compiled", "package": "package.yaml"}),
    "recipe list": ([], {}),
    "recipe show": (["quickstart"], {"name": "quickstart", "method": "sft"}),
    "recipe schema": ([], {"title": "Recipe"}),
    "runs graph": (["begun", "--store", "store"], {}),
    "status": (["store/runs/begun"], {"run": "begun", "state": "new", "step": 0}),
    "runs show": (["store/runs/begun"], {"run": "begun", "checkpoints": []}),
    "verify checkpoints": (["store/runs/begun"], {"checkpoints": []}),
    "verify run": (["store/runs/begun"], {"ok": True}),
    "verify keys new": (["own.key"], {}),
    "validate": (["recipe.yaml"], {"state": "valid", "method": "sft", "rows": ["rows.jsonl holds rows of text"]}),
    "compile": (["recipe.yaml", "-o", "package.yaml"], {"state": "compiled", "package": "package.yaml", "chunks": 1}),
    "schema": ([], {"title": "Recipe"}),
    "recipes": ([], {}),
    "recipes list": ([], {}),
    "recipes show": (["quickstart"], {"name": "quickstart", "method": "sft"}),
    "init": (["--data", "rows.jsonl", "--model", "scratch"], {"state": "made", "method": "pretrain", "rows": 60}),
    "import axolotl": (["axolotl.yml", "-o", "a.yaml"], {"state": "imported", "recipe": "a.yaml"}),
    "import llamafactory": (["factory.yaml"], {"state": "imported", "recipe": None}),
    "data check": (["rows.jsonl", "--method", "pretrain"], {"run": "rows"}),
    "data show": (["recipe.yaml", "--rows", "2"], {"recipe": "tiny", "method": "sft"}),
    "doctor": (["recipe.yaml"], {"ok": True}),
    "runs list": (["--store", "store"], {}),
    "runs tree": (["begun", "--store", "store"], {}),
    "checkpoints list": (["store/runs/begun"], {"checkpoints": []}),
    "checkpoints verify": (["store/runs/begun"], {"checkpoints": []}),
    "keys new": (["own.key"], {}),
}
"""Command → its arguments, and some of what it answers."""
FAILED: dict[str, tuple[list[str], str]] = {
    "run": (["absent.yaml"], "recipe 'absent.yaml' is not a file"),
    "prove": (["recipe.yaml", "--set", "trainin.epochs=1"], "trainin: unknown key; did you mean 'training'?"),
    "drill": (
        ["recipe.yaml", "--chunks", "9"],
        "chunks.count: 9 chunks for 4 steps; at most one per step: set it to 4",
    ),
    "retrain": (["recipe.yaml", "--store", "ftps://host/x"], "store 'ftps://host/x' cannot be opened"),
    "ci-report": (["recipe.yaml"], "expected one of --id and --result"),
    "generate": (["./absent", "--prompt", "x"], "absent"),
    "verify chunks": (["recipe.yaml", "--set", "trainin.epochs=1"], "trainin: unknown key; did you mean 'training'?"),
    "verify kills": (["recipe.yaml", "--chunks", "9"], "chunks.count: 9 chunks for 4 steps"),
    "verify replay": (["store/runs/absent"], "absent/recipe.json does not exist"),
    "verify decisions": (["store/sweeps/absent", "--key", "absent.key"], "key 'absent.key' cannot be read"),
    "verify exports": (["store/runs/begun"], "has no export"),
    "verify signature": (["store/runs/begun", "--output", "out"], "has no whole checkpoint"),
    "verify keys show": (["absent.key"], "key 'absent.key' cannot be read"),
    "runs remove": (["store/runs/absent"], "absent/recipe.json does not exist"),
    "runs prune": (["store/runs/absent"], "absent/recipe.json does not exist"),
    "runs merge": (["store/runs/begun", "--output", "out"], "has no whole checkpoint"),
    "kfp submit": (["recipe.yaml"], "no Kubeflow endpoint is given"),
    "kfp heal": ([*ENDPOINT], "127.0.0.1:9"),
    "kfp schedule": (["recipe.yaml", "--cron", "never", *ENDPOINT], "never"),
    "kfp schedules": ([*ENDPOINT], "127.0.0.1:9"),
    "kfp unschedule": (["tiny", *ENDPOINT], "127.0.0.1:9"),
    "kfp summary": (["recipe.yaml"], "expected one of --id and --result"),
    "outcome": (["recipe.yaml"], "expected one of --id and --result"),
    "submit": (["absent.yaml", *ENDPOINT], "recipe 'absent.yaml' is not a file"),
    "demo": (["--store", "ftps://host/x"], "store 'ftps://host/x' cannot be opened"),
    "logs": (["store/runs/begun"], "no log of run 'begun' is on this machine"),
    "open": (["store/runs/begun"], "run 'begun' has no report; its state is new"),
    "watch": (["store/runs/absent"], "absent/recipe.json does not exist"),
    "stop": (["store/runs/begun"], "run 'begun' does not run on this machine"),
    "diff": (["store/runs/begun", "store/runs/absent"], "absent/recipe.json does not exist"),
    "cancel": (["x", *ENDPOINT], "127.0.0.1:9"),
    "retry": (["x", *ENDPOINT], "127.0.0.1:9"),
    "schedule": (["recipe.yaml", "--cron", "never", *ENDPOINT], "never"),
    "schedules list": ([*ENDPOINT], "127.0.0.1:9"),
    "schedules delete": (["tiny", *ENDPOINT], "127.0.0.1:9"),
    "checkpoints show": (["store/runs/begun"], "begun' has no checkpoint."),
    "checkpoints prune": (["store/runs/absent"], "absent/recipe.json does not exist"),
    "checkpoints signature": (["store/runs/begun", "--output", "out"], "has no whole checkpoint"),
    "keys show": (["absent.key"], "key 'absent.key' cannot be read"),
    "audit": (["store/runs/absent"], "absent/recipe.json does not exist"),
    "checkpoints merge": (["store/runs/begun", "--output", "out"], "has no whole checkpoint"),
    "runs fork": (["begun", "--store", "store"], "checkpoint"),
    "sweep run": (["recipe.yaml"], "sweep"),
    "sweep status": (["store/sweeps/absent"], "absent"),
    "sweep watch": (["store/sweeps/absent"], "absent"),
    "sweep stop": (["store/sweeps/absent", "t000"], "absent"),
    "sweep resume": (["store/sweeps/absent", "t000"], "absent"),
    "sweep fork": (["store/sweeps/absent", "t000"], "absent"),
}
"""Command → arguments that it cannot do with, and some of what it says."""


def test_each_of_them_is_run_here() -> None:
    assert DONE.keys() | FAILED.keys() == COMMANDS.keys()


def answer(name: str, arguments: list[str]) -> tuple[int, dict[str, Any]]:
    """Run a command, and return its exit code and the one object that it printed."""
    done = CliRunner().invoke(app, [*name.split(), *arguments, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return done.exit_code, found


@pytest.mark.parametrize(("name", "arguments", "expected"), [(name, *case) for name, case in DONE.items()], ids=DONE)
def test_what_is_done_is_one_object(name: str, arguments: list[str], expected: dict[str, Any], here: Path) -> None:
    code, found = answer(name, arguments)

    assert code == 0, found
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(("name", "arguments", "message"), [(name, *case) for name, case in FAILED.items()], ids=FAILED)
def test_what_fails_is_one_object(name: str, arguments: list[str], message: str, here: Path) -> None:
    code, found = answer(name, arguments)

    assert code in (1, 2)
    assert found["state"] == "failed"
    assert message in found["error"]
    assert found["exit_code"] == code


def test_lists_hold_what_there_is(here: Path) -> None:
    assert [run["name"] for run in answer("runs list", ["--store", "store"])[1]["runs"]] == ["begun"]
    assert [run["name"] for run in answer("runs tree", ["begun", "--store", "store"])[1]["runs"]] == ["begun"]
    assert {"quickstart", "sweep"} <= {recipe["name"] for recipe in answer("recipes", [])[1]["recipes"]}
    assert answer("init", ["--list"]) == answer("recipe list", [])
    made = answer("import axolotl", ["axolotl.yml"])[1]
    assert answer("init", ["--from", "axolotl", "axolotl.yml"])[1] == made
    assert yaml.safe_load(made["yaml"])["model"]["base"] == "org/model"
    assert made["report"][0].startswith("axolotl")


def test_what_other_tools_call_a_command_is_found(here: Path) -> None:
    assert answer("train", ["absent.yaml"]) == answer("run", ["absent.yaml"])
    assert answer("report", ["store/runs/begun"]) == answer("open", ["store/runs/begun"])


WORDS = {
    "an unknown command": (["vlidate"], "No such command 'vlidate'. Did you mean 'validate'?"),
    "a command that went": (["serve", "org/model"], "`baton serve` is gone: run `vllm serve` or `transformers serve`"),
    "one of a group": (["sweep", "submit", "x.yaml"], "is gone: run `baton kfp submit RECIPE --pipeline sweep`."),
    "an unknown option": (["validate", "x.yaml", "--sett", "a=1"], "No such option: --sett"),
    "a file without a tool": (["init", "x.yml"], "FILE and --from need each other."),
    "no argument": (["validate"], "Missing argument 'RECIPE'"),
    "a number that is none": (["drill", "x.yaml", "--kills", "many"], "--kills"),
}


@pytest.mark.parametrize(("words", "message"), WORDS.values(), ids=WORDS)
def test_words_that_are_wrong_are_one_object_too(words: list[str], message: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(BATON), *words, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert (found["state"], found["exit_code"]) == ("failed", 2)
    assert message in found["error"]
    assert message in done.stderr


def test_output_json_is_the_same(here: Path) -> None:
    def printed(*words: str) -> Any:
        return json.loads(CliRunner().invoke(app, ["runs", "list", "--store", "store", *words]).stdout)

    assert printed("--json") == printed("--output", "json") == printed("--output=json", "--json")


FORMER = {
    "an option": (["runs", "fork", "begun", "--store", "store", "--cold"], "--weights-only", "no checkpoint"),
    "another": (["runs", "fork", "begun", "--start", "--store", "store"], "--run-now", "no checkpoint"),
}


@pytest.mark.parametrize(("words", "today", "message"), FORMER.values(), ids=FORMER)
def test_words_of_earlier_releases_mean_what_they_did(words: list[str], today: str, message: str, here: Path) -> None:
    done = CliRunner().invoke(app, [*words, "--output", "json"])
    former = next(word for word in words if word in ("--cold", "--start"))

    assert f"note: {former} is called {today} now" in done.stderr
    assert message in json.loads(done.stdout)["error"]


MOVED = {
    "a command": (["outcome", "recipe.yaml"], "note: `baton outcome` is now `baton kfp summary`"),
    "one of a group": (
        ["import", "axolotl", "axolotl.yml"],
        "is now `baton init --from axolotl`",
    ),
    "a bare group": (["recipes"], "note: `baton recipes` is now `baton recipe list`"),
    "one of a hidden group": (["checkpoints", "list", "store/runs/begun"], "is now `baton runs show`"),
}


@pytest.mark.parametrize(("words", "note"), MOVED.values(), ids=MOVED)
def test_a_former_command_names_the_new_one_on_standard_error(words: list[str], note: str, here: Path) -> None:
    done = CliRunner().invoke(app, [*words, "--json"])

    assert note in done.stderr
    assert done.stderr.count("note:") == 1
    json.loads(done.stdout)


@pytest.mark.parametrize("command", ["status", "logs", "open", "stop", "retry"])
def test_a_run_on_kubeflow_is_asked_for_there(command: str, here: Path) -> None:
    code, found = answer(command, ["x", *ENDPOINT])

    assert code == 1
    assert "127.0.0.1:9" in found["error"]


def test_every_former_command_has_a_new_one() -> None:
    today = {name for name in COMMANDS if not is_hidden(name)}
    assert {name for name in COMMANDS if is_hidden(name)} == options.MOVED.keys()
    for name in options.MOVED.values():
        assert next((each for each in today if f"{name} ".startswith(f"{each} ")), None), name


def is_hidden(name: str) -> bool:
    words = name.split()
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
        if command.hidden:
            return True
    return False


def test_what_else_is_printed_goes_to_standard_error(here: Path) -> None:
    """A library that prints does not spoil the object."""
    code = "import sys; from baton.cli import options; from baton.cli.app import app, recipes\n"
    code += "listed = recipes.origin.bundled\n"
    code += "recipes.origin.bundled = lambda: (print('chatter'), listed())[1]\n"
    code += "sys.argv = ['baton', 'recipes', '--json']; options.start(app)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert json.loads(done.stdout)["recipes"]
    assert "chatter" in done.stderr


def test_a_number_that_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no name for it, and what Python writes instead few other readers take."""
    print_json({"loss": float("nan"), "gate": [{"value": float("-inf"), "words": "NaN"}], "steps": 3})
    assert capsys.readouterr().out == '{"loss": null, "gate": [{"value": null, "words": "NaN"}], "steps": 3}\n'
