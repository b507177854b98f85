"""Chat templates by the names that other trainers have for them: Baton's, the model's own, or written out."""

from __future__ import annotations

import re

from baton.components.shared.models import chat_templates
from baton.pipelines.importing.draft import Draft

PATH = "model.chat_template"
WRITTEN_OUT = {
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

NAMED = ("chatml", "llama3", "alpaca", *(name for name in WRITTEN_OUT if name not in ("default", "llama2")))
"""axolotl's names of templates that write the same here."""

NOTES = {"alpaca": "Baton's has no beginning of text in front, and an empty line after the last answer too"}
"""In what Baton's template of a name differs."""

ALIASES = {
    "cohere": "command",
    "deepseek3": "deepseek-v3",
    "gemma4_unified": "gemma4",
    "llama3_2_vision": "llama-3.2",
    "nemotron_h": "nemotron",
    "phi_35": "phi-3.5",
}
"""Part of a model's name by the name of its template, where that is another word."""

OWN = "left to the tokenizer, whose own it is by the model's name; a tokenizer without one needs it as a .jinja file"
OTHER = "the tokenizer's own chat template is used; check that it is this one, or give it as a .jinja file"


def is_own(template: str, model: str) -> bool:
    """Tells whether a template is by its name the one that a model's makers have given it."""
    wanted, name = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (ALIASES.get(template, template), model))
    return bool(wanted) and wanted in name


def named(draft: Draft, key: str, template: str, model: str) -> None:
    """Sets a template by its name: Baton's of that name, the text of it, or the one that the tokenizer has."""
    if template in chat_templates.TEMPLATES and template in NAMED:
        draft.put(PATH, template, key)
        if template in NOTES:
            draft.changed(key, NOTES[template])
    elif template in WRITTEN_OUT and template in NAMED:
        draft.put(PATH, WRITTEN_OUT[template], key)
    elif is_own(template, model):
        draft.changed(key, OWN)
    else:
        draft.left(key, OTHER)
