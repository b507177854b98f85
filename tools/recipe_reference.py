"""The recipe's reference and JSON Schema, written from the schema in the code (`make docs`).

python -m tools.recipe_reference docs/reference/recipe docs/recipe.schema.json
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from baton.recipe.base import Name, Quantity
from baton.recipe.recipe import Recipe

Schema = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "docs/reference/recipe"
WRITTEN = "<!-- Written by `make docs` from baton/recipe/; edit that folder instead. -->"
EXAMPLES = {
    "A model from scratch": "pipelines/recipes/quickstart.yaml",
    "LoRA on GSM8K": "docs/examples/gsm8k-lora.yaml",
}

INTRODUCTION = f"""\
# Recipe

{WRITTEN}

One YAML file describes a run: model, data, method and number of chunks. `baton check RECIPE` checks it without
training.

- Unknown keys are errors; the message names the nearest known key.
- Omitted keys take the default in the table. Keys without a default are off or follow from others.
- `--set training.learning_rate=1e-4` changes a value from the command line. Values are YAML; repeat the option freely.
- Relative paths in `data.source` and `model.base` start at the recipe's folder, then at the working folder.
- Editors complete keys and check values when a recipe begins with `# yaml-language-server: $schema=` and the path of
  [recipe.schema.json](../../recipe.schema.json); `baton recipe schema` prints it.
"""


def pages() -> dict[str, str]:
    """Returns Markdown by file name: an index with two whole recipes, and a page for each top-level section."""
    schema = Recipe.model_json_schema()
    found = dict(sections(schema))
    homes: dict[str, str] = {}  # title of a section → path of its table; a second path of the same section links there
    for path, section in found.items():
        homes.setdefault(section["title"], path)
    rows: dict[str, str] = {}  # row → first section that holds it
    written = {"index.md": [INTRODUCTION, _section("", found[""], homes, rows)]}
    for path, section in found.items():
        if path and homes[section["title"]] == path:
            top = path.partition(".")[0]
            page = written.setdefault(f"{top}.md", [f"# {top}\n\n{WRITTEN}\n"] if path == top else [])
            page.append(_section(path, section, homes, rows))
    written["index.md"] += [_example(title, path) for title, path in EXAMPLES.items()]
    return {name: "\n".join(parts) for name, parts in written.items()}


def json_schema() -> str:
    """Returns the recipe's JSON Schema, as `baton recipe schema` prints it."""
    return json.dumps(Recipe.model_json_schema(), indent=2) + "\n"


def sections(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields dotted path and schema of each section in the order of the fields, the recipe itself first."""

    def below(path: str, section: Schema) -> Iterator[tuple[str, Schema]]:
        inner = {
            name: schema["$defs"][to] for name, field in section["properties"].items() if (to := _reference(field))
        }
        yield path, section
        for name, part in inner.items():
            yield from below(_join(path, name), part)

    return below("", schema)


def _example(title: str, path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    link = posixpath.relpath(path, FOLDER)
    return f"## Example: {title}\n\n[{path}]({link})\n\n```yaml\n{text}\n```\n"


def _section(path: str, section: Schema, homes: dict[str, str], written: dict[str, str]) -> str:
    """Returns a section's table; fields that an earlier section of the page has as well are one row with a link."""
    required, page = section.get("required", []), path.partition(".")[0]
    rows: list[str] = []
    again: dict[str, list[str]] = {}
    for name, field in section["properties"].items():
        row = f"| `{name}` | {_type(field, page, homes)}{_default(field, name in required)} | {_meaning(field)} |"
        first = written.setdefault(row, path)
        if first != path and first.partition(".")[0] == page:
            again.setdefault(first, []).append(f"`{name}`")
        else:
            rows.append(row)
    rows += [f"| {', '.join(names)} | | As in [{first}](#{_anchor(first)}). |" for first, names in again.items()]
    head = [] if path and path == page else [f"## {path or 'Top level'}", ""]
    return "\n".join(
        [*head, _meaning(section), "", "| field | type and default | meaning |", "|---|---|---|", *rows, ""]
    )


def _type(field: Schema, page: str, homes: dict[str, str]) -> str:
    """Returns a field's type in words, with a link from `page` to the table of a section."""
    if "$ref" in field:
        path = homes[_reference(field) or ""]
        top = path.partition(".")[0]
        anchor = f"#{_anchor(path)}" if path != top or top == page else ""
        return f"[{path}]({'' if top == page else f'{top}.md'}{anchor})"
    if "anyOf" in field:
        kinds = [_type(option, page, homes) for option in field["anyOf"] if option.get("type") != "null"]
        nullable = len(kinds) < len(field["anyOf"]) and field.get("default") is not None
        return " or ".join([*kinds, *(["null"] if nullable else [])])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "type" not in field:
        return "anything"
    match field["type"]:
        case "integer" | "number" as kind:
            signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
            bounds = [f"{sign} {field[name]}" for name, sign in signs.items() if name in field]
            return " ".join([kind, " and ".join(bounds)]).strip()
        case "boolean":
            return "boolean"
        case "array" if "prefixItems" in field:
            return f"list of {', '.join(_type(option, page, homes) for option in field['prefixItems'])}"
        case "array":
            least = f", at least {field['minItems']}" if "minItems" in field else ""
            return f"list of {_type(field['items'], page, homes)}{least}"
        case "object":
            values = field["additionalProperties"]
            return "mapping" if values is True else f"mapping of text to {_type(values, page, homes)}"
        case kind:
            return _text(field) if kind == "string" else str(kind)


def _text(field: Schema) -> str:
    named = {
        TypeAdapter(Name).json_schema()["pattern"]: "name",
        TypeAdapter(Quantity).json_schema()["pattern"]: "quantity such as `500m`, `4`, `64Gi`",
    }
    pattern = field.get("pattern")
    return named.get(pattern, f"text matching `{_cell(str(pattern))}`") if pattern else "text"


def _default(field: Schema, required: bool) -> str:
    """Returns a further line of a type's cell, empty for a setting that is off or follows from others."""
    if required:
        return "<br>required"
    value = field.get("default")
    if value is None or "$ref" in field:
        return ""
    plain = isinstance(value, str) and value.isprintable()
    return f"<br>default `{_cell(value if plain else json.dumps(value))}`"


def _meaning(schema: Schema) -> str:
    text = _cell(" ".join(schema.get("description", "").split()))
    return re.sub(r"\bdocs/\S+?\.md\b", lambda match: f"[{match[0]}]({posixpath.relpath(match[0], FOLDER)})", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _reference(field: Schema) -> str | None:
    """Returns the name of the section that a field holds, alone, in a list, a mapping or as one of several kinds."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    held = (field[name] for name in ("items", "additionalProperties") if isinstance(field.get(name), dict))
    inside = (*held, *field.get("anyOf", []))
    return next((found for option in inside if (found := _reference(option))), None)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _anchor(path: str) -> str:
    """Returns the anchor that GitHub gives a heading with this text."""
    return path.replace(".", "").lower()


def main() -> None:
    """Writes the pages and the JSON Schema."""
    parser = argparse.ArgumentParser(description="Write the recipe's reference and JSON Schema.")
    parser.add_argument("folder", type=Path, help="folder of Markdown pages to write")
    parser.add_argument("schema", type=Path, help="JSON Schema file to write")
    arguments = parser.parse_args()
    written = pages()
    for stale in set(arguments.folder.glob("*.md")) - {arguments.folder / name for name in written}:
        stale.unlink()
    for name, text in written.items():
        (arguments.folder / name).write_text(text, encoding="utf-8", newline="\n")
    arguments.schema.write_text(json_schema(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
