"""Recipes by name and from pipes: what a command takes where a file might stand."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from baton.cli.app import app
from baton.errors import UserError
from baton.recipe import load
from baton.source import origin, prepare

BATON = Path(sys.executable).with_name("baton")
ROOT = Path(__file__).resolve().parents[2]
RECIPE: dict[str, Any] = {
    "name": "piped",
    "store": "out",
    "model": {"from_scratch": {"hidden_size": 16}, "tokenizer": {"train": {"vocab_size": 300}}},
    "data": {"source": "rows.jsonl"},
    "training": {"max_steps": 4},
    "tracking": {"mlflow": None},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rows and no recipe."""
    (tmp_path / "rows.jsonl").write_text('{"text": "some words"}\n' * 9, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bundle(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of bundled recipes that nobody may write to, one with rows and a template beside it."""
    folder = tmp_path_factory.mktemp("site-packages") / "recipes"
    (folder / "gallery" / "rows").mkdir(parents=True)
    shutil.copy(ROOT / "pipelines" / "recipes" / "quickstart.yaml", folder)
    beside = {
        **RECIPE,
        "data": {"source": "rows/own.jsonl"},
        "model": {**RECIPE["model"], "chat_template": "own.jinja"},
    }
    text = f"# Rows of its own.\n# More about them.\n{yaml.safe_dump(beside)}"
    (folder / "gallery" / "Own-Rows.yaml").write_text(text, encoding="utf-8")
    (folder / "gallery" / "own.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "gallery" / "rows" / "own.jsonl").write_text('{"text": "own words"}\n' * 9, encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr(origin, "RECIPES", str(folder))
    return folder


def baton(*arguments: str, text: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, list(arguments), input=text, env={"COLUMNS": "300", "NO_COLOR": "1"})


def shell(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash that calls `baton`."""
    environment = {**os.environ, "PATH": f"{BATON.parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "name", ["quickstart", "QuickStart", "gallery/own-rows", "own-rows", "OWN-ROWS", "Gallery/Own-Rows"]
)
def test_a_bundled_recipe_is_found_by_its_name(name: str, here: Path, bundle: Path) -> None:
    loaded = prepare.load(name).localised()

    assert loaded.name == ("quickstart" if "quick" in name.lower() else "piped")
    assert os.path.isabs(loaded.store.uri)
    assert Path(loaded.store.uri).parent == here, "and not in site-packages, which cannot be written"


def test_what_lies_beside_a_bundled_recipe_is_found_from_any_folder(here: Path, bundle: Path) -> None:
    loaded = prepare.load("own-rows").localised()

    assert loaded.data.source == [str(bundle / "gallery" / "rows" / "own.jsonl")]
    assert loaded.model.chat_template == "{{ messages }}"


def test_a_file_of_that_name_comes_first_and_a_folder_does_not(here: Path, bundle: Path) -> None:
    (here / "quickstart").mkdir()
    assert prepare.load("quickstart").localised().name == "quickstart"
    (here / "quickstart").rmdir()
    (here / "quickstart").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    assert prepare.load("quickstart").localised().name == "piped"


def test_a_name_that_several_have_is_refused(here: Path, bundle: Path) -> None:
    (bundle / "gallery").chmod(0o755)
    bundle.chmod(0o755)
    (bundle / "more").mkdir()
    for folder in ("gallery", "more"):
        (bundle / folder / "two.yaml").write_text("# Two.\n", encoding="utf-8")

    with pytest.raises(
        UserError, match=r"'two' is the name of 2 bundled recipes\. Say which: gallery/two or more/two\."
    ):
        origin.find("two")


ABSENT = {
    "misspelt": (
        "quikstart",
        "recipe 'quikstart' is not a file, nor the name of a bundled recipe. Did you mean 'quickstart'? Give the path "
        "of a YAML recipe, or a name; `baton recipe list` lists the bundled ones.",
    ),
    "ending": (
        "quickstart.yaml",
        "recipe 'quickstart.yaml' is not a file. Did you mean 'quickstart'? Give the path of a",
    ),
    "file": ("my-recpe.yaml", "recipe 'my-recpe.yaml' is not a file. Did you mean 'my-recipe.yaml'?"),
    "folder of it": ("recpies/a.yaml", "Did you mean 'recipes/a.yaml'?"),
    "like nothing": (
        "zzz",
        "nor the name of a bundled recipe. Give the path of a YAML recipe, or a name; `baton recipe list`",
    ),
    "folder": ("recipes", "recipe 'recipes' is not a file but a folder. Name a recipe: recipes/a.yaml."),
}


@pytest.mark.parametrize(("given", "message"), ABSENT.values(), ids=ABSENT)
def test_what_is_no_recipe_is_said_with_what_was_meant(given: str, message: str, here: Path, bundle: Path) -> None:
    (here / "my-recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    (here / "recipes").mkdir()
    (here / "recipes" / "a.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")

    done = baton("run", given)

    assert done.exit_code == 2
    assert message in done.stderr


def test_they_are_listed_and_shown(here: Path, bundle: Path) -> None:
    listed = baton("recipes").stdout
    assert "quickstart" in listed
    assert "A small Llama learns to write docstrings" in listed
    assert json.loads(baton("recipes", "--json").stdout) == json.loads(baton("recipes", "list", "--json").stdout)
    assert json.loads(baton("recipes", "--json").stdout)["recipes"][1] == {
        "name": "gallery/Own-Rows",
        "method": "sft",
        "model": "llama from scratch",
        "about": "Rows of its own.",
    }
    shown = baton("recipes", "show", "quickstart")
    assert shown.stdout == (ROOT / "pipelines" / "recipes" / "quickstart.yaml").read_text("utf-8")
    assert baton("recipe", "show", "quickstrt").stderr.startswith(
        "baton: no bundled recipe is called 'quickstrt'. Did you mean 'quickstart'? There are quickstart, gallery/Own"
    )


def test_a_recipe_that_is_shown_runs_from_a_file_elsewhere(here: Path, bundle: Path) -> None:
    (here / "mine.yaml").write_text(baton("recipes", "show", "own-rows").stdout, encoding="utf-8")

    assert prepare.load("mine.yaml").localised() == prepare.load("own-rows").localised()


def test_every_bundled_recipe_says_what_it_is() -> None:
    for name in origin.bundled():
        found = origin.of_bundle(name)
        assert 20 < len(found.summary) < 120, f"{name}: its first line is a comment that says what it is"
        assert load.validate(found.document(), origin=name).name


@pytest.mark.slow
def test_a_recipe_from_a_pipe(here: Path) -> None:
    """Relative paths begin in the working folder; the pipe, which can be read once, is read once."""
    (here / "elsewhere").mkdir()
    recipe = {**RECIPE, "model": {"base": "org/model"}}
    (here / "elsewhere" / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")

    done = shell("baton validate <(cat elsewhere/recipe.yaml) && baton validate --json - < elsewhere/recipe.yaml", here)

    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("/dev/fd/")
    assert "is valid: piped, sft for 4 steps" in first
    assert json.loads(last)["recipe"] == "-"
    assert json.loads(last)["rows"] == ["rows.jsonl holds rows of text"]


def test_every_command_that_takes_a_recipe_reads_it_from_standard_input(here: Path) -> None:
    text = yaml.safe_dump(RECIPE)
    compiled = baton("compile", "-", "-o", "package.yaml", "--json", text=text)
    assert json.loads(compiled.stdout)["package"] == "package.yaml", compiled.stderr
    shown = baton("data", "check", "-", "--json", text=text)
    assert json.loads(shown.stdout)["run"] == "piped", shown.stderr
    for command in (["submit", "-", "--endpoint", "http://127.0.0.1:9"], ["ci-report", "-", "--id", "x"]):
        done = baton(*command, "--json", text=text)
        assert "recipe" not in json.loads(done.stdout)["error"], "it was read; what fails comes after"
    for command in ("run", "prove", "drill", "retrain"):
        done = baton(command, "-", "--json", "--set", "data.source=absent.jsonl", text=text)
        assert "data.source 'absent.jsonl' matches no file" in json.loads(done.stdout)["error"]


def test_a_named_pipe(here: Path) -> None:
    os.mkfifo(here / "pipe")
    writer = threading.Thread(target=lambda: (here / "pipe").write_text(yaml.safe_dump(RECIPE), encoding="utf-8"))
    writer.start()
    found = origin.find("pipe")
    writer.join()

    assert found.document()["name"] == "piped"
    assert found.folder == str(here)


def test_what_does_not_end_is_not_read_to_its_end(here: Path) -> None:
    with pytest.raises(UserError, match=r"recipe '/dev/zero' is longer than 1 MiB"):
        origin.find("/dev/zero")
    (here / "rows.yaml").write_text("# a\n" * 2**18 + "#")
    with pytest.raises(UserError, match=r"rows belong into a file that data.source names"):
        origin.find("rows.yaml")


@pytest.mark.parametrize("text", ["", "  \n\n"], ids=["nothing", "white space"])
def test_an_empty_standard_input(text: str, here: Path) -> None:
    done = baton("validate", "-", text=text)

    assert done.exit_code == 2
    assert done.stderr == (
        "note: `baton validate` is now `baton check`\n"
        "baton: recipe '-': standard input is empty, expected a recipe in YAML. Pipe one in, as in "
        "`baton check - < my.yaml`.\n"
    )


def test_a_terminal_is_not_waited_for(here: Path) -> None:
    import pty

    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [str(BATON), "run", "-"], stdin=follower, cwd=here, capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        os.close(leader)
        os.close(follower)

    assert done.returncode == 2
    assert "is read from standard input, which is a terminal. Pipe one in" in done.stderr
