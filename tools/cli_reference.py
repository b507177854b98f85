"""The commands' reference, written from the Typer app (`make docs`).

python -m tools.cli_reference docs/reference/cli.md
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from typer.main import get_command
from typer.models import DefaultPlaceholder

from baton.cli.app import app
from baton.cli.options import MOVED
from baton.store.clouds import SCHEMES

PAGE = "docs/reference/cli.md"
SHARED = 4  # options of at least so many commands are in one table
ADDRESSES = ", ".join(f"`{scheme}://`" for scheme in ("https", *SCHEMES, "hf"))

INTRODUCTION = f"""\
# Commands

<!-- Written by `make docs` from baton/cli/; edit that folder instead. -->

`baton COMMAND -h` prints the same text.

- `RUN`: a name, a path or a URI, `STORE/runs/NAME`. `RUN@STEP`: one of its checkpoints. A bare name means a run begun
  from this machine, or one in `baton-store`; `--store` names another store.
- `RECIPE`: a YAML file, its address ({ADDRESSES}), `-` for standard input, or a
  bundled recipe's name. Relative paths start at the recipe's folder. Recipes from an address or a pipe run code only
  with [`--trust`](../trust/security.md#recipes-from-elsewhere).
- `--json`: one JSON object on standard output, and nothing else there. Progress and messages go to standard error.
  Errors are objects too, with `state: "failed"`, `error` and `exit_code`.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the run failed, or a comparison found a difference |
| 2 | your input: a recipe, a path, a credential |
| 3 | the gate rejected the model |
| 4 | a run on Kubeflow could not be followed to its end |
| 130 | interrupted |

| state of a run | meaning |
|---|---|
| `new` | has planned no step |
| `running` | a live process on this machine trains or evaluates it |
| `interrupted` | its process exited early; `baton retry` resumes it |
| `failed`, `canceled` | a stage failed, or the run was canceled on Kubeflow |
| `stopped` | a trial that its sweep ended early |
| `rejected` | its gate rejected the model |
| `succeeded` | all stages ended; for trials and runs of `verify` and `demo`, training |

`status`, `runs list`, `runs show`, reports and `--json` use these words.
"""


def markdown() -> str:
    """Returns the reference as Markdown: panels and groups with their commands, then shared options."""
    root: Any = get_command(app)
    commands = list(_commands(root, "baton"))
    uses = Counter(_row(parameter) for _, command in commands for parameter in _listed(command))
    shared = {row for row, number in uses.items() if number >= SHARED}
    panels: dict[str, list[str]] = {}
    for path, command in commands:
        panel = _panel(path, command)
        if panel not in panels:
            group = root.commands.get(panel)
            panels[panel] = [f"## {panel}\n", *([f"{_text(group.help)}\n"] if group and group.help else [])]
        panels[panel].append(_command(path, command, shared))
    options = sorted(row for row in shared if row.startswith("| `-"))
    texts = ["\n".join(parts) for parts in panels.values()]
    former = [f"| `baton {former}` | `baton {today}` |" for former, today in MOVED.items()]
    earlier = ["## Earlier names", "", "Earlier names still work, with a note on standard error.", ""]
    earlier += ["| earlier | now |", "|---|---|", *former, ""]
    return "\n".join([INTRODUCTION, *texts, "## Options of many commands", "", *_table(options), "", *earlier])


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields each visible command with the words typed for it."""
    for name, command in group.commands.items():
        if command.hidden:
            continue
        inner = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, inner)
        else:
            yield inner, command


def _panel(path: str, command: Any) -> str:
    words = path.split()
    if len(words) > 2:
        return words[1]
    return "Commands" if isinstance(command.rich_help_panel, DefaultPlaceholder) else str(command.rich_help_panel)


def _command(path: str, command: Any, shared: set[str]) -> str:
    arguments = [parameter for parameter in _listed(command) if parameter.param_type_name == "argument"]
    usage = " ".join([path, *(_argument(parameter) for parameter in arguments)])
    rows = [_row(parameter) for parameter in _listed(command)]
    own = [row for row in rows if row not in shared]
    names = [row.split("`")[1].split()[0].strip(",") for row in rows if row in shared and row.startswith("| `-")]
    also = ", ".join(f"`{name}`" for name in names)
    blocks = [f"### {path}", _prose(command.help or ""), f"```\n{usage} [OPTIONS]\n```"]
    blocks += ["\n".join(_table(own)) if own else "", f"Also: {also}." if also else ""]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _listed(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if not parameter.hidden and parameter.name != "help"]


def _table(rows: list[str]) -> list[str]:
    return ["| | meaning |", "|---|---|", *rows]


def _row(parameter: Any) -> str:
    """Returns an argument's or option's line of a table."""
    meaning, name = _text(parameter.help or ""), _argument(parameter)
    variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
    if variables:
        meaning += f" Variable: {', '.join(f'`{variable}`' for variable in variables)}."
    if parameter.param_type_name == "option":
        value = "" if parameter.is_flag else f" {_value(parameter)}"
        name = "/".join([", ".join(parameter.opts), *parameter.secondary_opts]) + value
        if parameter.show_default and not parameter.is_flag and parameter.default not in (None, (), [], ""):
            meaning += f" Default: `{getattr(parameter.default, 'value', parameter.default)}`."
    else:
        name = re.sub(r"^\[(.*)\]$", r"\1", name)
    return f"| `{name}` | {meaning} |"


def _value(parameter: Any) -> str:
    """Returns the placeholder of a value: its metavar, its choices or its name."""
    annotation = parameter.type_descriptor.annotation
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Enum) and not parameter.metavar:
            return "\\|".join(str(choice.value) for choice in kind)
    return str(parameter.metavar or parameter.name.upper().rstrip("_"))


def _argument(parameter: Any) -> str:
    name = re.sub(r"^\[(.*)\]$", r"\1", _value(parameter)).removesuffix("...").removesuffix("…")
    name += "…" if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _prose(text: str) -> str:
    return text.replace("\f", "").strip()


def _text(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description="Write the commands' reference.")
    parser.add_argument("page", type=Path, help="Markdown file to write")
    parser.parse_args().page.write_text(markdown(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
