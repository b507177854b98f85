"""Chat templates by name, the day that templates are given, rows as turns of a conversation, and their rendering.

`ChatTemplate` renders conversations alike for training, evaluation, export and chat. Templates mark the assistant's
text with `generation`. Those of Llama 3.2, gpt-oss and others write today's date, by `strftime_now`. All stages of a
run use the same day, or a chunk after midnight would train on another text.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from baton.errors import RowError, UserError, suggest
from baton.models import vocabulary
from baton.recipe.recipe import Recipe
from baton.runs.versions import FORMATS
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
            f"{suggest(setting, TEMPLATES)}"
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
            logger.info("date for chat templates: %s", day)
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


Message = dict[str, Any]
MARK = re.compile(r"{%-?\s*generation\s*-?%}")  # opens the assistant's text in a template


@dataclass(frozen=True)
class Conversation:
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def upto(self, count: int, *more: Message) -> Conversation:
        return Conversation([*self.messages[:count], *more], self.tools)

    def with_text_arguments(self) -> Conversation:
        """Returns it with arguments of calls as JSON text, which some templates need."""

        def written(call: Message) -> Message:
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                return call
            return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}

        messages = [
            {**each, "tool_calls": list(map(written, each["tool_calls"]))} if each.get("tool_calls") else each
            for each in self.messages
        ]
        return Conversation(messages, self.tools)


@dataclass(frozen=True)
class RenderedConversation:
    conversation: Conversation  # with its calls' arguments as the template takes them
    text: str


class ChatTemplate:
    """A tokenizer's chat template.

    `number` is that of the tokens' format. Runs of format 1 go on as they were: turns that are written differently when
    last, and prompts after each conversation, are followed as then.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, number: int = FORMATS["tokens"].number) -> None:
        self.tokenizer = tokenizer
        self.is_older = number < 2
        self.is_marked = bool(MARK.search(str(tokenizer.chat_template)))
        added = sorted(filter(str.strip, tokenizer.get_added_vocab()), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._atom = re.compile("|".join([*map(re.escape, added), r"<[^<>\s]*>", r"\s", r"\w+", "."]), re.DOTALL)

    def render_each(
        self, conversations: Sequence[Conversation], *, prompts: bool = False
    ) -> list[RenderedConversation | RowError]:
        """Renders conversations, all at once where the template takes them all; `prompts` makes the model answer."""
        if all(not conversation.tools for conversation in conversations):
            try:
                texts = self._apply([x.messages for x in conversations], None, prompts)
                return [RenderedConversation(x, text) for x, text in zip(conversations, texts, strict=True)]
            except _refusals():
                pass  # one of them: each alone tells which
        return [self._render_or_why(conversation, prompts) for conversation in conversations]

    def marks(self, conversation: Conversation) -> list[tuple[int, int]]:
        """Returns the spans of text that the template marks as the assistant's, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=self.tokenizer.get_chat_template(tools=conversation.tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return [(start, end) for start, end in spans[0] if end > start]

    def render(self, conversation: Conversation, *, prompt: bool = False) -> str | None:
        """Returns a conversation's text, None where the template refuses it."""
        try:
            return self._apply([conversation.messages], conversation.tools, prompt)[0]
        except _refusals():
            return None

    def common(self, a: str, b: str) -> int:
        """Returns how many characters two renderings share from the start, up to a whole token, tag or word."""
        at = 0
        for x, y in zip(self._atom.finditer(a), self._atom.finditer(b), strict=False):
            if x[0] != y[0]:
                break
            at = x.end()
        return at

    def atoms(self, text: str) -> list[str]:
        """Returns a text's own tokens of the tokenizer, tags, words and other characters."""
        return self._atom.findall(text)

    def starting(self, prompt: str) -> list[str]:
        """Returns beginnings of a text that end with a whole token, tag or word, the longest first."""
        return [prompt[: atom.end()] for atom in self._atom.finditer(prompt)][::-1]

    def added_token(self, text: str, at: int) -> str:
        """Returns the tokenizer's own token at a place, empty where there is none."""
        match = self._added.match(text, at)
        return match[0] if match else ""

    def is_token(self, text: str) -> bool:
        return self._added.fullmatch(text) is not None

    def is_distinct_prefix(self, beginning: str) -> bool:
        """Tells whether a beginning of an answer's header is none of a question's."""
        asked = self._asked.removesuffix(self.prompt) if self.always_prompts else self._asked
        return bool(beginning.strip()) and beginning not in asked

    @cached_property
    def prompt(self) -> str:
        """The text after a question that makes the model answer."""
        with_prompt = self.render(ASKED, prompt=True) or ""
        if self.always_prompts:
            alone, again, _ = self._after_question
            return alone[len(alone[: self.common(alone, again)].rstrip().removesuffix(self.opening)) :]
        return with_prompt[self.common(with_prompt, self._asked) :] + self.header

    @cached_property
    def header(self) -> str:
        """The text before an answer in a template that knows no prompts."""
        before, answered = self.render(ASKED, prompt=True) or "", self._answered
        if self.always_prompts:
            return ""
        if before != self._asked or not answered.startswith(before) or ANSWER not in answered:
            return ""
        header = answered[len(before) : answered.index(ANSWER)]
        return header if header.strip() else ""

    @cached_property
    def always_prompts(self) -> bool:
        """Whether it makes the model answer after every question, asked to or not."""
        alone, again, answered = (tail.rstrip() for tail in self._after_question)
        return not self.is_older and bool(again) and not again.startswith(alone) and answered.startswith(alone)

    @cached_property
    def opening(self) -> str:
        """The tokenizer's own token that a rendering begins with, whoever speaks first; empty where there is none."""
        match = self._added.match(self._asked.removeprefix(str(self.tokenizer.bos_token or "")).lstrip())
        return match[0] if match else ""

    @cached_property
    def lacks_end_token(self) -> bool:
        """Whether only the next turn's first token ends an answer."""
        return self._answered.rstrip().endswith(ANSWER)

    @cached_property
    def closing(self) -> str:
        """The text after every answer, whatever follows; empty where that differs."""
        tails = [
            text.partition(ANSWER)[2] for text in (self._answered, self.render(ANSWERED.upto(2, *ASKED.messages)) or "")
        ]
        return tails[0][: self.common(*tails)].strip()

    @cached_property
    def end_of_turn(self) -> int | None:
        """The added token that closes an answer, if any."""
        if not self.tokenizer.chat_template:
            return None
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SPOKEN}]
        try:
            text = str(self.tokenizer.apply_chat_template(talk, tokenize=False))
        except Exception:  # a template may raise anything, for example for unknown roles
            return None
        tail = text.rpartition(SPOKEN)[2].strip()
        ids = self.tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
        return int(ids[0]) if ids and ids[0] in self.tokenizer.added_tokens_decoder else None

    @cached_property
    def _after_question(self) -> tuple[str, str, str]:
        """The text after a question alone, before another one and before an answer; empty where refused."""
        asked = Conversation([{"role": "user", "content": QUESTION}])
        texts = (self.render(asked.upto(1, *more)) or "" for more in ((), ASKED.messages, ANSWERED.messages[1:]))
        alone, again, answered = (text.partition(QUESTION)[2] for text in texts)
        return alone, again, answered

    @cached_property
    def _asked(self) -> str:
        return self.render(ASKED) or ""

    @cached_property
    def _answered(self) -> str:
        return self.render(ANSWERED) or ""

    def _render_or_why(self, conversation: Conversation, prompts: bool) -> RenderedConversation | RowError:
        reason = ""
        for talk in (conversation, conversation.with_text_arguments()):
            try:
                return RenderedConversation(talk, self._apply([talk.messages], talk.tools, prompts)[0])
            except _refusals() as error:
                reason = reason or " ".join(str(error).split()) or type(error).__name__
        if conversation.tools is None and self.render(Conversation(conversation.messages, [])) is not None:
            reason = "it wants tools, and the row declares none; give them in a column tools"
        return RowError(f"the chat template refuses it: {reason}")

    def _apply(self, messages: list[list[Message]], tools: list[dict[str, Any]] | None, prompts: bool) -> list[str]:
        rendered: list[str] = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompts
        )
        return rendered


