"""Conversations of data sets as messages in OpenAI's form.

Lists of messages, ShareGPT's turns, mappings of question and answer, and glaive's two texts come in. Declarations and
calls of tools may be JSON text, bare, or in a list. Keys that are null are left out: Parquet gives each object the keys
of all.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import Any

from baton.data.rows import loads
from baton.errors import RowError

Call = dict[str, Any]
Tool = dict[str, Any]
Message = dict[str, Any]
"""`role`, `content`, and where given `tool_calls`, `tool_call_id`, `name`, `reasoning_content` and `train`."""

ARGUMENTS = ("arguments", "parameters", "args")  # names of a call's arguments


def all_encodable(value: Any) -> bool:
    return "\\ud" not in json.dumps(value).lower() or is_encodable(json.dumps(value, ensure_ascii=False))


def parse_tool_calls(value: Any) -> list[Call]:
    """Returns tool calls, none of an empty value; an error's reason follows the word "calls"."""
    listed = _listed(value)
    if listed is None:
        raise RowError("are no JSON of a name and arguments")
    return [_call(each) for each in listed]


def parse_tools(value: Any) -> list[Tool]:
    """Returns declarations of tools, none of an empty value; an error's reason follows the word "tools"."""
    listed = _listed(value)
    if listed is None:
        raise RowError("are no JSON of functions")
    made: list[Tool] = []
    for each in listed:
        each = _parsed(each)
        kind = each.get("type") if isinstance(each, dict) else None
        function = _parsed(each.get("function")) if isinstance(each, dict) and "function" in each else each
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError("are not all functions with a name")
        if "function" not in each and kind == "function":
            function = {key: part for key, part in function.items() if key != "type"}
        made.append({"type": "function", "function": function})
    return made


def _call(value: Any) -> Call:
    value = _parsed(value)
    function = _parsed(value.get("function")) if isinstance(value, dict) and value.get("function") else value
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RowError("are no JSON of a name and arguments")
    kind = value.get("type") if function is not value else None
    if kind not in (None, "function"):
        raise RowError(f"have type {kind!r}, expected function")
    given = next((function[key] for key in ARGUMENTS if function.get(key) is not None), None)
    arguments = {} if given is None or given == "" else _parsed(given)
    if not isinstance(arguments, dict):
        raise RowError(f"call {name} with arguments that are no JSON object")
    call: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(value.get("id"), str) and value["id"]:
        call["id"] = value["id"]
    return call


def _listed(value: Any) -> list[Any] | None:
    """Returns the members of a list or of its JSON, one object as a list; None of anything else."""
    value = _parsed(value)
    if isinstance(value, dict):
        return [value]
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else None


def _parsed(value: Any) -> Any:
    """Returns the value of a JSON text, or an object without null keys; any other text as it is."""
    if not isinstance(value, str):
        return _plain(value)
    try:
        return loads(value) if value.strip() else None
    except ValueError:
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""Speaker → role."""

REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message for the assistant's thought
FLAGS = ("train", "training", "weight")  # keys of a message for whether it is learned
PARTS = ("text", "input_text", "output_text")  # types of content parts that are text
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)  # thinking that is written into the beginning of a content


def is_encodable(text: str) -> bool:
    """Tells whether a text can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def parse_message(raw: Any, *, has_tools: bool = False) -> Message:
    """Returns a message of role and content, or of ShareGPT's from and value, without unknown keys.

    Where the row declares tools, a `function_call` turn must be a call; else it stays text where it is no JSON of one.

    Raises:
        RowError: it is no message; the reason follows the words "message 1".
    """
    if not isinstance(raw, dict):
        raise RowError("has no role")
    role, content = raw.get("role"), raw.get("content")
    if role is None and "from" in raw:
        role, content = raw["from"], raw.get("value")
        if isinstance(role, str) and role.lower() not in ROLES:
            raise RowError(f"is from {role!r}, expected {', '.join(ROLES)}")
    if not isinstance(role, str) or not is_encodable(role):
        raise RowError("has no role")
    said = ROLES.get(role.lower(), role)
    calls = _calls(raw, said)
    content = _text(content)
    if role.lower() == "function_call" and not calls and isinstance(content, str):
        problem = "are none"
        try:
            calls = parse_tool_calls(content)
        except RowError as error:
            problem = str(error)
        if calls:
            content = ""
        elif has_tools:
            raise RowError(f"is from 'function_call', and its calls {problem}")
    if not isinstance(content, str) and not (calls and content is None):
        raise RowError("has no text content")
    whole = {"role": said, "content": content or "", **({"tool_calls": calls} if calls else {}), **_beside(raw, said)}
    if not is_encodable(whole["content"]):
        raise RowError("has no text content")
    if len(whole) > 2 and not all_encodable(whole):
        raise RowError("holds a lone surrogate")
    return whole


