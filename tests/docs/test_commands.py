"""What pages tell people to type: commands and options that `baton` has, targets that make has, recipes that load."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from baton.cli.app import app
from baton.recipe import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")]
PAGES += sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*) *\n(?P<code>.*?)^ *``` *$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(baton [a-z][^`]*|make [a-z][\w-]*)`(?!`)")
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)


def _blocks(path: Path, *languages: str) -> Iterator[str]:
    for match in FENCE.finditer(path.read_text(encoding="utf-8")):
        if match["language"] in languages:
            yield re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)


def _typed(path: Path) -> Iterator[str]:
    """Commands in blocks, by line or after `$`, and inline."""
    for code in _blocks(path, "", "sh", "console"):
        for line in code.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S+ )*((?:baton|make) +[a-z].*)", line.strip())
            if found:
                yield found[1]
    yield from (" ".join(text.split()) for text in INLINE.findall(path.read_text(encoding="utf-8")))


def _mistakes(line: str, targets: set[str]) -> list[str]:
    words = shlex.split(re.split(r" [|>] |; | && | \|\| ", line.replace("…", ""))[0], comments=True)
    if words[0] == "make":
        return [
            f"no target '{word}'" for word in words[1:] if re.fullmatch(r"[a-z][a-z-]*", word) and word not in targets
        ]
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0).rstrip(",")
        if name not in command.commands:
            return [f"no command '{name}'"]
        command = command.commands[name]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    options |= {"--help", "-h"}
    given = [word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [f"no option '{option}' of {command.name}" for option in given if option not in options]


def _make_targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_ones_that_there_are(path: Path) -> None:
    targets = _make_targets()
    assert [(line, found) for line in _typed(path) for found in _mistakes(line, targets)] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("baton fly recipe.yaml", "no command 'fly'"),
        ("baton run recipe.yaml --fast", "no option '--fast' of run"),
        ("baton checkpoints lost RUN", "no command 'lost'"),
        ("make nothing", "no target 'nothing'"),
    ],
)
def test_a_command_that_is_not_there_is_noticed(line: str, said: str) -> None:
    assert _mistakes(line, _make_targets()) == [said]


TUTORIALS = sorted(ROOT.glob("docs/tutorials/*.md"))


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_recipes_of_tutorials_load(path: Path, tmp_path: Path) -> None:
    recipes = [code for code in _blocks(path, "yaml") if "name" in (yaml.safe_load(code) or {})]
    assert recipes, "a tutorial shows the recipe that it runs"
    for number, code in enumerate(recipes):
        file = tmp_path / f"{number}.yaml"
        file.write_text(code, encoding="utf-8")
        load.load(str(file))


@pytest.mark.parametrize("name", ["20261125", "1e3", "true", "False", "null", "0755", "-5", "1_000", "nan", "try-1"])
def test_the_page_says_how_kfp_takes_a_name_for_a_text(name: str) -> None:
    from kfp.cli.utils.parsing import parse_parameter_value

    page = (ROOT / "docs/guides/run-on-kubeflow.md").read_text(encoding="utf-8")
    (written,) = re.findall(r"`'run_name=(\S+)'`", page)
    (argument,) = shlex.split(f"'run_name={written.replace('20261125', name)}'")
    assert parse_parameter_value(argument.partition("=")[2]) == name
