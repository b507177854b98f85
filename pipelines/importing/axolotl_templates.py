"""axolotl's chat templates: those that Baton has, those of the user's own, and what is said of the others."""

from __future__ import annotations

import os

from baton.pipelines.importing import templates
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import read, text
from baton.pipelines.importing.sources import Shape

FALLBACK = "tokenizer_default_fallback_"
WITH_TEMPLATE = ("messages", "sharegpt", "preference", "prompt", "rated", "auto")
"""Formats of rows that may be conversations."""


def template(draft: Draft, shapes: dict[str, Shape]) -> None:
    """Sets `model.chat_template`, of which a recipe has one, from the first data set that has one.

    Shapes are by how the data set's keys begin.
    """
    for start in shapes:
        _conversation(draft, f"{start}.conversation")
    starts = [start for start, shape in shapes.items() if shape.format in WITH_TEMPLATE]
    if not starts and draft.has("chat_template"):
        draft.needless("chat_template", f"{next(iter(shapes.values())).format} has no chat template")
    chosen: str | None = None
    for start in starts:
        given = (_by_type(draft, start, shapes[start]), _given(draft, f"{start}."), _given(draft, ""))
        key, template = next(filter(None, given), ("", ""))
        if key and chosen is None:
            chosen = template
            _own(draft, key, template) if key.endswith("_jinja") else _named(draft, key, template)
            if draft.get("chat_template") == template:  # where the type of rows says it, too
                draft.carry("model.chat_template", "chat_template")
        elif key and template != chosen:
            draft.left(key, "one recipe has one chat template; that of the first data set is used")
        else:
            draft.carry("model.chat_template", key)
    for prefix in (*(f"{start}." for start in shapes), ""):
        _handle_rest(draft, prefix, chosen)


def _given(draft: Draft, prefix: str) -> tuple[str, str] | None:
    """Returns the key that names a template or holds it, and its value."""
    name, own = f"{prefix}chat_template", f"{prefix}chat_template_jinja"
    if draft.has(name) and draft.get(name) != "jinja":
        return name, read(draft, name, text, "")
    return (own, read(draft, own, text, "")) if draft.has(own) else None


def _by_type(draft: Draft, start: str, shape: Shape) -> tuple[str, str] | None:
    """Returns the template that the type of pairs or rated answers names, such as `llama3.ultra`, and its key."""
    key = f"{start}.type"
    style, dot, _ = str(draft.get(key, "")).partition(".")
    known = dot and style in templates.NAMED and shape.format in ("preference", "rated")
    return (key, style) if known else None


def _handle_rest(draft: Draft, prefix: str, chosen: str | None) -> None:
    """Handles the keys that say nothing beside the template which is used."""
    name, own = f"{prefix}chat_template", f"{prefix}chat_template_jinja"
    for key in (name, own):
        if draft.is_handled(key) or not draft.has(key):
            draft.rest(key)
        elif draft.get(key) == "jinja" and draft.has(own):
            draft.carry("model.chat_template", key)
        else:
            why = "no data set has conversations" if chosen is None else "another template is given, and decides"
            draft.needless(key, why)


def _named(draft: Draft, key: str, template: str) -> None:
    """Sets a template by its name, where Baton's writes the same text or nearly so."""
    if template == "tokenizer_default":
        draft.carry("model.chat_template", key)
    elif template.startswith(FALLBACK):
        name = template.removeprefix(FALLBACK)
        none = f"the tokenizer's own chat template is used; where it has none, set model.chat_template: {name}"
        draft.left(key, none)
    else:
        templates.named(draft, key, template, str(draft.get("base_model")))


def _own(draft: Draft, key: str, template: str) -> None:
    """Sets a template of the user's own: the path of its file, or the template itself."""
    paths = (os.path.join(folder, template) for folder in draft.folders)
    path = next(filter(os.path.isfile, paths), "")
    if path and template.endswith(".jinja"):
        draft.put("model.chat_template", draft.reach(template), key)
        return
    if path:
        try:
            with open(path, encoding="utf-8") as file:
                template = file.read()
        except (OSError, ValueError):
            draft.left(key, "cannot be read as text; give a .jinja file in model.chat_template")
            return
    if "{" in template or template.endswith(".jinja"):
        draft.put("model.chat_template", template, key)
    else:
        draft.left(key, "neither a template nor a file that is there; give one in model.chat_template")


def _conversation(draft: Draft, key: str) -> None:
    """Settles the name of a conversation style, which axolotl once took for `sharegpt`."""
    if draft.get(key) == "chatml" and not draft.has("chat_template"):
        draft.put("model.chat_template", "chatml")
        draft.changed(key, "without the system message that axolotl puts before conversations which have none")
    else:
        draft.drop(key, "conversations are written with model.chat_template, or the tokenizer's own")
