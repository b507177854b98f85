"""How conversations are written: templates by name, each with what the assistant says between `generation` marks."""

from __future__ import annotations

from baton.components.shared.core import near
from baton.components.shared.core.errors import UserError
from baton.components.shared.store.storage import Storage

CHATML = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""OpenAI's ChatML; that of tokenizers trained by Baton."""

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""Meta's Llama 3, without its dates and tools."""

ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token + '\\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + eos_token + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Hugging Face's Zephyr."""

ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
"""Stanford's Alpaca; its preamble is the system's message, where there is one."""

OWN_TOKENS = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
"""First tokens of a tokenizer that Baton trains: the end of a text, padding, and those of ChatML."""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR, "alpaca": ALPACA}


def chat_template(setting: str) -> str:
    """Returns the template that `model.chat_template` stands for.

    Args:
        setting: A name in `TEMPLATES`, path or URI of a `.jinja` file, or the template itself.

    Raises:
        UserError: there is no such name or file, or the template is not valid Jinja.
    """
    template = TEMPLATES.get(setting)
    if template is not None:
        return template
    if setting.endswith(".jinja") and "\n" not in setting:
        template = _read(setting)
    elif "{" in setting:
        template = setting
    else:
        raise UserError(
            f"model.chat_template {setting!r} is none of {', '.join(TEMPLATES)}, no .jinja file and no template."
            f"{near.hint(setting, TEMPLATES)}"
        )
    _require_valid(template)
    return template


def _require_valid(template: str) -> None:
    """Compiles a template as Transformers does, and computes no constant: `9 ** 9 ** 9` has no end."""
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment.overlay()
    # What is asked about when it is used, or depends on what comes before, is no constant.
    environment.intercepted_binops = frozenset(environment.binop_table)
    changing = nodes.EvalContextModifier([nodes.Keyword("volatile", nodes.Const(True))])
    try:
        tree = environment.parse(template)
        tree.body.insert(0, changing)
        environment.compile(tree)
    except TemplateSyntaxError as error:
        raise UserError(f"model.chat_template is not valid Jinja: {error.message} (line {error.lineno}).") from None
    except (RecursionError, ValueError, SyntaxError) as error:  # too deep, a number of too many digits, a lone `break`
        raise UserError(f"model.chat_template is not valid Jinja: {error}.") from None


def _read(path: str) -> str:
    try:
        if "://" in path:
            folder, _, name = path.rpartition("/")
            return Storage(folder).read(name).decode()
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"model.chat_template {path!r} does not exist.", remedy="Check the path.") from None
    except UnicodeDecodeError:
        raise UserError(f"model.chat_template {path!r} is not UTF-8 text.") from None
    except OSError as error:
        raise UserError(f"model.chat_template {path!r} cannot be read: {error.strerror}.") from None
