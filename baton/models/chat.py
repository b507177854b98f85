"""Chat templates by name, the day that templates are given, and rows as turns of a conversation.

Templates mark the assistant's text with `generation`. Those of Llama 3.2, gpt-oss and others write today's date, by
`strftime_now`. All stages of a run use the same day, or a chunk after midnight would train on another text.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import date, datetime, tzinfo
from typing import TYPE_CHECKING, Any, Self

from baton import errors
from baton.errors import UserError
from baton.recipe.recipe import Recipe
from baton.store.storage import Storage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHATML = (  # OpenAI's, and that of tokenizers trained by Baton
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = (  # Meta's, without its dates and tools
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

ZEPHYR = (  # Hugging Face's
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token + '\\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + eos_token + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

ALPACA = (  # Stanford's; its preamble is the system's message, where there is one
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\\n\\n' }}"
    "{% else %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)

OWN_TOKENS = ("<|end|>", "<|pad|>", "<|im_start|>", "<|im_end|>")  # first tokens of a tokenizer trained by Baton

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "zephyr": ZEPHYR, "alpaca": ALPACA}


def chat_template(setting: str) -> str:
    """Returns the template of `model.chat_template`: a name, the address of a `.jinja` file, or Jinja itself."""
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
            f"{errors.suggest(setting, TEMPLATES)}"
        )
    _require_valid(template)
    return template


def _require_valid(template: str) -> None:
    """Compiles a template as Transformers does, without computing constants: `9 ** 9 ** 9` has no end."""
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment.overlay()
    # Operators that are intercepted, and expressions in a volatile context, are not folded.
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


logger = logging.getLogger("baton")

DATE_VARIABLE = "BATON_TODAY"  # set in the processes of a run's stages and their children
TEMPLATE_UTILS = "transformers.utils.chat_template_utils"
DATE_FUNCTION = "strftime_now"


class _TemplateClock(datetime):
    """A clock that shows the day that was set, at midnight, and else the time."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        day = os.environ.get(DATE_VARIABLE)
        return cls.fromisoformat(day) if day else super().now(tz)


def set_template_date(day: date | str | None) -> None:
    """Sets the day (text in ISO format, None: the clock's) for templates in this process and its children."""
    if day:
        if os.environ.get(DATE_VARIABLE) != str(day):
            logger.info("chat templates are told that it is %s", day)
        os.environ[DATE_VARIABLE] = str(day)
    else:
        os.environ.pop(DATE_VARIABLE, None)
    if TEMPLATE_UTILS in sys.modules:
        hold_template_date()


def hold_template_date() -> None:
    """Patches Transformers' clock while a day is set."""
    # A patch, as TRL and the evaluation harness would pass no argument for the day on.
    if DATE_VARIABLE in os.environ or TEMPLATE_UTILS in sys.modules:
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = _TemplateClock if DATE_VARIABLE in os.environ else datetime


def asks_for_date(template: object) -> bool:
    """Tells whether a chat template, or one of several, asks for the day."""
    return DATE_FUNCTION in str(template)


Row = dict[str, Any]

# Stanford Alpaca's prompt, in which the split writes instruction and input.
PREAMBLE = (
    "Below is an instruction that describes a task{and_input}. "
    "Write a response that appropriately completes the request."
)
AND_INPUT = ", paired with an input that provides further context"
INSTRUCTION, INPUT, RESPONSE = "\n\n### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:"

TURNS = "prompts and answers that are texts become user and assistant turns"
ANSWERS = ("completion", "chosen", "rejected")
SYSTEM = "system"
BESIDE = (SYSTEM, "tools")  # columns of a row of texts that only turns have a place for
PROMPT_TEXT = "prompt_text"  # column of a prompt that became turns: its text, for reward functions


def alpaca(instruction: str, context: str | None) -> str:
    """Returns an instruction, and its input where there is one, as Alpaca's prompt."""
    head = PREAMBLE.format(and_input=AND_INPUT if context else "")
    return f"{head}{INSTRUCTION}{instruction}{f'{INPUT}{context}' if context else ''}{RESPONSE}"


def strip_alpaca(prompt: str) -> str:
    """Returns instruction, blank line and input of a prompt that `alpaca` wrote, and any other as it is."""
    for and_input in ("", AND_INPUT):
        head = PREAMBLE.format(and_input=and_input) + INSTRUCTION
        if prompt.startswith(head) and prompt.endswith(RESPONSE) and len(prompt) >= len(head) + len(RESPONSE):
            body = prompt[len(head) : -len(RESPONSE)]
            # At the first `### Input:`, so that an input may itself hold one; an instruction may not.
            return "\n\n".join(body.split(INPUT, 1)) if and_input else body
    return prompt


def own_template(recipe: Recipe) -> str | None:
    """Returns the recipe's chat template, None where the tokenizer's counts."""
    return chat_template(recipe.model.chat_template) if recipe.model.chat_template else None


