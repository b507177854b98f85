"""Brings a row to the shape that its method learns from.

Conversations become messages in OpenAI's form: lists of messages, ShareGPT's turns, mappings of question and answer,
and glaive's two texts come in. Declarations and calls of tools may be JSON text, bare, or in a list. Keys that are null
are left out: Parquet gives each object the keys of all. Ranked answers become one preference pair.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from baton.data import schema
from baton.data.rows import loads
from baton.errors import RowError
from baton.models import chat as chats

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
        raise RowError("are not JSON of a name and arguments")
    return [_call(each) for each in listed]


def parse_tools(value: Any) -> list[Tool]:
    """Returns declarations of tools, none of an empty value; an error's reason follows the word "tools"."""
    listed = _listed(value)
    if listed is None:
        raise RowError("are not JSON of functions")
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
        raise RowError("are not JSON of a name and arguments")
    kind = value.get("type") if function is not value else None
    if kind not in (None, "function"):
        raise RowError(f"have type {kind!r}, expected function")
    given = next((function[key] for key in ARGUMENTS if function.get(key) is not None), None)
    arguments = {} if given is None or given == "" else _parsed(given)
    if not isinstance(arguments, dict):
        raise RowError(f"call {name} with arguments that are not a JSON object")
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

    If the row declares tools, a `function_call` turn must be a call; else it stays text where it is no JSON of one.

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
    content = _content_text(content)
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


def _content_text(content: Any) -> Any:
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
            thought = _content_text(raw.get(key))
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


PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("instruction", "response"))
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


def whole_messages(messages: Any, name: str = "messages", *, has_tools: bool = False) -> dict[str, object]:
    """Returns `{messages}`; they may be JSON text."""
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        try:
            messages = loads(messages)
        except ValueError:
            raise RowError(f"{name} is a text that is not JSON") from None
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


def divided_texts(row: dict[str, str]) -> dict[str, str]:
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


def preference_messages(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object]:
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
        head = shared  # one turn of what both begin with, with the whole
    if not head:
        raise RowError("chosen and rejected share no first message, and there is no prompt")
    answers = {side: messages[len(head) :] if _begins(messages, head) else messages for side, messages in sides.items()}
    for side, messages in answers.items():
        if not messages or messages[-1]["role"] != "assistant":
            raise RowError(f"{side} does not end on an assistant turn")
    return {"prompt": head, **answers}


def completion_messages(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object]:
    """Returns `{prompt, completion}`, each messages; without a prompt, it is all but the last message."""
    completion = _messages(_spoken(_answer(row["completion"])), "completion", has_tools)
    given = row.get("prompt", completion[:-1])
    head = _messages([{"role": "user", "content": given}] if isinstance(given, str) else given, "prompt", has_tools)
    if _begins(completion, head):
        completion = completion[len(head) :]
    if not completion or completion[-1]["role"] != "assistant":
        raise RowError("completion does not end on an assistant turn")
    return {"prompt": head, "completion": completion}


def prompt_messages(row: dict[str, object], *, has_tools: bool = False) -> dict[str, object]:
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
    for keys in PAIRS:
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


def earlier_messages(value: Any, name: str) -> list[Message]:
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
        raise RowError(f"column {name!r} is not a list of questions and their answers") from None


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


TEXTS = ("text", "response", "answer", "completion", "output", "content", "summary")
SCORES = ("score", "overall_score", "pm_score", "rating", "reward")
"""Keys of a response that is a mapping: its text, and how good it is. `rank` is best at 1."""

LEVEL = ("tie", "both", "neither", "none", "equal", "same", "draw")  # beginnings of words that prefer no response


