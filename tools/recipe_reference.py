"""The recipe's reference and JSON Schema, written from the schema in the code (`make docs`).

python -m tools.recipe_reference docs/reference/recipe/index.md docs/recipe.schema.json
"""

from __future__ import annotations

import argparse
import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from baton.recipe.base import Name, Quantity
from baton.recipe.recipe import Recipe

Schema = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    "A model from scratch": "pipelines/recipes/quickstart.yaml",
    "LoRA on GSM8K": "docs/examples/gsm8k-lora.yaml",
}

INTRODUCTION = """\
# The recipe

<!-- Written by `make docs` from baton/recipe/; edit that folder instead. -->

A recipe is one YAML file that says what to train, on what, how, and in how many chunks. `baton validate RECIPE`
checks it without training anything.

- A key that is not in the tables below is an error, and the message names the nearest key that is.
- What you leave out has the default in the table; — is a setting that is off or follows from others.
- `--set training.learning_rate=1e-4` changes a value from the command line; the value is YAML. Repeat it at will.
- A relative path in `data.source` or `model.base` is looked for beside the recipe, then in the current folder.
- Editors that know the YAML language server complete keys and check values when a recipe begins with
  `# yaml-language-server: $schema=` and the path of [recipe.schema.json](../../recipe.schema.json), which
  `baton schema` prints too.
"""


def markdown() -> str:
    """Returns the reference as Markdown: two whole recipes, then a table for each section."""
    schema = Recipe.model_json_schema()
    parts = [INTRODUCTION, *(_example(title, path) for title, path in EXAMPLES.items())]
    parts += [_section(path, section) for path, section in sections(schema)]
    return "\n".join(parts)


def json_schema() -> str:
    """Returns the recipe's JSON Schema, as `baton schema` prints it."""
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
    link = posixpath.relpath(path, "docs/reference/recipe")
    return f"## Example: {title}\n\n[{path}]({link})\n\n```yaml\n{text}\n```\n"


def _section(path: str, section: Schema) -> str:
    required = section.get("required", [])
    rows = [
        f"| `{name}` | {_type(field, _join(path, name))} | {_default(field, name in required)} | {_meaning(field)} |"
        for name, field in section["properties"].items()
    ]
    head = [f"## {path or 'Top level'}", "", _meaning(section), ""]
    return "\n".join([*head, "| field | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _type(field: Schema, path: str) -> str:
    """Returns a field's type in words; `path` is the section that a reference leads to."""
    if "$ref" in field:
        return f"[{path}](#{_anchor(path)})"
    if "anyOf" in field:
        kinds = [_type(option, path) for option in field["anyOf"] if option.get("type") != "null"]
        nullable = len(kinds) < len(field["anyOf"]) and field.get("default") is not None
        return " or ".join([*kinds, *(["null"] if nullable else [])])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return "one of " + ", ".join(f"`{choice}`" for choice in field["enum"])
    if "type" not in field:
        return "anything"
    match field["type"]:
        case "integer" | "number" as kind:
            signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
            bounds = [f"{sign} {field[name]}" for name, sign in signs.items() if name in field]
            return " ".join([kind, " and ".join(bounds)]).strip()
        case "boolean":
            return "`true` or `false`"
        case "array" if "prefixItems" in field:
            return f"list of {', '.join(_type(option, path) for option in field['prefixItems'])}"
        case "array":
            least = f", at least {field['minItems']}" if "minItems" in field else ""
            return f"list of {_type(field['items'], path)}{least}"
        case "object":
            values = field["additionalProperties"]
            return "mapping" if values is True else f"mapping of text to {_type(values, path)}"
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
    if required:
        return "required"
    value = field.get("default")
    if value is None:
        return "—"
    if "$ref" in field:
        return "its defaults"
    plain = isinstance(value, str) and value.isprintable()
    return f"`{_cell(value if plain else json.dumps(value))}`"


def _meaning(schema: Schema) -> str:
    return _cell(" ".join(schema.get("description", "").split()))


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
    """Writes both files."""
    parser = argparse.ArgumentParser(description="Write the recipe's reference and JSON Schema.")
    parser.add_argument("reference", type=Path, help="Markdown file to write")
    parser.add_argument("schema", type=Path, help="JSON Schema file to write")
    arguments = parser.parse_args()
    arguments.reference.write_text(markdown(), encoding="utf-8", newline="\n")
    arguments.schema.write_text(json_schema(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