def uses_chat(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether texts become user and assistant turns (`data.render_as`)."""
    # By `auto`, where training starts from a model whose tokenizer has a chat template. Never for `pretrain` and with a
    # tokenizer that Baton trained, in this run or for the start model.
    how = recipe.data.render_as
    if how == "text" or recipe.training.method == "pretrain" or not tokenizer.chat_template:
        return False
    return how == "chat" or (recipe.model.base is not None and not is_baton_tokenizer(tokenizer))


def may_use_chat(recipe: Recipe) -> bool:
    """Tells whether texts may become turns, whatever the tokenizer turns out to be."""
    how = recipe.data.render_as
    return how == "chat" or (how == "auto" and recipe.model.base is not None and recipe.training.method != "pretrain")


def require_template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError where the recipe asks for a template and there is none."""
    if recipe.data.render_as == "chat" and not tokenizer.chat_template:
        raise UserError(
            f"data.render_as: chat, and the tokenizer of {recipe.model.base or 'the model'} has no chat template.",
            remedy="Set model.chat_template (chatml, llama3, zephyr, alpaca or a .jinja file), take an instruct model, "
            "or set render_as to text.",
        )


def describe(recipe: Recipe, *, chat: bool) -> str:
    """Returns in words how texts reach the model, as turns of a chat or as text."""
    how = f"(data.render_as: {recipe.data.render_as})"
    if not chat:
        return f"prompts and answers that are texts are trained as text {how}"
    own = recipe.model.chat_template
    name = own if own in TEMPLATES else "that the recipe gives" if own else f"of {recipe.model.base or 'the tokenizer'}"
    system = ", with data.system" if recipe.data.system else ""
    return f"{TURNS} in the chat template {name}{system} {how}"


def is_baton_tokenizer(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether Baton trained a tokenizer, by its first tokens."""
    own = list(OWN_TOKENS)
    return len(tokenizer) >= len(own) and tokenizer.convert_ids_to_tokens(list(range(len(own)))) == own


def apply_chat(rows: list[Row], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Returns rows of the split as they are rendered: as turns where that applies, `data.system` before each."""
    if uses_chat(recipe, tokenizer):
        return [as_turns(row, recipe) for row in rows]
    rows = [with_system(row, recipe) for row in rows] if recipe.data.system else rows
    return [
        {name: value for name, value in row.items() if name not in beside} if (beside := unplaced(row)) else row
        for row in rows
    ]


def unplaced(row: Row) -> list[str]:
    """Returns the columns of a row of texts that only turns have a place for."""
    return [name for name in BESIDE if name in row] if isinstance(row.get("prompt"), str) else []


def rendering_changes(row: Row, recipe: Recipe, *, chat: bool) -> str:
    """Returns in words how `data.render_as` and `data.system` change a row and its like, or nothing."""
    if isinstance(row.get("prompt"), str) and "text" not in row:
        if not chat and recipe.data.system is not None:
            raise UserError(
                "data.system: prompts are trained as text here, which has no system message.",
                remedy="Set data.render_as to chat, with a model or model.chat_template that has a template, or remove "
                "data.system.",
            )
        return describe(recipe, chat=True) if chat else ""
    is_talk = ("messages" in row or "prompt" in row) and "text" not in row
    return "conversations without a system message get data.system" if is_talk and recipe.data.system else ""


def as_turns(row: Row, recipe: Recipe) -> Row:
    """Returns a row of the split with messages as prompt and answers; plain text stays as it is."""
    if "messages" in row or "text" in row:
        return with_system(row, recipe)
    turned = dict(row)
    # Before `auto`, an extra column of this name was for reward functions alone; it stays so.
    is_placed = recipe.data.render_as == "chat" or SYSTEM not in recipe.data.extra_columns
    system = turned.pop(SYSTEM, None) if is_placed else None
    answered_by_model = recipe.training.spec.rows == "prompts"
    if isinstance(row["prompt"], str):
        turned["prompt"] = [{"role": "user", "content": strip_alpaca(row["prompt"])}]
        if answered_by_model:  # reward functions see the text
            turned[PROMPT_TEXT] = row["prompt"] + recipe.data.separator
    for name in () if answered_by_model else ANSWERS:
        if isinstance(row.get(name), str):
            turned[name] = [{"role": "assistant", "content": row[name]}]
    return with_system(turned, recipe, system)


def with_system(row: Row, recipe: Recipe, own: str | None = None) -> Row:
    """Returns a row with its own system message, or `data.system`, before a conversation without one."""
    system = own or recipe.data.system
    name = "messages" if "messages" in row else "prompt"
    turns = row.get(name)
    if system is None or not isinstance(turns, list) or "text" in row:
        return row
    if any(message["role"] in ("system", "developer") for message in turns):
        return row
    return {**row, name: [{"role": "system", "content": system}, *turns]}
