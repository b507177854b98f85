"""Data sets and chat templates of another trainer, as sources and template of a recipe.

The recipe has one format for all sources if it fits, else one for each.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlencode

from baton.importers.draft import Document, RecipeDraft
from baton.importers.parse import boolean, read
from baton.models import chat
from baton.recipe.data import Columns, Side

SPEAKERS = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""Role by the names that Baton reads for who says something."""

UNPACKED = "pairs are not packed; training.group_by_length saves padding"
FORMS = {("role", "content"): "messages", ("from", "value"): "sharegpt"}
"""Format of conversations by what their messages call who says something, and what."""

TRAINED_AS = {"sharegpt": "messages", "instruction": "prompt-completion", "ranked": "preference"}
"""The format that rows of another one become."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """RowShape of a data set's rows.

    Attributes:
        format: As `data.format`.
        columns: As `data.columns`.
        talks: Whether rows hold messages.
        renders: How prompts and answers that are texts reach the model there, as `data.render_as`; None for rows that
            have none, and where nothing is said.
    """

    format: str
    columns: Columns = field(default_factory=dict)
    talks: bool = False
    renders: Literal["chat", "text"] | None = field(default=None, compare=False)

    @property
    def settings(self) -> Document:
        """What a recipe says of the rows."""
        return {"format": self.format, **({"columns": self.columns} if self.columns else {})}

    @property
    def trained_as(self) -> tuple[str, bool]:
        """Key that is equal for rows which can be trained on together."""
        return TRAINED_AS.get(self.format, self.format), self.talks


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set of the file.

    Attributes:
        key: What remarks on it begin with.
        uris: Where its rows are.
        shape: What they look like; None where nothing is known of them.
        side: The side that the file gives them.
        weight: As a source's `weight`.
    """

    key: str
    uris: list[str]
    shape: RowShape | None = None
    side: Side | None = None
    weight: float = 1.0


def speaks_as(name: object, role: str) -> bool:
    """Tells whether Baton takes a name in messages for this role."""
    return SPEAKERS.get(str(name).lower()) == role


def put(draft: RecipeDraft, sets: list[DataSet]) -> None:
    """Sets `data.source`, and format and columns: once where they are the same for all, else for each source."""
    known = [(rows, rows.shape) for rows in sets if rows.shape]
    alike = all(shape == known[0][1] for _, shape in known)
    if known and alike:
        for name, value in known[0][1].settings.items():
            draft.put(f"data.{name}", value)
    draft.put("data.source", [_source(rows, uri, alike) for rows in sets for uri in rows.uris])
    for rows, shape in known:
        first, other = known[0][1].trained_as, shape.trained_as
        if other != first and "auto" not in (*first, *other):
            draft.unsupported(
                rows.key,
                f"{_named(*other)} are not trained on together with {_named(*first)} of the first data set: "
                "bring both to one format",
            )


def on_hub(name: object, *, revision: object, config: object, split: object) -> str:
    """Returns a hub data set's address; the side `train` is the one that is read without saying so."""
    options = {"config": config, "split": None if split == "train" else split}
    query = urlencode({key: value for key, value in options.items() if value})
    return f"hf://datasets/{name}{f'@{revision}' if revision else ''}{'?' if query else ''}{query}"


def side(draft: RecipeDraft, key: str, value: object) -> str:
    """Returns the side of a data set that a `split` names, and notes where it is a part of one: all of it is read."""
    name, bracket, _ = str(value).partition("[")
    if bracket:
        draft.unsupported(key, f"{value}: all rows of {name} are read; data.max_samples takes so many from the start")
    return name


def loss(draft: RecipeDraft, key: str, method: str, shape: RowShape | None) -> None:
    """Sets what counts: by default all that the assistant says, and nothing of the prompt."""
    whole_row = read(draft, key, boolean, False)
    if method != "sft":
        draft.not_needed(key, f"has no effect with {method}") if whole_row else draft.ignore(key)
    elif whole_row:
        draft.put("data.train_on", "all", key)
    elif shape is None or shape.talks or shape.format == "auto":  # of texts, assistant means the completion
        draft.put("data.train_on", "assistant", key)
    else:
        draft.carry("data.train_on", key)  # of a prompt and its completion, the completion counts anyway


