"""docs/reference/cli.md is the app's, and pages name only options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from baton.cli.app import app
from tools import cli_reference

ROOT = Path(__file__).resolve().parents[2]


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every command and group that help shows, with what is typed for it."""
    for name, each in getattr(command, "commands", {}).items():
        if each.hidden:
            continue
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
            name = next((each for n in (4, 3) if (each := " ".join(words[1:n])) in COMMANDS), words[1])
            yield name, line


def test_page_is_current() -> None:
    committed = (ROOT / cli_reference.PAGE).read_text("utf-8")
    assert committed == cli_reference.markdown(), f"{cli_reference.PAGE} is older than baton/cli/: run `make docs`"


def test_what_agents_are_told_exists() -> None:
    path = "AGENTS.md"
    found = list(lines((ROOT / path).read_text("utf-8")))

    assert found
    for name, line in found:
        assert name in COMMANDS, f"{path}: {line}"
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts + parameter.secondary_opts}
        named = set(re.findall(r"(?<=[\s\[])--?[a-z][a-z-]*", line))
        assert named <= known | {"--help", "-h"}, f"{path}: {line}"