def _text(content: Any) -> Any:
    """Returns a content that is a list of text parts as text, any other as it is; raises RowError of media."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type", "text") not in PARTS:
            raise RowError(f"has a part of type {part['type']!r}, and only text is learned")
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return content
        texts.append(part["text"])
    return "".join(texts) if texts else content


def _calls(raw: dict[str, Any], role: str) -> list[Call]:
    key = next((key for key in ("tool_calls", "function_call") if raw.get(key)), None)
    if key is None:
        return []
    try:
        calls = parse_tool_calls(raw[key])
    except RowError as error:
        raise RowError(f"has {key} that {error}") from None
    if calls and role != "assistant":
        raise RowError(f"has {key}, and is not the assistant's")
    return calls


def _beside(raw: dict[str, Any], role: str) -> Message:
    more: Message = {}
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str) and raw[key] and (key == "name" or role == "tool"):
            more[key] = raw[key]
    for key in REASONING if role == "assistant" else ():
        with contextlib.suppress(RowError):  # a thought that is no text is not learned
            thought = _text(raw.get(key))
            if isinstance(thought, str) and thought.strip():
                more["reasoning_content"] = thought
                break
    flags = {key: raw[key] for key in FLAGS if raw.get(key) is not None}
    for key, flag in flags.items():
        if not isinstance(flag, bool | int | float) or flag not in (0, 1):
            raise RowError(f"has {key} {flag!r}, expected 0 or 1, false or true")
    if len({bool(flag) for flag in flags.values()}) > 1:
        listed = " and ".join(f"{key} {flag!r}" for key, flag in flags.items())
        raise RowError(f"has {listed}, which contradict each other")
    for flag in flags.values():  # all alike by now
        more["train"] = bool(flag)
    return more


def without_reasoning(value: Any) -> Any:
    if isinstance(value, str):
        return THOUGHT.sub("", value, count=1) if THOUGHT.match(value) else value
    return [
        {key: part for key, part in turn.items() if key != "reasoning_content"}
        | {"content": without_reasoning(turn["content"])}
        if turn["role"] == "assistant"
        else turn
        for turn in value
    ]


GLAIVE_TURN = re.compile(r"(?:\A|\n)[^\S\n]*(USER|ASSISTANT|FUNCTION RESPONSE):")
"""Within one line: over empty lines the time would grow with the square of their number."""
GLAIVE_SPEAKERS = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
GLAIVE_END, GLAIVE_CALL = "<|endoftext|>", "<functioncall>"
GLAIVE_QUOTED_CALL = re.compile(r"\{\s*\"name\":\s*\"([^\"]+)\",\s*\"arguments\":\s*'(.*)'\s*\}", re.DOTALL)
"""A call whose arguments are JSON in single quotes, which JSON does not have."""


def parse_glaive(chat: str, system: object) -> dict[str, Any] | None:
    """Returns `messages`, `tools` and `system`, None where the text is no such conversation.

    A system text that declares functions is left out: they are `tools`, which a template writes in its own words.
    """
    pieces = GLAIVE_TURN.split(chat)
    if len(pieces) == 1 or pieces[0].strip():
        return None
    turns: list[dict[str, Any]] = []
    for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True):
        said, called, call = text.replace(GLAIVE_END, "").partition(GLAIVE_CALL)
        turn: dict[str, Any] = {"role": GLAIVE_SPEAKERS[speaker], "content": said.strip()}
        if called and turn["role"] == "assistant":
            quoted = GLAIVE_QUOTED_CALL.fullmatch(call.strip())
            turn["tool_calls"] = (
                [{"name": quoted[1], "arguments": quoted[2].replace("\\'", "'")}] if quoted else call.strip()
            )
        turns.append(turn)
    words = system.strip().removeprefix("SYSTEM:").strip() if isinstance(system, str) else ""
    functions = _objects(words)
    return {"messages": turns, "tools": functions, "system": None if functions else words}


def _objects(text: str) -> list[Tool]:
    """Returns the JSON objects at the beginnings of a text's lines."""
    objects, decoder, at = [], json.JSONDecoder(), 0
    while match := re.compile(r"^[^\S\n]*(?=\{)", re.MULTILINE).search(text, at):
        try:
            value, at = decoder.raw_decode(text, match.end())
        except ValueError:
            at = match.end() + 1
            continue
        objects.append(value)
    return objects


