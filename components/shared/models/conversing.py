"""Rows as conversations: which rows become user and assistant turns, and what an answer ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.components.shared.core.errors import UserError
from baton.components.shared.models.chat_templates import OWN_TOKENS, TEMPLATES, chat_template
from baton.components.shared.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]

PREAMBLE = (
    "Below is an instruction that describes a task{and_input}. "
    "Write a response that appropriately completes the request."
)
"""Beginning of the prompt of the Stanford Alpaca project, in which the split writes instruction and input."""
AND_INPUT = ", paired with an input that provides further context"
INSTRUCTION, INPUT, RESPONSE = "\n\n### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:"

TURNS = "prompts and answers that are texts become user and assistant turns"
ANSWERS = ("completion", "chosen", "rejected")
SYSTEM = "system"
"""Column of a row of texts that may become turns: its system message."""
BESIDE = (SYSTEM, "tools")
"""Columns of a row of texts that turns alone have a place for."""
PROMPT_TEXT = "prompt_text"
"""Column of a prompt that became turns: its text, for reward functions."""
ANSWER = "baton"
"""Stands for what an assistant says, to see what a chat template puts after it."""


def alpaca(instruction: str, context: str | None) -> str:
    """Returns an instruction, and its input where there is one, as Alpaca's prompt."""
    head = PREAMBLE.format(and_input=AND_INPUT if context else "")
    return f"{head}{INSTRUCTION}{instruction}{f'{INPUT}{context}' if context else ''}{RESPONSE}"


def asked(prompt: str) -> str:
    """Returns what a user asks in a prompt: where `alpaca` wrote it, the instruction, a blank line and the input.

    The input begins after the first `### Input:`, so that it may itself hold one; an instruction may not.
    """
    for and_input in ("", AND_INPUT):
        head = PREAMBLE.format(and_input=and_input) + INSTRUCTION
        if prompt.startswith(head) and prompt.endswith(RESPONSE) and len(prompt) >= len(head) + len(RESPONSE):
            body = prompt[len(head) : -len(RESPONSE)]
            return "\n\n".join(body.split(INPUT, 1)) if and_input else body
    return prompt


def own_template(recipe: Recipe) -> str | None:
    """Returns the chat template that a recipe gives, None where the tokenizer's counts."""
    return chat_template(recipe.model.chat_template) if recipe.model.chat_template else None


