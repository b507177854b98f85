"""The recipe file that an import ends in, and the report of what became of every key."""

from __future__ import annotations

import os
from collections.abc import Iterator

import yaml
from pydantic import BaseModel

from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.recipe.hooks import ASK, code_in
from baton.components.shared.recipe.mistakes import yaml_text
from baton.components.shared.recipe.training import SECTIONS
from baton.pipelines.importing.draft import Document, Draft, Fate
from baton.pipelines.importing.reading import name_for, shown


def recipe_of(draft: Draft) -> Recipe:
    """Returns the recipe, checked.

    Raises:
        UserError: what the file asks for is no valid recipe; the message names the recipe's keys.
    """
    document = {"name": name_for(draft.origin), **draft.document}
    if code_in(document):
        document["trust"] = ASK
    return recipe_file.validate(document, origin=f"made from {draft.origin}")


def to_yaml(recipe: Recipe, draft: Draft) -> str:
    """Returns a recipe's file: what differs from the defaults, in the schema's order, below where it comes from."""
    left = dict.fromkeys(remark.key for remark in draft.remarks if remark.fate is Fate.left)
    head = [f"Made from {draft.tool}'s {os.path.basename(draft.origin)} by `baton import`; see docs/recipe.md."]
    if left:
        head.append(f"Not carried over: {', '.join(left)}.")
    lines = [f"# {' '.join(line.split())}\n" for line in head]
    body = yaml.dump(_differing(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=200)
    return "".join([*lines, body])


class _Dumper(yaml_text.Dumper):
    """Short mappings and lists on one line, as people write recipes."""

    def represent_data(self, data: object) -> yaml.Node:
        node: yaml.Node = super().represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inner = [value for _, value in pairs] or node.value
            few = len(pairs) <= 4 and sum(len(value.value) for _, value in pairs) <= 60
            node.flow_style = few and all(isinstance(value, yaml.ScalarNode) for value in inner)
        return node


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Writes a text of several lines, such as a chat template, as it is, and one of line breaks alone in quotes."""
    lines = "|" if "\n" in text.strip() else '"'
    return dumper.represent_text(text, style=lines if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _differing(section: BaseModel) -> Document:
    """Returns what a section says that its defaults do not. One that is there only to be there gets its first field."""
    written: Document = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if not field.is_required() and value == field.get_default():
            continue
        if isinstance(value, BaseModel):
            inner = _differing(value)
            if not inner and name in SECTIONS:
                continue  # follows from the method
            first = next(iter(type(value).model_fields))
            value = inner or {first: _plain(getattr(value, first))}
        written[name] = _plain(value)
    if source := written.get("source"):
        written["source"] = source[0] if len(source) == 1 and type(section).__name__ == "Data" else source
    return written


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return _differing(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def report(draft: Draft, target: str) -> Iterator[str]:
    """Yields the lines that say what became of every key; `target` is what the recipe is called."""
    keys = {fate: {remark.key for remark in draft.remarks if remark.fate is fate} for fate in Fate}
    asking = len(draft.given) - len(draft.idle)
    changed = keys[Fate.changed] - keys[Fate.left]
    yield (
        f"{target}: from {draft.tool}'s {draft.origin}, {len(draft.carried) + len(changed & draft.given.keys())} of "
        f"{asking} settings carried over"
    )
    for fate in Fate:
        remarks = [remark for remark in draft.remarks if remark.fate is fate]
        if remarks:
            yield f"{fate}:"
        for remark in remarks:
            value = f" {shown(remark.key, remark.value)}" if remark.key in draft.given else ""
            yield f"  {remark.key}:{value} – {remark.text}"
    if code := code_in(draft.document):
        yield f"code waits until you have read it: remove trust: {ASK} then, or give --trust"
        yield from (f"  {line}" for line in code)
    if draft.idle:
        yield f"off or without a value: {', '.join(draft.idle)}"
    if draft.assumed:
        yield f"written out, as the file leaves it to {draft.tool}:"
        yield from (f"  {line}" for line in draft.assumed)
    yield "assumed: one GPU; for more, multiply training.batch_size by their number"
