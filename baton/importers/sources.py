"""Data sets and chat templates of another trainer: one format for all sources if it fits, else one each."""

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
"""Names of speakers that Baton reads → role."""

UNPACKED = "pairs are not packed; training.group_by_length saves padding"
FORMS = {("role", "content"): "messages", ("from", "value"): "sharegpt"}
"""Keys of a message's speaker and text → format of conversations."""

TRAINED_AS = {"sharegpt": "messages", "instruction": "prompt-completion", "ranked": "preference"}
"""Format → the one that its rows become."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Shape of a data set's rows; `talks`: they hold messages; `renders`: for prompts and answers that are texts."""

    format: str
    columns: Columns = field(default_factory=dict)
    talks: bool = False
    renders: Literal["chat", "text"] | None = field(default=None, compare=False)

    @property
    def settings(self) -> Document:
        return {"format": self.format, **({"columns": self.columns} if self.columns else {})}

    @property
    def trained_as(self) -> tuple[str, bool]:
        """Key that is equal for rows which can be trained on together."""
        return TRAINED_AS.get(self.format, self.format), self.talks


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set of the file; remarks on it begin with `key`, and `shape` is None where it is unknown."""

    key: str
    uris: list[str]
    shape: RowShape | None = None
    side: Side | None = None
    weight: float = 1.0


def speaks_as(name: object, role: str) -> bool:
    """Tells whether Baton takes a speaker's name for this role."""
    return SPEAKERS.get(str(name).lower()) == role


def put(draft: RecipeDraft, sets: list[DataSet]) -> None:
    """Sets `data.source`, with format and columns: once where all agree, else for each source."""
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
    """Returns a hub data set's address; `train` is its default side."""
    options = {"config": config, "split": None if split == "train" else split}
    query = urlencode({key: value for key, value in options.items() if value})
    return f"hf://datasets/{name}{f'@{revision}' if revision else ''}{'?' if query else ''}{query}"


def side(draft: RecipeDraft, key: str, value: object) -> str:
    """Returns the side of a data set that `split` names, and notes a part of one: Baton reads all of it."""
    name, bracket, _ = str(value).partition("[")
    if bracket:
        draft.unsupported(key, f"{value}: all rows of {name} are read; data.max_samples takes so many from the start")
    return name


def loss(draft: RecipeDraft, key: str, method: str, shape: RowShape | None) -> None:
    """Sets the part of a row that counts: by default the assistant's, not the prompt."""
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
    """Sets how texts of prompts and answers reach the model, the same way for all."""
    known = [(rows, rows.shape.renders) for rows in sets if rows.shape and rows.shape.renders]
    if not known:
        return
    chosen = known[0][1]
    draft.put("data.render_as", chosen)
    for rows, renders in known:
        if renders != chosen:
            draft.changed(rows.key, f"as {chosen} like the first data set, not as {renders}: data.render_as is for all")


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
"""Templates for bases without one, as both trainers write conversations without tools."""

NAMED_TEMPLATES = (
    "chatml",
    "llama3",
    "alpaca",
    *(name for name in WRITTEN_OUT_TEMPLATES if name not in ("default", "llama2")),
)
"""axolotl's names of templates that write the same text here."""

TEMPLATE_NOTES = {"alpaca": "Baton's has no beginning of text in front, and an empty line after the last answer too"}
"""Template → its difference from Baton's of the same name."""

TEMPLATE_ALIASES = {
    "cohere": "command",
    "deepseek3": "deepseek-v3",
    "gemma4_unified": "gemma4",
    "llama3_2_vision": "llama-3.2",
    "nemotron_h": "nemotron",
    "phi_35": "phi-3.5",
}
"""Template → the part of a model's name that it goes with, where the words differ."""

OWN_TEMPLATE = (
    "left to the tokenizer, whose own it is by the model's name; a tokenizer without one needs it as a .jinja file"
)
OTHER_TEMPLATE = "the tokenizer's own chat template is used; check that it is this one, or give it as a .jinja file"


def is_own_template(template: str, model: str) -> bool:
    """Tells whether a template is, by its name, the model's own."""
    wanted, name = (
        re.sub(r"[^a-z0-9]", "", text.lower()) for text in (TEMPLATE_ALIASES.get(template, template), model)
    )
    return bool(wanted) and wanted in name


def named_template(draft: RecipeDraft, key: str, template: str, model: str) -> None:
    """Sets a template by name: Baton's, its written-out text, or the tokenizer's."""
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
