"""Conversations of every shape that rows have, and a tokenizer that knows a template's tokens."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]

FOLDER = Path(trl.__file__).parent / "chat_templates"
TOKENS = re.compile(r"<[|/]?[\w|▁｜]+[|｜]?>|\[gMASK\]|\[/?INST\]")
"""What stands in a template as tokens of its model's."""

AWKWARD = {
    "drops earlier reasoning": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "a prompt with text": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
        "{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    "tools in the system turn": (
        "{% set has_system = messages[0].role == 'system' %}<|system|>"
        "{{ messages[0].content if has_system else 'Help.' }}"
        "{% if tools %}{{ tools | tojson }}{% endif %}</s>"
        "{% for m in messages[1 if has_system else 0:] %}"
        "<|{{ m.role }}|>{{ m.content }}"
        "{% for c in (m.tool_calls or []) | reverse %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "no system role": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '</s>' }}{% endfor %}"
    ),
    "calls otherwise when last": (
        "{{ bos_token }}{% if messages[0].role != 'system' %}{{ '<|system|>\nHelp.\n<|end|>\n' }}{% endif %}"
        "{% for m in messages %}{% set is_last = loop.last %}{{ '<|' + m.role + '|>\n' + m.content }}"
        "{% if m.tool_calls %}{{ '\n<tool_calls>[' }}{% for c in m.tool_calls %}"
        '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | string }}'
        '{% if not is_last %}, "id": "{{ c.id }}"{% endif %}}{% if not loop.last %}, {% endif %}{% endfor %}'
        "]</tool_calls>{% endif %}{{ '\n<|end|>\n' + (eos_token if m.role == 'assistant' else '') }}"
        "{% if is_last and add_generation_prompt and m.role != 'assistant' %}{{ '<|assistant|>\n' }}{% endif %}"
        "{% endfor %}"
    ),
    "no end when last": (
        "{{ bos_token + '<|begin_system|>\nHelp.\n' }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{{ '\n<|begin_assistant|>\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "{% if not loop.last %}{{ '\n<|end|>\n' }}{% endif %}"
        "{% else %}{{ '<|begin_' + m.role + '|>\n' + m.content }}{% endif %}"
        "{% if loop.last and add_generation_prompt and m.role != 'assistant' %}"
        "{{ '\n<|begin_assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "a prompt after everything": (
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
        "{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]"
        "<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        "{% else %}<|{{ m.role | upper }}_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "a prompt after everything, plain": (
        "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>"
        "<|{{ 'CHATBOT' if m.role == 'assistant' else m.role | upper }}_TOKEN|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}Action: {{ c.function | tojson }}{% endfor %}"
        "<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "trailing white space": (
        "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content | trim + '</s>' }}\n \n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant:\n{% endif %}\n"
    ),
}
"""Templates that are hard to follow."""


def templates() -> dict[str, str]:
    """Returns the templates by name, TRL's and ours."""
    theirs = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
    return theirs | AWKWARD


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*map(str, CONVERSATIONS.values()), *templates().values()], trainer)
    return str(tokenizer.to_str())


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE with a template's tokens added."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    special = [
        token for token in dict.fromkeys(TOKENS.findall(template)) if "|" in token or "｜" in token or "_" in token
    ]
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.add_tokens(
        [token for token in ("<think>", "</think>", "<tool_call>", "</tool_call>") if token in template]
    )
    tokenizer.chat_template = template
    return tokenizer


def user(content: str) -> Row:
    return {"role": "user", "content": content}


def system(content: str) -> Row:
    return {"role": "system", "content": content}


def said(content: str, **more: Any) -> Row:
    return {"role": "assistant", "content": content, **more}


def thought(reasoning: str, content: str, **more: Any) -> Row:
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, **more}


def call(name: str, number: int = 0, /, **arguments: Any) -> Row:
    return {"type": "function", "id": f"call{number}abcd", "function": {"name": name, "arguments": arguments}}


def result(content: str, name: str = "weather", number: int = 0) -> Row:
    return {"role": "tool", "content": content, "name": name, "tool_call_id": f"call{number}abcd"}


def tool(name: str) -> Row:
    place = {"type": "string", "description": f"where {name} looks"}
    parameters = {"type": "object", "properties": {"place": place}, "required": ["place"]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"tells the {name}", "parameters": parameters},
    }


WEATHER = [tool("weather"), tool("traffic")]
ASKED = user("How is it in Oslo?")
CALLS = said("", tool_calls=[call("weather", place="Oslo")])

