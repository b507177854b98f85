"""Addresses and files that a command takes: of the wrong kind, each is one message that names it, and no traceback."""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.cli.app import app
from baton.store.clouds import SCHEMES

STORES = Path(__file__).parents[1] / "assets/before-rooms"
ENDPOINT = ("--endpoint", "http://127.0.0.1:9")
"""Where nothing answers."""
HERE = "@"
"""Place of the address in a command line."""
COMMANDS: dict[str, list[str]] = {
    "check": ["check", HERE, "--only", "recipe"],
    "diff": ["diff", HERE, "store/runs/export"],
    "generate": ["generate", HERE, "--prompt", "a", "--max-new-tokens", "1"],
    "generate --file": ["generate", "model", "--file", HERE],
    "init --from axolotl": ["init", "--from", "axolotl", HERE],
    "init --from llamafactory": ["init", "--from", "llamafactory", HERE],
    "kfp compile": ["kfp", "compile", HERE, "-o", "package.yaml"],
    "kfp submit": ["kfp", "submit", HERE, *ENDPOINT],
    "kfp summary": ["kfp", "summary", HERE, "--id", "0123"],
    "kfp summary --result": ["kfp", "summary", "recipe.yaml", "--result", HERE],
    "kfp summary --store": ["kfp", "summary", "recipe.yaml", "--id", "0123", "--store", HERE],
    "logs": ["logs", HERE],
    "open": ["open", HERE, "--json"],
    "recipe show": ["recipe", "show", HERE],
    "runs fork": ["runs", "fork", HERE, "--recipe", "fork.yaml"],
    "runs fork --store": ["runs", "fork", "export", "--recipe", "fork.yaml", "--store", HERE],
    "runs graph": ["runs", "graph", HERE],
    "runs graph --store": ["runs", "graph", "--store", HERE],
    "runs list --store": ["runs", "list", "--store", HERE],
    "runs merge": ["runs", "merge", HERE, "--output", "merged"],
    "runs prune": ["runs", "prune", HERE, "--dry-run"],
    "runs show": ["runs", "show", HERE],
    "status": ["status", HERE],
    "status --endpoint": ["status", HERE, *ENDPOINT],
    "stop": ["stop", HERE],
    "sweep status": ["sweep", "status", HERE],
    "verify checkpoints": ["verify", "checkpoints", HERE],
    "verify checkpoints --key": ["verify", "checkpoints", "store/runs/export", "--key", HERE],
    "verify exports": ["verify", "exports", HERE],
    "verify keys show": ["verify", "keys", "show", HERE],
    "verify replay": ["verify", "replay", HERE, "--chunk", "9", "--report", "page.html"],
    "verify signature": ["verify", "signature", HERE, "--output", "signature.json"],
}
"""Name → a command line that takes an address or a file, of whatever kind."""
ADDRESSES = {
    "run": "store/runs/export",
    "run and step": "store/runs/export@4",
    "run of no such step": "store/runs/export@3",
    "run that is not there": "store/runs/absent",
    "address of a run": "file://{here}/store/runs/export",
    "checkpoint": "store/runs/export/checkpoints/step-00000004/{checkpoint}",
    "folder of a checkpoint": "store/runs/export/checkpoints/step-00000004",
    "folder of checkpoints": "store/runs/export/checkpoints",
    "export": "store/runs/export/export/{export}",
    "folder of exports": "store/runs/export/export",
    "store": "store",
    "folder of runs": "store/runs",
    "folder above": "store/runs/..",
    "name": "export",
    "rows": "rows.jsonl",
    "document": "store/runs/export/recipe.json",
    "weights": "store/runs/export/export/{export}/model.safetensors",
    "device": "/dev/null",
    "memory": "/proc/self/mem",
    "nothing": "",
    "not there": "nowhere/at-all",
    "root": "/",
    "too long": "x" * 5000,
    "line end": "a\nb",
    "bucket without a name": "s3://",
    "server that does not answer": "http://127.0.0.1:9/x",
    "host that is not there": "ftp://nowhere.invalid/x",
    "unknown scheme": "nonsense://x/runs/y",
    "no address": "http://[",
}
"""Kind → an address."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store whose run has checkpoints and an export, a recipe and rows."""
    folder = tmp_path_factory.mktemp("addresses")
    with tarfile.open(STORES / "export.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    recipe = {
        "name": "tiny",
        "store": "store",
        "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
        "data": {"source": "words.jsonl"},
        "tracking": {"mlflow": None},
    }
    (folder / "words.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(30)), encoding="utf-8")
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _there(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("BATON_STORE_PATIENCE", "0")


def invoke(*words: str) -> Result:
    """Runs a command in this process."""
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "NO_COLOR": "1"}, input="")


