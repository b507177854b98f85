"""A recipe from a stranger runs no code until somebody consents, and then the code that was there to be read."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import baton
from baton.cli.app import app
from baton.data.split import split_data
from baton.errors import ExactnessError, UserError
from baton.models import pinned, trained
from baton.recipe import load
from baton.recipe.evaluation import Tasks
from baton.recipe.recipe import Recipe
from baton.recipe.yaml_text import LONGEST
from baton.runs import ref
from baton.runs.run import Run
from baton.source import origin, prepare
from baton.store.storage import Storage
from tests.support import tiny

BATON = Path(sys.executable).with_name("baton")
HOOK = """
with open("MARK", "a") as file:
    file.write("code of the hook ran\\n")


def longer(prompts, completions, references, **options):
    return [len(text) for text in completions]
"""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A file that is there once a stranger's code has run."""
    return tmp_path / "mark"


@pytest.fixture
def stranger(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that comes with its own code, a hook, and rows."""
    base = Path(tiny.make_base(tmp_path / "base"))
    tiny.with_code(base, f"open({str(mark)!r}, 'a').write('code of the model ran\\n')")
    (tmp_path / "own.py").write_text(HOOK.replace("MARK", str(mark)), encoding="utf-8")
    rows = (json.dumps({"text": f"{number} some words {number * 7}"}) + "\n" for number in range(60))
    (tmp_path / "rows.jsonl").write_text("".join(rows), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path


def written(folder: Path, **sections: Any) -> str:
    """Write a recipe, and return its text."""
    document: dict[str, Any] = {
        "name": "strange",
        "store": "out",
        "model": {"base": "base"},
        "data": {"source": "rows.jsonl"},
        "training": {"method": "pretrain", "max_steps": 2, "batch_size": 2},
        "evaluation": {"samples": 1, "max_new_tokens": 4},
        "tracking": {"mlflow": None},
        **sections,
    }
    text = yaml.safe_dump(document)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return text


REMOTE: dict[str, Any] = {"model": {"base": "base", "trust_remote_code": True}}
FUNCTIONS = {"samples": 1, "functions": ["own:longer"]}
HOOKED: dict[str, Any] = {"hooks": {"source": "own.py"}, "evaluation": FUNCTIONS}


def read(folder: Path, text: str, *, trusted: bool) -> Recipe:
    """Read a recipe as it comes through a pipe."""
    source = origin.RecipeSource("-", text, str(folder), is_foreign=True, is_trusted=trusted)
    return prepare.load(source).localised()


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (REMOTE, "model.trust_remote_code: True"),
        (HOOKED, "hooks.source: own.py"),
        ({"hooks": {"callbacks": ["os:system"]}}, "hooks.callbacks.0.use: os:system"),
        (
            {"training": {"method": "grpo", "max_steps": 2, "grpo": {"rewards": ["own:reward"]}}},
            "training.grpo.rewards.0.use: own:reward",
        ),
        (
            {"evaluation": {"tasks": {"names": ["theirs"], "include_path": "tasks"}}},
            "evaluation.tasks.include_path: tasks",
        ),
        ({"resources": {"image": "theirs:1"}}, "resources.image: theirs:1"),
        ({"resources": {"env": {"HF_ENDPOINT": "https://theirs"}}}, "resources.env.HF_ENDPOINT: https://theirs"),
        (
            {"sweep": {"parameters": {"model.trust_remote_code": [False, True]}}},
            "sweep.parameters.model.trust_remote_code.1: True",
        ),
        (
            {
                "phases": [
                    "pretrain",
                    {"name": "more", "training": {"method": "pretrain"}, "hooks": {"loss": "own:loss"}},
                ]
            },
            "phases.1.hooks.loss: own:loss",
        ),
        (
            {"phases": ["pretrain", {"name": "more", "training": {"method": "pretrain"}, "evaluation": FUNCTIONS}]},
            "phases.1.evaluation.functions.0: own:longer",
        ),
        (
            {
                "training": {"method": "grpo", "max_steps": 2, "grpo": {"rewards": ["numeric"]}},
                "sweep": {"parameters": {"training.grpo.rewards": [["numeric"], ["own:reward"]]}},
            },
            "sweep.parameters.training.grpo.rewards.1.0: own:reward",
        ),
    ],
)
def test_what_runs_code_is_asked_about(sections: dict[str, Any], named: str, stranger: Path, mark: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(stranger, written(stranger, **sections), trusted=False)

    assert f"'-' comes from elsewhere and would run code: {named}" in str(caught.value)
    assert "give --trust" in str(caught.value)
    assert not mark.exists()


def test_nothing_is_asked_where_no_code_runs(stranger: Path) -> None:
    ready = {"training": {"method": "grpo", "max_steps": 2, "grpo": {"rewards": ["numeric"]}}}
    assert read(stranger, written(stranger, **ready), trusted=False).trust is None


def test_of_ones_own_file_nothing_is_asked(stranger: Path) -> None:
    written(stranger, **REMOTE)
    assert prepare.load("recipe.yaml").localised().trust is None


def test_consent_that_a_stranger_has_written_counts_for_nothing(stranger: Path) -> None:
    text = written(stranger, **HOOKED, trust=["0" * 64])
    with pytest.raises(UserError, match="comes from elsewhere and would run code"):
        read(stranger, text, trusted=False)
    assert "0" * 64 not in (read(stranger, text, trusted=True).trust or [])


@pytest.fixture
def trusted(stranger: Path) -> Recipe:
    """A stranger's recipe with a hook and a model that comes with code, to which somebody has consented."""
    return read(stranger, written(stranger, **HOOKED, **REMOTE), trusted=True)


def test_consent_is_kept_with_the_codes_digest_and_runs_nothing(trusted: Recipe, mark: Path) -> None:
    assert isinstance(trusted.trust, list)
    assert len(trusted.trust) == 2
    assert load.loads(load.dumps(trusted)).trust == trusted.trust
    assert not mark.exists()


def test_a_hook_that_was_changed_after_the_consent_does_not_travel(trusted: Recipe, stranger: Path) -> None:
    (stranger / "own.py").write_text("import os", encoding="utf-8")
    with pytest.raises(UserError, match=r"hooks.source: .* without consent to run this own.py"):
        split_data(trusted, "run")


def test_a_model_whose_code_was_changed_after_the_consent_is_not_loaded(
    trusted: Recipe, stranger: Path, mark: Path
) -> None:
    assert pinned.fetch(trusted) == {"base": str(stranger / "base")}
    (stranger / "base" / "more.py").write_text("import os", encoding="utf-8")
    with pytest.raises(UserError, match=r"model.base: .* without consent to run this more.py"):
        pinned.fetch(trusted)
    with pytest.raises(UserError, match=r"without consent to run this more.py"):
        trained.base_folder(trusted)
    assert not mark.exists()


def test_tasks_that_were_changed_after_the_consent_are_not_loaded(stranger: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from baton.evaluate import evaluate

    (stranger / "tasks").mkdir()
    task = stranger / "tasks" / "theirs.yaml"
    task.write_text("task: theirs\noutput_type: generate_until\ndataset_path: none\n", encoding="utf-8")
    section = {"evaluation": {"tasks": {"names": ["theirs"], "include_path": "tasks"}}}
    recipe = read(stranger, written(stranger, **section), trusted=True)
    task.write_text("task: theirs\ndoc_to_text: !function utils.run\n", encoding="utf-8")
    tasks = Tasks(names=["theirs"], include_path=str(stranger / "tasks"))
    with pytest.raises(UserError, match=r"include_path: .* without consent to run this theirs.yaml"):
        evaluate.Harness(tasks, str(tmp_path), recipe.trust)


def test_code_from_another_repository_cannot_be_consented_to(stranger: Path) -> None:
    path = stranger / "base" / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"]["AutoModelForCausalLM"] = "other/repository--modeling.Own"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UserError, match=r"model.base takes code from another repository, other/repository--modeling"):
        read(stranger, written(stranger, **REMOTE), trusted=True)


def test_an_imported_recipe_waits_for_consent(stranger: Path) -> None:
    (stranger / "theirs.yml").write_text(
        yaml.safe_dump(
            {
                "base_model": "base",
                "trust_remote_code": True,
                "datasets": [{"path": "rows.jsonl", "type": "completion"}],
                "micro_batch_size": 1,
                "max_steps": 2,
            }
        ),
        encoding="utf-8",
    )
    made = command("import", "axolotl", "theirs.yml", "-o", "made.yaml")
    assert "remove trust: ask then, or give --trust" in made.stdout
    refused = command("validate", "made.yaml")
    assert refused.returncode == 2
    assert "'made.yaml' comes from elsewhere and would run code: model.trust_remote_code: True" in refused.stderr
    recipe = baton.load("made.yaml", trust=True).recipe
    assert isinstance(recipe.trust, list)
    assert len(recipe.trust) == 1


def command(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run `baton` in a process of its own."""
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "300", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(BATON), *words], input=text, capture_output=True, text=True, check=False, timeout=300, env=environment
    )


def test_a_piped_recipe_is_compiled_with_consent_alone(stranger: Path, mark: Path) -> None:
    text = written(stranger, **HOOKED)
    refused = command("compile", "-", "-o", "out.yaml", text=text)
    assert refused.returncode == 2
    assert "give --trust" in refused.stderr
    assert not (stranger / "out.yaml").exists()
    made = command("compile", "-", "-o", "out.yaml", "--trust", text=text)
    assert made.returncode == 0, made.stderr
    digest = read(stranger, text, trusted=True).trust
    assert isinstance(digest, list)
    sent = [ref.decode_texts(word) for word in re.findall(r"baton:zlib:\S+", (stranger / "out.yaml").read_text())]
    assert any(digest[0] in text for text in sent)
    assert not mark.exists()


@pytest.fixture
def server(stranger: Path) -> Iterator[str]:
    """A web server that has the stranger's files."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(stranger))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as opened:
        threading.Thread(target=opened.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{opened.server_port}"
        opened.shutdown()


def test_a_recipe_is_read_from_an_address(stranger: Path, server: str) -> None:
    written(stranger)
    assert baton.load(f"{server}/recipe.yaml").recipe.name == "strange"
    written(stranger, **HOOKED)
    with pytest.raises(UserError, match=rf"'{server}/recipe.yaml' comes from elsewhere and would run code"):
        baton.load(f"{server}/recipe.yaml")
    assert baton.load(f"{server}/recipe.yaml", trust=True).recipe.trust


def test_a_recipe_is_read_from_a_bucket(stranger: Path, s3_store: str) -> None:
    Storage(s3_store).write("theirs/recipe.yaml", written(stranger, **HOOKED).encode())
    with pytest.raises(UserError, match=r"comes from elsewhere and would run code: hooks.source: own.py"):
        baton.load(f"{s3_store}/theirs/recipe.yaml")
    assert baton.load(f"{s3_store}/theirs/recipe.yaml", trust=True).recipe.trust


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://example.com/recipe.yaml", "http:// is none of https, s3,"),
        ("ftp://example.com/recipe.yaml", "ftp:// is none of https, s3,"),
        ("SERVER/absent.yaml", "does not exist"),
        ("SERVER/large.yaml", "is longer than 1 MiB"),
    ],
)
def test_an_address_that_is_no_recipes_is_refused(address: str, said: str, stranger: Path, server: str) -> None:
    with (stranger / "large.yaml").open("wb") as file:
        file.truncate(3 * LONGEST)
    with pytest.raises(UserError, match=said):
        origin.find(address.replace("SERVER", server))


def test_own_code_of_a_model_is_pinned_for_ones_own_recipes_too(stranger: Path) -> None:
    written(stranger, **REMOTE)
    recipe = prepare.load("recipe.yaml").localised()
    run = Run(Storage(str(stranger / "store")), "run")
    run.write_once(pinned.document(recipe, pinned.fetch(recipe)))
    with (stranger / "base" / "own.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    with pytest.raises(ExactnessError, match="comes with other Python code than that this run began with"):
        pinned.compared(run, recipe)


def test_a_run_that_noted_no_code_goes_on(stranger: Path) -> None:
    written(stranger, **REMOTE)
    recipe = prepare.load("recipe.yaml").localised()
    folders = pinned.fetch(recipe)
    before = pinned.document(recipe, folders).model_copy(update={"base_code_sha256": None})
    assert pinned.document(recipe, folders, before).to_json().keys() == {"base_sha256"}


@pytest.mark.slow
def test_a_model_with_code_goes_through_the_pipeline(stranger: Path, mark: Path) -> None:
    """Trained, evaluated, exported and checked in processes of their own, from a pipe; then it writes."""
    text = written(stranger, **REMOTE)
    ended = command("run", "-", "--run", "one", "--trust", "--json", text=text)
    assert ended.returncode == 0, ended.stderr
    assert mark.read_text().count("code of the model ran") >= 3
    model = json.loads(ended.stdout)["model_uri"]
    assert "trust_remote_code=True" in Path(model, "README.md").read_text()
    refused = command("generate", model, "--no-chat", "--prompt", "some")
    assert refused.returncode == 2
    assert "comes with Python code, without which Transformers does not load it" in refused.stderr
    assert command("generate", model, "--no-chat", "--prompt", "some", "--trust").returncode == 0


def test_code_of_a_run_in_a_bucket_is_audited_with_consent_alone(stranger: Path, s3_store: str) -> None:
    written(stranger, **HOOKED)
    run = Run(Storage(s3_store), "theirs")
    run.create(prepare.load("recipe.yaml", [f"store.uri={s3_store}"]).localised())
    asked = CliRunner().invoke(app, ["audit", run.uri])
    assert asked.exit_code == 2
    assert "comes from elsewhere and would run code: hooks.source" in asked.output
    consented = CliRunner().invoke(app, ["audit", run.uri, "--trust"])
    assert consented.exit_code == 2
    assert "would run code" not in consented.output