def pair_of_ranked(row: dict[str, object], names: list[str] | None = None) -> dict[str, object]:
    """Returns `{prompt, chosen, rejected}`.

    The best response is preferred to a lower one, which the row's content draws: the rule of the binarized
    UltraFeedback that Zephyr was trained with (Tunstall et al. 2023, arXiv:2310.16944), whose authors draw and do not
    take the worst so that pairs are diverse and harder to tell apart. Without scores, the first is the best.

    Args:
        row: `responses`, `prompt` unless they begin with it, and one of `scores`, `ranks` (1 is best), `preferred` (the
            best one's name) and `margin` (of two; below 0 the first is better), or none where the best comes first.
        names: The responses' columns, where they are side by side.
    """
    responses = row["responses"]
    if not isinstance(responses, list) or len(responses) < 2:
        raise RowError("responses is not a list of at least two")
    if all(isinstance(each, dict) and not {"role", "from"} & each.keys() for each in responses):
        row = row | _parts(responses)
        responses = row["responses"]
        if not isinstance(responses, list):
            raise RowError(f"responses are mappings without {' or '.join(TEXTS)}")
    if names and (whole := _written_turns(row.get("prompt"), responses)):
        row, responses = {**row, "prompt": None}, whole
    numbers = _goodness(row, names or [str(at) for at in range(len(responses))])
    if numbers is None:
        if names:
            raise RowError("no column ranks the responses (scores, ranks, preferred or margin)")
        best, lower = 0, [at for at in range(1, len(responses)) if responses[at] != responses[0]]
    else:
        best = max(range(len(numbers)), key=lambda at: numbers[at])  # the first of equal ones
        lower = [at for at, number in enumerate(numbers) if number < numbers[best] and responses[at] != responses[best]]
    if not lower:
        raise RowError("no response is better than another")
    prompt = row.get("prompt")
    content = json.dumps([prompt, responses], sort_keys=True, default=str)
    drawn = int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
    answers = {"chosen": responses[best], "rejected": responses[lower[drawn % len(lower)]]}
    return answers if prompt is None else {"prompt": prompt, **answers}


def _parts(responses: list[dict[str, object]]) -> dict[str, object]:
    """Returns `responses`, which all must have, and `scores` or `ranks`, of responses that are mappings."""
    row: dict[str, object] = {"responses": None}
    for ours, names in (("responses", TEXTS), ("scores", SCORES), ("ranks", ("rank",))):
        for name in reversed(names):
            values = [response.get(name) for response in responses]
            # One without a score is not taken for a list with the best first.
            if None not in values or (ours != "responses" and any(value is not None for value in values)):
                row[ours] = values
    return row


def _written_turns(prompt: object, responses: list[object]) -> list[object] | None:
    """Returns whole conversations of prompt and responses that are JSON lists, a text for each turn; else None."""
    values = [prompt, *responses]
    if not all(isinstance(value, str) and value.startswith("[") for value in values):
        return None
    try:
        asked, *answers = (loads(str(value)) for value in values)
    except ValueError:
        return None
    if any(len(turns) != len(asked) or not all(isinstance(turn, str) for turn in turns) for turns in (asked, *answers)):
        return None
    return [
        [
            {"role": role, "content": text}
            for question, answer in zip(asked, turns, strict=True)
            for role, text in (("user", question), ("assistant", answer))
        ]
        for turns in answers
    ]


def _goodness(row: dict[str, object], names: list[str]) -> list[float] | None:
    """Returns a number for each response, higher for a better one; None where none is known."""
    for ours, sign in (("scores", 1), ("ranks", -1)):
        if row.get(ours) is not None:
            return [sign * number for number in _numbers(row[ours], len(names), ours)]
    if row.get("preferred") is not None:
        return _preferred(row["preferred"], names)
    if row.get("margin") is not None:
        (margin,) = _numbers([row["margin"]], 1, "margin")
        if len(names) != 2:
            raise RowError("margin is between two responses")
        return [-margin, margin]
    return None