# Probes of a template.
QUESTION, ANSWER, SPOKEN = "Jkqx", "Zxqj", "baton"
ASKED = Conversation([{"role": "user", "content": "Q"}])
ANSWERED = ASKED.upto(1, {"role": "assistant", "content": ANSWER})


def _refusals() -> tuple[type[Exception], ...]:
    """Returns the errors of templates: on purpose, for rows they were not written for, or out of bounds."""
    from jinja2 import TemplateError

    wanting = (TypeError, ValueError, LookupError, AttributeError)
    return TemplateError, *wanting, ArithmeticError, RecursionError, MemoryError


def end_tokens(tokenizer: PreTrainedTokenizerBase, own: Sequence[int | None]) -> list[int]:
    """Returns the tokens that end an answer: a model's own, the chat template's and the recipe's."""
    known = (*own, ChatTemplate(tokenizer).end_of_turn, vocabulary.end_of_turn(tokenizer))
    return list(dict.fromkeys(token for token in known if token is not None))


def left_out(rendered: RenderedConversation) -> Counter[str]:
    """Counts the parts of a conversation that its rendering lacks."""
    text, talk = rendered.text, rendered.conversation
    counted: Counter[str] = Counter()
    at, has_calls = 0, any("tool_calls" in message for message in talk.messages)
    for number, message in enumerate(talk.messages):
        content = message["content"].strip()
        if content and message["role"] != "assistant" and not _is_in(content, text):
            counted["messages"] += 1
        if calls := message.get("tool_calls"):
            # Between the texts before and after, as the tools' own list has the name as well.
            until = _begin(talk.messages[number + 1 :], text, at)
            counted["tool calls"] += sum(call["function"]["name"] not in text[at:until] for call in calls)
        if message.get("reasoning_content"):
            counted["texts of reasoning"] += not _is_in(message["reasoning_content"].strip(), text)
        if message.get("name") and message["role"] != "tool":
            counted["names"] += not _is_in(message["name"], text)
        if content and has_calls and not calls and (found := text.find(content, at)) >= 0:
            at = found + len(content)
    for tool in talk.tools or ():
        counted["tools"] += not _is_in(tool["function"]["name"], text)
    return +counted if counted else counted


def _is_in(value: str, text: str) -> bool:
    return value in text or json.dumps(value, ensure_ascii=False)[1:-1] in text


def _begin(messages: list[Message], text: str, at: int) -> int:
    """Returns the place of the first message whose text is found, the end where none is."""
    found = (text.find(message["content"].strip(), at) for message in messages if message["content"].strip())
    return next((begin for begin in found if begin >= 0), len(text))
