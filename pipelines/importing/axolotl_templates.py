"""axolotl's chat templates: those that Baton has, those of the user's own, and what is said of the others."""

from __future__ import annotations

import os

from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import read, text
from baton.pipelines.importing.sources import Shape

SAME = ("chatml", "llama3")
"""Templates that write the same text as Baton's of that name."""

NAMES = (*SAME, "alpaca")
"""Templates that Baton has under the same name."""

ALPACA = "Baton's has no beginning of text in front, and an empty line after the last answer too"
FALLBACK = "tokenizer_default_fallback_"
OWN = "the tokenizer's own chat template is used for messages; check that it is this one, or give it as a .jinja file"


def template(draft: Draft, shapes: dict[str, Shape]) -> None:
    """Sets `model.chat_template`, of which a recipe has one, from the first data set that has one.

    Args:
        draft: The recipe in the making.
        shapes: Shape of each data set, by how its keys begin.
    """
    _conversations(draft, shapes)
    kinds = ("messages", "sharegpt", "preference", "prompt", "rated", "auto")
    starts = [start for start, shape in shapes.items() if shape.format in kinds]
    if not starts and draft.has("chat_template"):
        draft.needless("chat_template", f"{next(iter(shapes.values())).format} has no chat template")
    chosen: str | None = None
    for start in starts:
        for prefix in (f"{start}.", ""):
            key, template = _given(draft, prefix)
            if key is None:
                continue
            if chosen is None:
                chosen = template
                _set(draft, key, template)
            elif template != chosen:
                draft.left(key, "one recipe has one chat template; that of the first data set is used")
            elif not draft.is_handled(key):
                draft.carry("model.chat_template", key)
            break
    for prefix in (*(f"{start}." for start in shapes), ""):
        _handle_rest(draft, prefix, chosen)


def _given(draft: Draft, prefix: str) -> tuple[str | None, str]:
    """Returns the key that names a template or holds it, and its value; no key where there is none."""
    name, own = f"{prefix}chat_template", f"{prefix}chat_template_jinja"
    if draft.has(name) and draft.get(name) != "jinja":
        return name, read(draft, name, text, "")
    if draft.has(own):
        return own, read(draft, own, text, "")
    return None, ""


def _handle_rest(draft: Draft, prefix: str, chosen: str | None) -> None:
    """Handles the keys that say nothing beside the template which is used."""
    name, own = f"{prefix}chat_template", f"{prefix}chat_template_jinja"
    for key in (name, own):
        if draft.is_handled(key):
            continue
        if not draft.has(key):
            draft.rest(key)
        elif draft.get(key) == "jinja" and draft.has(own):
            draft.carry("model.chat_template", key)
        elif chosen is None:
            draft.needless(key, "no data set has conversations")
        else:
            draft.needless(key, "another template is given, and decides")


def _set(draft: Draft, key: str, template: str) -> None:
    if key.endswith("_jinja"):
        _own(draft, key, template)
    elif template in NAMES:
        draft.put("model.chat_template", template, key)
        if template not in SAME:
            draft.changed(key, ALPACA)
    elif template == "tokenizer_default":
        draft.carry("model.chat_template", key)
    elif template.startswith(FALLBACK):
        draft.left(
            key,
            "the tokenizer's own chat template is used; where it has none, set model.chat_template: "
            f"{template.removeprefix(FALLBACK)}",
        )
    else:
        draft.left(key, OWN)


def _own(draft: Draft, key: str, template: str) -> None:
    """Sets a template of the user's own: the path of its file, or the template itself."""
    beside = os.path.dirname(os.path.abspath(draft.origin))
    paths = (os.path.join(folder, template) for folder in (os.getcwd(), beside))
    path = next(filter(os.path.isfile, paths), "")
    if path and not template.endswith(".jinja"):
        try:
            with open(path, encoding="utf-8") as file:
                template = file.read()
        except (OSError, ValueError):
            draft.left(key, "cannot be read as text; give a .jinja file in model.chat_template")
            return
    if path and template.endswith(".jinja"):
        draft.put("model.chat_template", draft.reach(template, os.getcwd(), beside), key)
    elif "{" in template or template.endswith(".jinja"):
        draft.put("model.chat_template", template, key)
    else:
        draft.left(key, "neither a template nor a file that is there; give one in model.chat_template")


def _conversations(draft: Draft, shapes: dict[str, Shape]) -> None:
    """Settles the names of conversation styles, which axolotl once took for `sharegpt`."""
    for start in shapes:
        key = f"{start}.conversation"
        if not draft.has(key):
            draft.rest(key)
        elif draft.get(key) == "chatml" and not draft.has("chat_template"):
            draft.put("model.chat_template", "chatml")
            draft.changed(key, "without the system message that axolotl puts before conversations which have none")
        else:
            draft.left(key, "conversations are written with model.chat_template, or the tokenizer's own")