def _preferred(value: object, names: list[str]) -> list[float]:
    """Returns 1 for the response named by its column or the column's ending (`model_b` for `response_b`)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    word = str(value).strip().lower()
    if not word or word.startswith(LEVEL):
        raise RowError("no response is better than another")
    lowered = [name.lower() for name in names]
    shared = shared_length(min(lowered), max(lowered))
    # `B`, `model_b` and `assistant 2` name the answer that ends so; a word that merely has that last letter does not.
    named = [
        word in (name, name[shared:]) or re.search(rf"[^a-z0-9]{re.escape(name[shared:])}$", word) is not None
        for name in lowered
    ]
    if sum(named) != 1:
        raise RowError(f"preferred is {value!r}, expected one of {', '.join(names)}")
    return list(map(float, named))


def _numbers(values: object, count: int, name: str) -> list[float]:
    if not isinstance(values, list) or len(values) != count:
        raise RowError(f"{name} is not a list of {count}, one for each response")
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = [math.nan]
    if any(map(math.isnan, numbers)):
        raise RowError(f"{name} are not numbers")
    return numbers


TURNS = ("messages", "prompt", "completion", "chosen", "rejected")  # columns of messages in a conversation
SAID = ("completion", "output", "chosen", "rejected")  # columns by the assistant in a row of texts
MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # columns of messages that are no text

TRUE, FALSE = ("true", "yes", "good", "1", "1.0"), ("false", "no", "bad", "0", "0.0")


def normalize_row(
    values: dict[str, object], layout: schema.ColumnMapping, *, reasoning: bool = True, chat: bool = False
) -> dict[str, Any]:
    """Returns a row in the shape of its method, such as `{prompt, completion}` or `{messages}`.

    With `extra_columns`, and with `tools` where messages declare some. `reasoning` keeps the assistant's thoughts; with
    `chat`, a row of texts may become turns, which have a place for tools and a system message. Raises RowError where
    the row cannot be used.
    """
    row: dict[str, Any] = {}
    for ours in (*layout.needed, *schema.OPTIONAL.get(layout.format, ())):
        theirs = layout.columns.get(ours, ours)
        value = _value(values, theirs, None if ours in schema.SIDE_BY_SIDE else layout.join)
        if value is not None:
            row[ours] = value
        elif ours in layout.needed:
            raise RowError(f"column {layout.name(ours)} is missing")
    beside = {ours: _value(values, theirs, layout.join) for ours, theirs in layout.beside.items()}
    name = layout.earlier
    earlier = earlier_messages(schema.value_at(values, name), name) if name else None
    normal = _shape(row, layout, beside, reasoning, earlier)
    is_talk = isinstance(normal.get("messages", normal.get("prompt")), list)
    media = next((name for name in MEDIA if values.get(name) and name not in layout.extra_columns), None)
    if is_talk and media:
        raise RowError(f"column {media!r} holds pictures or sound, and only text is learned")
    if is_talk or (chat and "prompt" in normal):
        normal = _equipped(normal, beside, reasoning)
        if "tools" in normal and "tools" in layout.extra_columns:
            raise RowError("column 'tools' declares the row's tools, which are kept without data.extra_columns")
    for name in layout.extra_columns:
        if name not in normal:
            value = schema.value_at(values, name)
            if value is None:
                raise RowError(f"column {name!r} is missing")
            normal[name] = encodable_text(value, repr(name))
    return normal


def _value(values: dict[str, object], theirs: str | list[str], join: str | None) -> Any:
    """Returns a column's value; several columns are joined, or listed where `join` is None."""
    if isinstance(theirs, str):
        return schema.value_at(values, theirs)
    parts = [schema.value_at(values, name) for name in theirs]
    if join is None:
        return None if None in parts else parts
    texts = [as_text(part) for part in parts if part is not None]
    return join.join(text for text in texts if text.strip()) or None


def _equipped(row: dict[str, Any], beside: dict[str, Any], reasoning: bool) -> dict[str, Any]:
    """Returns a row of messages, present or future, with its tools, and its system message where it has none."""
    if not reasoning:
        row = {
            name: without_reasoning(value) if name in TURNS and isinstance(value, list) else value
            for name, value in row.items()
        }
    system = beside.get("system")
    system = system if isinstance(system, str) and system.strip() else None
    try:
        declared = parse_tools(beside.get("tools"))
    except RowError as error:
        raise RowError(f"tools {error}") from None
    if not all_encodable([declared, system]):
        raise RowError("tools or system holds a lone surrogate")
    first = "messages" if "messages" in row else "prompt"
    if system and isinstance(row[first], str):
        row = {**row, chats.SYSTEM: system}
    elif system and row[first][0]["role"] not in ("system", "developer"):
        row = {**row, first: [{"role": "system", "content": system}, *row[first]]}
    return {**row, "tools": declared} if declared else row