def require_message(done: Result, code: int | None = None) -> str:
    """Returns the message of a command that ended as commands do, with a code and never with a traceback."""
    assert done.exception is None or isinstance(done.exception, SystemExit), f"traceback: {done.exception!r}"
    assert code is None or done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        pytest.param(command, kind, marks=pytest.mark.slow if (number + place) % 3 else (), id=f"{command}-{kind}")
        for number, command in enumerate(COMMANDS)
        for place, kind in enumerate(ADDRESSES)
    ],
)
def test_an_address_of_any_kind_gives_no_traceback(command: str, kind: str, here: Path) -> None:
    (checkpoint,) = (here / "store/runs/export/checkpoints/step-00000004").glob("*/")
    (export,) = (here / "store/runs/export/export").glob("*/")
    address = ADDRESSES[kind].format(here=here, checkpoint=checkpoint.name, export=export.name)
    try:
        done = invoke(*(address if word == HERE else word for word in COMMANDS[command]))
    finally:
        for made in ("fork.yaml", "package.yaml"):
            (here / made).unlink(missing_ok=True)
    message = require_message(done)
    if done.exit_code == 2 and "Usage:" not in message:
        assert message.strip().splitlines()[0].startswith("baton: "), message


def _named(kind: str, here: Path) -> tuple[str, str]:
    (checkpoint,) = (here / "store/runs/export/checkpoints/step-00000004").glob("*/")
    (export,) = (here / "store/runs/export/export").glob("*/")
    of_run = {"checkpoint": f"checkpoints/step-00000004/{checkpoint.name}", "export": f"export/{export.name}"}
    return ADDRESSES[kind].format(here=here), f"store/runs/export/{of_run['export' if 'run' in kind else 'checkpoint']}"


@pytest.mark.parametrize("kind", ["run", "run and step", "address of a run"])
def test_a_run_stands_for_its_model(kind: str, here: Path) -> None:
    address = ADDRESSES[kind].format(here=here)
    require_message(invoke("generate", address, "--prompt", "a", "--max-new-tokens", "1"), 0)


@pytest.mark.parametrize("kind", ["folder of a checkpoint"])
def test_a_folder_of_a_run_is_told_which_model_to_take(kind: str, here: Path) -> None:
    address, wanted = _named(kind, here)
    message = require_message(invoke("generate", address, "--prompt", "a", "--max-new-tokens", "1"), 2)
    assert f"{address!r} is a folder without a model." in message
    named = message.strip().rpartition(" ")[2]
    assert named.endswith(wanted)
    require_message(invoke("generate", named, "--prompt", "a", "--max-new-tokens", "1"), 0)


def test_what_lies_below_a_run_is_told_its_run() -> None:
    message = require_message(invoke("runs", "show", "store/runs/export/checkpoints"), 2)
    assert message.strip().endswith("Give the run that it is part of: store/runs/export")