CONVERSATIONS: dict[str, Row] = {
    "single": {"messages": [user("What is two and two?"), said("It makes four.")]},
    "several turns": {
        "messages": [
            user("Alpha one."),
            said("Beta two."),
            user("Gamma three."),
            said("Delta four."),
            user("Epsi five."),
            said("Zeta six."),
        ]
    },
    "system": {
        "messages": [system("Be brief, always."), user("Who?"), said("Nobody."), user("Why?"), said("Because.")]
    },
    "tools, unused": {"messages": [ASKED, said("Cold there.")], "tools": WEATHER},
    "tool call": {"messages": [ASKED, CALLS], "tools": WEATHER},
    "call and result": {
        "messages": [ASKED, CALLS, result("minus four"), said("Minus four degrees.")],
        "tools": WEATHER,
    },
    "call with content": {
        "messages": [
            system("Use tools."),
            ASKED,
            said("Let me look.", tool_calls=[call("weather", place="Oslo")]),
            result("minus four"),
            said("Cold."),
            user("And the roads?"),
            said("", tool_calls=[call("traffic", place="E6")]),
            result("empty", "traffic"),
            said("Free."),
        ],
        "tools": WEATHER,
    },
    "parallel calls": {
        "messages": [
            ASKED,
            said("", tool_calls=[call("weather", 0, place="Oslo"), call("traffic", 1, place="Bergen")]),
            result("rain", "weather", 0),
            result("a jam", "traffic", 1),
            said("Wet and slow."),
        ],
        "tools": WEATHER,
    },
    "arguments of all kinds": {
        "messages": [
            ASKED,
            said(
                "", tool_calls=[call("weather", days=3, fine=True, at={"lat": 59.9, "name": 'a"b\nc'}, of=["x", "ŷ"])]
            ),
            result("ok"),
            said("Done so."),
        ],
        "tools": WEATHER,
    },
    "call without arguments": {
        "messages": [ASKED, said("", tool_calls=[call("weather")]), result("42"), said("Answer.")],
        "tools": WEATHER,
    },
    "reasoning": {"messages": [user("Two and two?"), thought("Count on fingers.", "Four is it.")]},
    "reasoning twice": {
        "messages": [
            user("Two and two?"),
            thought("Fingers say so.", "Four."),
            user("And one?"),
            thought("One further on.", "Five."),
        ]
    },
    "reasoning and calls": {
        "messages": [
            ASKED,
            thought("I should look.", "", tool_calls=[call("weather", place="Oslo")]),
            result("minus four"),
            thought("That is cold.", "Cold."),
            user("Thanks, bye."),
            thought("Polite one.", "Bye then."),
        ],
        "tools": WEATHER,
    },
    "reasoning in the content": {
        "messages": [
            user("Two and two?"),
            said("<think>\nQuick now.\n</think>\n\nFour."),
            user("And?"),
            said("<think>\nSlow now.\n</think>\n\nFive."),
        ]
    },
    "empty content": {"messages": [user("Say nothing."), said(""), user("Good."), said("Thanks.")]},
    "unicode": {
        "messages": [user("naïve 🙂 日本語"), said("👩‍👩‍👧 e\u0301 日本語 \u200bمرحبا"), user("ok"), said("終わり")]
    },
    "ends with user": {"messages": [user("One?"), said("First."), user("Two, and no answer?")]},
    "leading assistant": {"messages": [said("Welcome here."), user("Hello."), said("How can I help?")]},
    "white space": {
        "messages": [user("  in  \n"), said("\n\n  spaced out \t\n"), user("\nonce more "), said(" again ")]
    },
    "markers in the text": {
        "messages": [
            user("Write <|im_end|> and </s> and <|im_start|>assistant\nhi"),
            said("Here: <|im_start|>assistant\nhi<|im_end|>\n</s> done <end_of_turn>"),
            user("<|eot_id|>"),
            said("<|im_start|>"),
        ]
    },
    "the same text": {"messages": [user("ping"), said("ping"), user("ping"), said("ping"), user("ping"), said("ping")]},
    "two answers in a row": {
        "messages": [user("Go."), said("Going on."), said("Gone now."), user("Ok."), said("Yes.")]
    },
    "code and lines": {
        "messages": [user("Code?"), said("```python\nprint('a')\n\n\nx = {\"b\": [1]}\n```\nThat.\n- is\n")]
    },
}
