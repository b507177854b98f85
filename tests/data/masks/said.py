"""What the assistant said, read off a rendering by each family's own grammar, which is written by hand."""

from __future__ import annotations

import re
from typing import Any

Row = dict[str, Any]

IM = r"<\|im_start\|>assistant\n"
THINK = r"(?:<think>\n)?"
NEMOTRON = r"(?:<think>\n?)?"
NO_THINK = r"(?:<think>\n(?:\n</think>\n\n)?)?"
IM_END = r".*?<\|im_end\|>"
FAMILIES: dict[str, tuple[str, str]] = {
    "qwen2_5(_vl)?|qwen3(_vl|_instruct_2507)?|lfm2.*|drops earlier reasoning": (IM, IM_END),
    "qwen3_5_think|qwen3_6|qwen3_8|a prompt with text": (IM + THINK, IM_END),
    "qwen3_5_nothink": (IM + NO_THINK, IM_END),
    "nemotron.*": (IM + NEMOTRON, IM_END),
    "llama3.*": (r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r".*?<\|(?:eot|eom)_id\|>"),
    "gemma3?": ("<start_of_turn>model\n", ".*?<end_of_turn>"),
    "gemma4_v2": (r"<\|turn>model\n|<tool_response\|>", r".*?<turn\|>"),
    "gemma4.*|diffusion_gemma": (
        r"(?:<tool_response\|>)?<\|turn>model\n|<tool_response\|>(?!<\|tool_response>)",
        r".*?(?:<turn\|>|<\|tool_response>)",
    ),
    "gptoss": (
        r"<\|start\|>assistant",
        r"(?:<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant)?.*?<\|(?:return|call|end)\|>",
    ),
    "muse_glimmer": (r"(?<!<\|eom\|>)<\|start\|>assistant", r".*?<\|eot\|>"),
    "cohere": (r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>", r".*?<\|END_OF_TURN_TOKEN\|>"),
    "cohere2": (
        r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|><\|START_RESPONSE\|>",
        r".*?<\|END_RESPONSE\|><\|END_OF_TURN_TOKEN\|>",
    ),
    "phi3.*": (r"<\|assistant\|>\n", r".*?<\|end\|>"),
    "glm4moe": (r"<\|assistant\|>", r".*?(?:<\|user\|>|<\|observation\|>|<\|system\|>|(?=<\|assistant\|>)|$)"),
    "deepseek.*": (r"<｜Assistant｜>(?:<think>\n)?|<｜tool▁outputs▁end｜>", r".*?<｜end▁of▁sentence｜>"),
    "calls otherwise when last": (r"<\|assistant\|>\n", r".*?\n<\|end\|>\n</s>"),
    "no end when last": (r"\n<\|begin_assistant\|>\n", r".*?(?:\n<\|end\|>|\Z)"),
    "a prompt after everything.*": (
        r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>(?!$)",
        r".*?<\|END_OF_TURN_TOKEN\|>",
    ),
    "tools in the system turn": (r"<\|assistant\|>", ".*?</s>"),
    "no system role": (r"\[/INST\]", ".*?</s>"),
    "trailing white space": ("### assistant:\n", ".*?</s>"),
}
"""Templates → what stands before an answer, with what the template makes the model begin with; and the answer, with its
end."""
SILENT = re.compile(r"\s*<[^<>]*>")
"""A turn that is nothing but its end."""


def said(template: str, rendering: str) -> list[str]:
    """Returns what the assistant said in a rendering, turn by turn."""
    name = template.removesuffix("_training")
    header, answer = next(found for names, found in FAMILIES.items() if re.fullmatch(names, name))
    found = [match["said"] for match in re.finditer(f"(?:{header})(?P<said>{answer})", rendering, re.DOTALL)]
    return found


def without_silent_calls(turns: list[str], messages: list[Row]) -> list[str]:
    """Leaves out the turns whose calls the template has left out, so that nothing is in them."""
    answers = [message for message in messages if message["role"] == "assistant"]
    assert len(turns) == len(answers), turns
    return [
        turn
        for turn, message in zip(turns, answers, strict=True)
        if not (message.get("tool_calls") and not message["content"] and SILENT.fullmatch(turn))
    ]