TOLD: dict[str, tuple[bytes | None, str]] = {
    "absent": (None, "cannot be read: No such file or directory."),
    "text": (b"Traceback (most recent call last)", "is not output of `baton kfp submit --json`: Expecting value"),
    "half": (b'{"state": "succ', "is not output of `baton kfp submit --json`: Unterminated string"),
    "bytes": (b"\xff\xfe\x00", "is not output of `baton kfp submit --json`: 'utf-8' codec"),
    "list": (b"[1]", "is not output of `baton kfp submit --json`: "),
    "number": (b"3", "is not output of `baton kfp submit --json`: "),
    "without a state": (b"{}", "is not output of `baton kfp submit --json`: it has no state."),
    "state of another kind": (b'{"state": 3}', "is not output of `baton kfp submit --json`: state: "),
    "failures of another kind": (
        b'{"state": "failed", "failed": "x"}',
        "is not output of `baton kfp submit --json`: failed: ",
    ),
    "exit code of another kind": (b'{"state": "failed", "exit_code": "x"}', "`baton kfp submit --json`: exit_code: "),
    "deep": (b'{"state": ' + b"[" * 5000 + b"]" * 5000 + b"}", "is not output of `baton kfp submit --json`: "),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_result_that_is_none_is_one_message(name: str, tmp_path: Path) -> None:
    text, words = TOLD[name]
    file = tmp_path / "result.json"
    if text is not None:
        file.write_bytes(text)
    message = require_message(invoke("kfp", "summary", "recipe.yaml", "--result", str(file)), 2)
    assert message.startswith(f"baton: --result {str(file)!r} ")
    assert words in message
    assert "Give the file that `baton kfp submit --wait --json > FILE` writes." in message


WRITING: dict[str, list[str]] = {
    "verify replay": ["verify", "replay", "store/runs/export", "--report", f"{HERE}.html"],
    "verify signature": ["verify", "signature", "store/runs/export", "--output", HERE],
    "kfp compile": ["kfp", "compile", "recipe.yaml", "-o", f"{HERE}.yaml"],
    "kfp compile --graph": ["kfp", "compile", "recipe.yaml", "-o", "package.yaml", "--graph", f"{HERE}.mmd"],
    "data check": ["data", "check", "words.jsonl", "--method", "pretrain", "--report", f"{HERE}.html"],
    "data show": ["data", "show", "recipe.yaml", "--page", f"{HERE}.html"],
    "init --from": ["init", "--from", "axolotl", "axolotl.yml", "-o", HERE],
    "init": ["init", "--data", "words.jsonl", "--model", "scratch", "-o", HERE],
    "verify keys new": ["verify", "keys", "new", HERE],
    "runs fork": ["runs", "fork", "export", "--store", "store", "--run", "never", "--recipe", HERE],
}
"""Name → a command line that writes a file."""
UNWRITABLE = {"below a file": "words.jsonl/x", "in a file system of the kernel": "/proc/baton-x"}


@pytest.mark.parametrize("kind", UNWRITABLE)
@pytest.mark.parametrize("command", WRITING)
def test_a_file_that_cannot_be_written_is_one_message_and_nothing_is_made(
    command: str, kind: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "verify signature":
        _sign(here, monkeypatch)
    axolotl = {"base_model": "org/model", "datasets": [{"path": "words.jsonl", "type": "completion"}]}
    (here / "axolotl.yml").write_text(json.dumps(axolotl | {"micro_batch_size": 1}), encoding="utf-8")
    message = require_message(invoke(*(word.replace(HERE, UNWRITABLE[kind]) for word in WRITING[command])))
    assert message.strip().splitlines()[-1].startswith(("baton: ", "Check")), message
    assert UNWRITABLE[kind].removesuffix("/x") in message
    assert not (here / "store/runs/never").exists()
    assert not (here / "package.yaml").exists()


def _sign(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the newest checkpoint's manifest a signature, whatever it signs."""
    for path in (here / "store/runs/export/checkpoints").glob("*/manifest.json"):
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        document["meta"]["signature"] = {"verificationMaterial": {}}
        path.write_text(json.dumps(document), encoding="utf-8")


def test_a_signature_answers_in_json(here: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _sign(here, monkeypatch)
    file = tmp_path / "signature.json"
    done = invoke("verify", "signature", "store/runs/export", "--output", str(file), "--json")
    require_message(done, 0)
    told = json.loads(done.stdout)
    assert told["file"] == str(file)
    assert told["step"] == 4
    assert json.loads(file.read_text(encoding="utf-8")) == {"verificationMaterial": {}}


def test_a_fork_replaces_no_file_and_is_not_made_without_one(here: Path) -> None:
    (here / "mine.yaml").write_text("mine\n", encoding="utf-8")
    message = require_message(
        invoke("runs", "fork", "export", "--store", "store", "--run", "never", "--recipe", "mine.yaml"), 2
    )
    assert message == "baton: 'mine.yaml' exists already. Give another name by --recipe, or remove it.\n"
    assert (here / "mine.yaml").read_text(encoding="utf-8") == "mine\n"
    assert not (here / "store/runs/never").exists()


def test_a_fork_that_is_refused_leaves_no_file(here: Path) -> None:
    words = ("runs", "fork", "export@9", "--store", "store", "--run", "never", "--recipe", "refused.yaml")
    require_message(invoke(*words), 2)
    assert not (here / "refused.yaml").exists()


@pytest.mark.parametrize("before", [None, "before\n"])
def test_a_compilation_that_is_refused_writes_nothing(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "package.yaml"
    if before:
        target.write_text(before, encoding="utf-8")
    words = ("kfp", "compile", "recipe.yaml", "-o", str(target), "--set", "training.max_steps=99", "--chunks", "99")
    monkeypatch.setenv("BATON_WORKFLOW_BYTES", "100000")
    message = require_message(invoke(*words), 2)
    assert "stages do not fit one workflow" in message
    assert (target.read_text(encoding="utf-8") if target.exists() else None) == before


NUMBERS = {
    "BATON_WORKFLOW_BYTES": ["kfp", "compile", "recipe.yaml", "-o", "package.yaml"],
    "BATON_STORE_PATIENCE": ["runs", "list", "--store", "store"],
}
"""Environment variable that is a number → a command that reads it."""


@pytest.mark.parametrize("value", ["many", "1 MiB", "1e", "nan", "inf"])
@pytest.mark.parametrize("variable", NUMBERS)
def test_a_variable_that_is_no_number_is_one_message(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    message = require_message(invoke(*NUMBERS[variable]), 2)
    assert f"the environment variable {variable} is {value!r}, expected a number." in message


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("prefix", ["x//y", "./x", "x/../y", "x/."])
def test_a_prefix_with_an_empty_part_is_told_what_to_write(scheme: str, prefix: str) -> None:
    message = require_message(invoke("runs", "list", "--store", f"{scheme}://bucket/{prefix}"), 2)
    assert "has an empty part in its prefix, or one of dots." in message
    meant = "/".join(part for part in prefix.split("/") if part not in ("", ".", ".."))
    assert message.strip().endswith(f"Write {scheme}://bucket/{meant}.")


def _validated(here: Path, source: str) -> Result:
    return invoke("validate", "recipe.yaml", "--set", f"data.source={source}")


@pytest.mark.s3
def test_rows_in_a_bucket_are_looked_for(here: Path, s3_store: str) -> None:
    from baton.store.storage import Storage

    Storage(s3_store).write("rows/a.jsonl", b'{"text": "x"}\n')
    there = require_message(_validated(here, f"{s3_store}/rows"), 0)
    assert f"data.source {s3_store}/rows: 1 file(s), with unread rows; `baton data check` reads them" in there
    message = require_message(_validated(here, f"{s3_store}/nothing"), 2)
    assert f"data.source '{s3_store}/nothing' matches no file." in message
    message = require_message(_validated(here, "s3://no-such-bucket-here/rows"), 2)
    assert "data.source 's3://no-such-bucket-here/rows': store 's3://no-such-bucket-here': the bucket does" in message


@pytest.mark.s3
def test_a_run_says_that_a_bucket_is_missing(here: Path, s3_store: str) -> None:
    words = ("data", "check", "s3://no-such-bucket-here/rows", "--report", "missing.html")
    message = require_message(invoke(*words), 2)
    assert "the bucket does not exist" in message
    assert "matches no file" not in message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("hf://datasets/org/rows", "on the hub, not read yet; `baton data check` reads them"),
        pytest.param("s3://somewhere/rows", "not read: store 's3://somewhere': ", marks=pytest.mark.slow),
    ],
)
def test_rows_that_cannot_be_seen_are_said_not_to_have_been_looked_at(
    source: str, reason: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    message = require_message(_validated(here, source), 0)
    assert f"data.source {source}: {reason}" in message


NEXT: dict[str, list[str]] = {
    "init": ["init", "--data", "words.jsonl", "--model", "scratch", "-o", "my first/it's größer.yaml"],
    "init --from": ["init", "--from", "axolotl", "axolotl.yml", "-o", "my first/$HOME & more.yaml"],
}
"""Name → a command line that says which one comes next."""


@pytest.mark.parametrize("words", NEXT.values(), ids=NEXT)
def test_the_next_command_is_what_a_shell_takes(words: list[str], here: Path) -> None:
    axolotl = {"base_model": "org/model", "datasets": [{"path": "words.jsonl", "type": "completion"}]}
    (here / "axolotl.yml").write_text(json.dumps(axolotl | {"micro_batch_size": 1}), encoding="utf-8")
    message = require_message(invoke(*words), 0)
    command = re.search(r"next: baton (.*)", message)
    assert command
    assert shlex.split(command[1]) == ["check", words[-1]]
    (here / words[-1]).unlink()


def test_the_variable_of_a_key_is_what_a_shell_takes(tmp_path: Path) -> None:
    folder = tmp_path / "my keys"
    folder.mkdir()
    message = require_message(invoke("keys", "new", str(folder / "own.key")), 0)
    assert shlex.split(message.strip().rpartition("to sign: ")[2]) == [f"BATON_SIGNING_KEY_FILE={folder}/own.key"]