def rendering(draft: RecipeDraft, sets: list[DataSet]) -> None:
    """Sets how prompts and answers that are texts reach the model: a recipe has one way for all."""
    known = [(rows, rows.shape.renders) for rows in sets if rows.shape and rows.shape.renders]
    if not known:
        return
    chosen = known[0][1]
    draft.put("data.render_as", chosen)
    for rows, renders in known:
        if renders != chosen:
            draft.changed(rows.key, f"as {chosen} like the first data set, not as {renders}: data.render_as is for all")


def given_sides(draft: RecipeDraft) -> bool:
    """Tells whether sources say on which side their rows lie."""
    return any(isinstance(source, dict) and "side" in source for source in draft.peek("data.source", []))


def _source(rows: DataSet, uri: str, alike: bool) -> str | Document:
    source: Document = {} if rows.weight == 1 else {"weight": rows.weight}
    if rows.shape and not alike:
        source.update(rows.shape.settings)
    if rows.side:
        source["side"] = rows.side
    return {"uri": uri, **source} if source else uri


def _named(trained_as: str, talks: bool) -> str:
    if trained_as == "messages":
        return "conversations"
    return f"rows of {trained_as}{' as messages' if talks else ''}"


TEMPLATE_KEY = "model.chat_template"
WRITTEN_OUT_TEMPLATES = {
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ '<start_of_turn>' + ('model' if "
        "message['role'] == 'assistant' else message['role']) + '\\n' + message['content'] | trim + '<end_of_turn>\\n' "
        "}}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "phi_3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + "
        "'<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "falcon_h1": (
        "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
        "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "deepseek_v2": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<｜User｜>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + message['content'] + eos_token }}{% else %}{{ message['content'] + '\\n\\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
    "llama2": (
        "{% set said = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' if messages[0]['role'] == 'system' "
        "else '' %}{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
        "(said if loop.index0 < 2 else '') + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' "
        "%}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "default": (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Human: ' + message['content'] + eos_token "
        "+ '\\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant:' + message['content'] + eos_token + '\\n' }}"
        "{% else %}{{ 'System: ' + message['content'] + eos_token + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
"""Templates for bases that have none, as both trainers write conversations without tools."""

NAMED_TEMPLATES = (
    "chatml",
    "llama3",
    "alpaca",
    *(name for name in WRITTEN_OUT_TEMPLATES if name not in ("default", "llama2")),
)
"""axolotl's names of templates that write the same here."""

TEMPLATE_NOTES = {"alpaca": "Baton's has no beginning of text in front, and an empty line after the last answer too"}
"""In what Baton's template of a name differs."""

TEMPLATE_ALIASES = {
    "cohere": "command",
    "deepseek3": "deepseek-v3",
    "gemma4_unified": "gemma4",
    "llama3_2_vision": "llama-3.2",
    "nemotron_h": "nemotron",
    "phi_35": "phi-3.5",
}
"""Part of a model's name by the name of its template, where that is another word."""

OWN_TEMPLATE = (
    "left to the tokenizer, whose own it is by the model's name; a tokenizer without one needs it as a .jinja file"
)
OTHER_TEMPLATE = "the tokenizer's own chat template is used; check that it is this one, or give it as a .jinja file"


def is_own_template(template: str, model: str) -> bool:
    """Tells whether a template is by its name the one that a model's makers have given it."""
    wanted, name = (
        re.sub(r"[^a-z0-9]", "", text.lower()) for text in (TEMPLATE_ALIASES.get(template, template), model)
    )
    return bool(wanted) and wanted in name


def named_template(draft: RecipeDraft, key: str, template: str, model: str) -> None:
    """Sets a template by its name: Baton's of that name, the text of it, or the one that the tokenizer has."""
    if template in chat.TEMPLATES and template in NAMED_TEMPLATES:
        draft.put(TEMPLATE_KEY, template, key)
        if template in TEMPLATE_NOTES:
            draft.changed(key, TEMPLATE_NOTES[template])
    elif template in WRITTEN_OUT_TEMPLATES and template in NAMED_TEMPLATES:
        draft.put(TEMPLATE_KEY, WRITTEN_OUT_TEMPLATES[template], key)
    elif is_own_template(template, model):
        draft.changed(key, OWN_TEMPLATE)
    else:
        draft.unsupported(key, OTHER_TEMPLATE)