def applies(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether prompts and answers that are texts become user and assistant turns (`data.render_as`).

    Left to itself (`auto`), where training starts from a model whose tokenizer has a chat template; never with a
    tokenizer that Baton trained, in this run or for the model it starts from, nor for `pretrain`.
    """
    how = recipe.data.render_as
    if how == "text" or recipe.training.method == "pretrain" or not tokenizer.chat_template:
        return False
    return how == "chat" or (recipe.model.base is not None and not is_own(tokenizer))


def may_apply(recipe: Recipe) -> bool:
    """Tells whether prompts and answers that are texts may become turns, whatever the tokenizer turns out to be."""
    how = recipe.data.render_as
    return how == "chat" or (how == "auto" and recipe.model.base is not None and recipe.training.method != "pretrain")


def require_template(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Checks that there is a template where the recipe asks for one.

    Raises:
        UserError: there is none.
    """
    if recipe.data.render_as == "chat" and not tokenizer.chat_template:
        raise UserError(
            f"data.render_as: chat, and the tokenizer of {recipe.model.base or 'the model'} has no chat template.",
            remedy="Set model.chat_template (chatml, llama3, zephyr, alpaca or a .jinja file), take an instruct model, "
            "or set render_as to text.",
        )


def told(recipe: Recipe, *, chat: bool) -> str:
    """Returns in words how texts reach the model.

    Args:
        recipe: The recipe.
        chat: Whether they become turns.
    """
    how = f"(data.render_as: {recipe.data.render_as})"
    if not chat:
        return f"prompts and answers that are texts are trained as text {how}"
    own = recipe.model.chat_template
    name = own if own in TEMPLATES else "that the recipe gives" if own else f"of {recipe.model.base or 'the tokenizer'}"
    system = ", with data.system" if recipe.data.system else ""
    return f"{TURNS} in the chat template {name}{system} {how}"


def is_own(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether Baton trained a tokenizer: its first tokens are those that Baton gives each."""
    own = list(OWN_TOKENS)
    return len(tokenizer) >= len(own) and tokenizer.convert_ids_to_tokens(list(range(len(own)))) == own


def conversed(rows: list[Row], recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Returns rows of the split as they are rendered: as turns where that applies, `data.system` before each."""
    if applies(recipe, tokenizer):
        return [as_turns(row, recipe) for row in rows]
    rows = [with_system(row, recipe) for row in rows] if recipe.data.system else rows
    return [
        {name: value for name, value in row.items() if name not in beside} if (beside := unplaced(row)) else row
        for row in rows
    ]


def unplaced(row: Row) -> list[str]:
    """Returns the columns of a row of texts for which only turns have a place."""
    return [name for name in BESIDE if name in row] if isinstance(row.get("prompt"), str) else []


def changes(row: Row, recipe: Recipe, *, chat: bool) -> str:
    """Returns in words what `data.render_as` and `data.system` change of a row and its like, nothing for nothing.

    Args:
        row: A row of the split.
        recipe: The recipe.
        chat: Whether texts become turns.

    Raises:
        UserError: there is a system message, and the prompts are texts that stay texts.
    """
    if isinstance(row.get("prompt"), str) and "text" not in row:
        if not chat and recipe.data.system is not None:
            raise UserError(
                "data.system: prompts are trained as text here, which has no system message.",
                remedy="Set data.render_as to chat, with a model or model.chat_template that has a template, or remove "
                "data.system.",
            )
        return told(recipe, chat=True) if chat else ""
    is_talk = ("messages" in row or "prompt" in row) and "text" not in row
    return "conversations without a system message get data.system" if is_talk and recipe.data.system else ""


def as_turns(row: Row, recipe: Recipe) -> Row:
    """Returns a row of the split whose prompt and answers are messages; plain text stays what it is.

    A prompt that the model answers itself keeps its text in `PROMPT_TEXT`, as reward functions see it.
    """
    if "messages" in row or "text" in row:
        return with_system(row, recipe)
    turned = dict(row)
    # An extra column of before `auto` was among those that have a place for it was one for reward functions alone.
    is_placed = recipe.data.render_as == "chat" or SYSTEM not in recipe.data.extra_columns
    system = turned.pop(SYSTEM, None) if is_placed else None
    answered_by_model = recipe.training.spec.rows == "prompts"
    if isinstance(row["prompt"], str):
        turned["prompt"] = [{"role": "user", "content": asked(row["prompt"])}]
        if answered_by_model:
            turned[PROMPT_TEXT] = row["prompt"] + recipe.data.separator
    for name in () if answered_by_model else ANSWERS:
        if isinstance(row.get(name), str):
            turned[name] = [{"role": "assistant", "content": row[name]}]
    return with_system(turned, recipe, system)


def with_system(row: Row, recipe: Recipe, own: str | None = None) -> Row:
    """Returns a row with its own system message, or `data.system`, before its conversation, where that has no such turn
    already."""
    system = own or recipe.data.system
    name = "messages" if "messages" in row else "prompt"
    turns = row.get(name)
    if system is None or not isinstance(turns, list) or "text" in row:
        return row
    if any(message["role"] in ("system", "developer") for message in turns):
        return row
    return {**row, name: [{"role": "system", "content": system}, *turns]}


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the added token that a chat template closes an assistant's answer with, None if it does with none."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template may raise whatever it likes, of roles that it does not know for example
        return None
    _, _, tail = text.rpartition(ANSWER)
    ids = tokenizer(tail.strip(), add_special_tokens=False)["input_ids"] if tail.strip() else []
    return int(ids[0]) if ids and ids[0] in tokenizer.added_tokens_decoder else None