TURNS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("instruction", "response"))
"""Keys of a mapping that is a question and its answer."""
LEARNED = "output_with_loss"  # XTuner's key of such a mapping for whether its answer is learned

ANSWER = re.compile(r".*\n\n(?:Assistant|ASSISTANT|assistant):", re.DOTALL)
"""A conversation written into a text, up to its last answer: the turns of Anthropic's hh-rlhf."""

UNSAID = ("name", "train")  # keys in which two equal messages may differ


def is_conversation(value: Any) -> bool:
    return isinstance(value, list | dict)


def has_speakers(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and not {"role", "from"}.isdisjoint(first)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def conversation(messages: Any, name: str = "messages", *, has_tools: bool = False) -> dict[str, object]:
    """Returns `{messages}`; they may be JSON text."""
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        try:
            messages = loads(messages)
        except ValueError:
            raise RowError(f"{name} is a text that is no JSON") from None
    try:
        turns = _messages(_spoken(messages), name, has_tools)
    except RowError as error:
        first = messages[0] if isinstance(messages, list) and messages else None
        if isinstance(first, dict) and {"role", "from"}.isdisjoint(first):
            has = ", ".join(map(str, first))
            raise RowError(f"{error} but {has}; if the list holds rows, write each on a line of its own") from None
        raise
    if not any(message["role"] == "assistant" for message in turns):
        raise RowError(f"{name} has no assistant turn")
    return {"messages": turns}


def texts(row: dict[str, str]) -> dict[str, str]:
    """Returns `{prompt, chosen, rejected}` of two texts, split where they diverge, without changing them.

    As TRL's `extract_prompt`: to the end of a word, before the white space behind it; and where `\n\nAssistant:` is
    shared, up to its last occurrence, though the answers begin alike.
    """
    shared = row["chosen"][: shared_length(row["chosen"], row["rejected"])]
    if written := ANSWER.match(shared):
        end = written.end()
    else:
        whole = all(side[len(shared) : len(shared) + 1].isspace() for side in row.values()) and shared
        end = len(shared) if whole else max((at for at, mark in enumerate(shared) if mark.isspace()), default=0)
        end = len(shared[:end].rstrip())
    return {"prompt": shared[:end], "chosen": row["chosen"][end:], "rejected": row["rejected"][end:]}


def preference(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object]:
    """Returns `{prompt, chosen, rejected}`, each a list of messages.

    Without a prompt, it is the shared beginning. An answer may also be one message, or a text after a prompt of
    messages.
    """
    sides: dict[str, list[Message]] = {}
    for side in ("chosen", "rejected"):
        # A text alone may hold the prompt as well: only after one is it an answer.
        one = "prompt" in row or isinstance(row[side], dict)
        sides[side] = _messages(_answer(row[side]) if one else row[side], side, has_tools)
    if isinstance(row.get("prompt"), str):
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    chosen, rejected = sides.values()
    # Equal answers are left to the check of same answers.
    same = len(chosen) - 1 if chosen == rejected else shared_length(_said(chosen), _said(rejected))
    shared = chosen[:same]
    head = _messages(row["prompt"], "prompt", has_tools) if "prompt" in row else shared
    if len(head) == 1 and not _begins(shared, head) and any(_begins([turn], head) for turn in shared):
        head = shared  # one turn of what both begin with, beside the whole
    if not head:
        raise RowError("chosen and rejected share no first message, and there is no prompt")
    answers = {side: messages[len(head) :] if _begins(messages, head) else messages for side, messages in sides.items()}
    for side, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            raise RowError(f"{side} does not end on an assistant turn")
    return {"prompt": head, **answers}


def answered(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object]:
    """Returns `{prompt, completion}`, each messages; without a prompt, it is all but the last message."""
    completion = _messages(_spoken(_answer(row["completion"])), "completion", has_tools)
    given = row.get("prompt", completion[:-1])
    head = _messages([{"role": "user", "content": given}] if isinstance(given, str) else given, "prompt", has_tools)
    if _begins(completion, head):
        completion = completion[len(head) :]
    if not completion or completion[-1]["role"] != "assistant":
        raise RowError("completion does not end on an assistant turn")
    return {"prompt": head, "completion": completion}


def prompt(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object]:
    head = _messages(row["prompt"], "prompt", has_tools)
    if head[-1]["role"] == "assistant":
        raise RowError("prompt ends on an assistant turn")
    return {**row, "prompt": head}


def _answer(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return [value] if isinstance(value, dict) else value


def _spoken(value: Any) -> Any:
    """Returns texts in turn, user first, or mappings of question and answer (`TURNS`), as messages."""
    if not isinstance(value, list) or len(value) == 0:
        return value
    if len(value) > 1 and all(isinstance(each, str) for each in value):
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(value)]
    for keys in TURNS:
        if all(
            isinstance(each, dict) and "role" not in each and all(isinstance(each.get(key), str) for key in keys)
            for each in value
        ):
            return [turn for each in value for turn in _round(each, keys)]
    return value


def _round(each: dict[str, Any], keys: tuple[str, str]) -> list[Message]:
    """Returns a question and its answer, after the system message that they may come with."""
    system, asked, said = each.get("system"), *(each[key] for key in keys)
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
    learned = {"train": bool(each[LEARNED])} if isinstance(each.get(LEARNED), bool) else {}
    return [*before, {"role": "user", "content": asked}, {"role": "assistant", "content": said, **learned}]


def rounds(value: Any, name: str) -> list[Message]:
    """Returns the rounds before a prompt as messages; a column has them as pairs of question and answer."""
    if value is None:
        return []
    pairs = value if isinstance(value, list) else [value]
    if all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(x, str) for x in pair) for pair in pairs):
        return [
            {"role": role, "content": x} for pair in pairs for role, x in zip(("user", "assistant"), pair, strict=True)
        ]
    try:
        return _messages(_spoken(value), "history", False)
    except RowError:
        raise RowError(f"column {name!r} is no list of questions and their answers") from None


def _begins(messages: list[Message], head: list[Message]) -> bool:
    return _said(messages[: len(head)]) == _said(head)


def _said(messages: list[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key not in UNSAID} for message in messages]


def _messages(messages: Any, name: str, has_tools: bool) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise RowError(f"{name} is a {type(messages).__name__}, expected a non-empty list")
    turns = []
    for position, raw in enumerate(messages, 1):
        try:
            turns.append(parse_message(raw, has_tools=has_tools))
        except RowError as error:
            raise RowError(f"message {position} {error}") from None
    return turns
