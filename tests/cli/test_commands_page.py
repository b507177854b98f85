"""docs/reference/cli.md lists every command of the app, and names no option that a command does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from baton.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("docs/reference/cli.md", "AGENTS.md")


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every command and group with what is typed for it."""
    for name, each in getattr(command, "commands", {}).items():
        inner = f"{path} {name}".strip()
        yield inner, each
        yield from commands(each, inner)


COMMANDS = dict(commands(get_command(app)))


def lines(text: str) -> Iterator[tuple[str, str]]:
    """Yields each command line of a text as the command and what follows it."""
    fenced = [line for block in re.findall(r"(?s)```\n(.*?)```", text) for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"(?s)```.*?```", "", text))
    for span in [*fenced, *spans]:
        for line in re.split(r" [|] ", span):
            words = line.strip().split()
            if words[:1] != ["baton"] or len(words) == 1:
                continue
            name = " ".join(words[1:3])
            name = name if name in COMMANDS else words[1]
            yield name, line


def test_every_command_stands_in_the_page() -> None:
    listed = {name for name, _ in lines((ROOT / "docs/reference/cli.md").read_text("utf-8"))}
    single = {name for name, command in COMMANDS.items() if not hasattr(command, "commands")}

    assert single - listed == set()


@pytest.mark.parametrize("path", TEXTS)
def test_what_a_page_names_exists(path: str) -> None:
    found = list(lines((ROOT / path).read_text("utf-8")))

    assert found
    for name, line in found:
        assert name in COMMANDS, f"{path}: {line}"
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts + parameter.secondary_opts}
        named = set(re.findall(r"(?<=[\s\[])--?[a-z][a-z-]*", line))
        assert named <= known | {"--help"}, f"{path}: {line}"