def _shape(
    row: dict[str, Any],
    layout: schema.ColumnMapping,
    beside: dict[str, Any],
    reasoning: bool,
    earlier: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    row_format, has_tools = layout.format, bool(beside.get("tools"))
    if earlier is not None:
        if row_format == "instruction" and all(isinstance(value, str) for value in row.values()):
            asked = chats.strip_alpaca(chats.alpaca(row["instruction"], row.get("input")))
            row, row_format = {"prompt": asked, "completion": row["output"]}, "prompt-completion"
        if isinstance(row.get("prompt"), str):
            row["prompt"] = [*earlier, {"role": "user", "content": row["prompt"]}]
    if row_format in ("messages", "sharegpt"):
        name = "messages" if row_format == "messages" else "conversations"
        if isinstance(row[name], str) and (written := parse_glaive(row[name], beside.get("system"))):
            row[name] = written.pop("messages")
            beside |= written
        return whole_messages(row[name], name, has_tools=bool(beside.get("tools")))
    if row_format == "tool-calls":
        problem = "are none"
        try:
            calls = parse_tool_calls(row["calls"])
        except RowError as error:
            calls, problem = [], str(error)
        if not calls:
            raise RowError(f"{layout.name('calls')} {problem}")
        completion = {"role": "assistant", "content": "", "tool_calls": calls}
        return completion_messages({"prompt": row["prompt"], "completion": completion})
    if row_format == "ranked":
        names = layout.columns.get("responses")
        row, row_format = pair_of_ranked(row, names if isinstance(names, list) else None), "preference"
    if row_format == "preference" and any(map(is_conversation, row.values())):
        return preference_messages(row, has_tools=has_tools)
    if row_format == "preference" and "prompt" not in row and all(isinstance(side, str) for side in row.values()):
        row = divided_texts(row)
        if not row["prompt"]:
            raise RowError("chosen and rejected are texts that share no first words, but there is no prompt")
    if row_format == "prompt" and "answer" in row:
        row["answer"] = encodable_text(row["answer"], layout.name("answer"))
    label = {"label": _label(row.pop("label"))} if row_format == "rated" else {}
    if row_format == "prompt" and is_conversation(row["prompt"]):
        return prompt_messages(row, has_tools=has_tools)
    talks = has_speakers if row_format == "prompt-completion" else is_conversation
    if row_format in ("rated", "prompt-completion") and any(map(talks, row.values())):
        return completion_messages(row, has_tools=has_tools) | label
    for ours, value in row.items():
        if not isinstance(value, str):
            raise RowError(f"column {layout.name(ours)} is a {type(value).__name__}, expected text")
        encodable_text(value, layout.name(ours))
    if not reasoning:
        row = {ours: without_reasoning(value) if ours in SAID else value for ours, value in row.items()}
    return _texts(row, row_format) | label


def _texts(row: dict[str, str], row_format: str) -> dict[str, Any]:
    if row_format == "instruction":
        row = {"prompt": chats.alpaca(row["instruction"], row.get("input")), "completion": row["output"]}
    # Of rated pairs and of completions the prompt may be empty.
    filled = {"text": ("text",), "prompt": ("prompt",), "preference": ("prompt", "chosen", "rejected")}
    for name in filled.get(row_format, ("completion",)):
        if not row[name].strip():
            raise RowError(f"{name} is empty")
    return row


def encodable_text(value: Any, column: str) -> str:
    text = as_text(value)
    if not is_encodable(text):
        raise RowError(f"column {column} holds a lone surrogate")
    return text


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _label(value: Any) -> bool:
    text = str(value).strip().lower()
    if text not in (*TRUE, *FALSE):
        raise RowError(f"label is {value!r}, expected true or false")
    return text in TRUE
