"""Rows in the shape of the data sets that the gallery's recipes name, with every column that those have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

COUNT, HELD_OUT = 24, 4
"""Rows of a source, and of one that is held out."""


def _turns(n: int, turns: int = 1) -> list[Row]:
    said = []
    for number in range(turns):
        said += [
            {"role": "user", "content": f"What is {n} and {number + 2}?" + " Think." * (n % 3)},
            {"role": "assistant", "content": f"It is {n + number + 2}, as one sees."},
        ]
    return said


def capybara(n: int) -> Row:
    return {"source": "made up", "messages": _turns(n, 1 + n % 3), "num_turns": 2 * (1 + n % 3)}


def dolly(n: int) -> Row:
    kind = ("closed_qa", "open_qa")[n % 2]
    context = f"The sum of {n} and 2 is {n + 2}." if kind == "closed_qa" else ""
    return {"instruction": f"Add {n} and 2.", "context": context, "response": f"It is {n + 2}.", "category": kind}


def ultrachat(n: int) -> Row:
    messages = _turns(n, 1 + n % 2)
    return {"prompt": messages[0]["content"], "prompt_id": f"{n:064x}", "messages": messages}


def ultrafeedback(n: int) -> Row:
    asked, good = _turns(n)
    chosen, rejected = [asked, good], [asked, {"role": "assistant", "content": f"Not {n}." + " No." * (n % 3)}]
    return {
        "prompt": asked["content"],
        "prompt_id": f"{n:064x}",
        "chosen": chosen,
        "rejected": rejected,
        "messages": chosen,
        "score_chosen": 8.5,
        "score_rejected": 4.0,
    }


def gsm8k(n: int) -> Row:
    question = f"Anna has {n} apples and buys {n + 3}. How many are there?"
    return {"question": question, "answer": f"She has {n} + {n + 3} = <<{n}+{n + 3}={2 * n + 3}>>.\n#### {2 * n + 3}"}


def helpsteer3(n: int) -> Row:
    context = [*_turns(n, n % 2), {"role": "user", "content": f"Which is more, {n} or {n + 1}?"}]
    return {
        "domain": "general",
        "language": "english",
        "context": context,
        "response1": f"{n + 1} is more.",
        "response2": f"{n} is" + ", I think," * (n % 3) + " more.",
        "overall_preference": (-3, -1, 2)[n % 3] if n % 12 else 0,  # now and then neither is better
        "individual_preference": [
            {"score": -2, "reasoning": "It counts.", "feedback_1": "Right.", "feedback_2": "No."}
        ],
    }


def fineweb(n: int) -> Row:
    text = f"The value of {n} is the one that comes after {n - 1}. " * (2 + n % 5)
    return {"text": text, "id": f"<urn:uuid:{n}>", "url": f"https://example.com/{n}", "token_count": 20, "score": 3.1}


def finemath(n: int) -> Row:
    text = f"# Sums\n\nLet x = {n}. Then x + 1 = {n + 1}, and 2x = {2 * n}.\n" * (1 + n % 4)
    return {"url": f"https://example.com/{n}", "text": text, "int_score": 4, "token_count": 30}


def tulu(n: int) -> Row:
    return {"id": f"made_up_{n}", "messages": _turns(n, 1 + n % 3), "source": "made up"}


def multilingual(n: int) -> Row:
    system = "reasoning language: German\n\nBe brief."
    asked, answer = _turns(n)
    thought = f"Man addiert zwei zu {n}."
    messages = [
        {"role": "system", "content": system, "thinking": None},
        {**asked, "thinking": None},
        {**answer, "thinking": thought},
    ]
    return {
        "reasoning_language": "German",
        "developer": "Be brief.",
        "user": asked["content"],
        "analysis": thought,
        "final": answer["content"],
        "messages": messages,
    }


def kto_mix(n: int) -> Row:
    asked, good = _turns(n)
    bad = {"role": "assistant", "content": f"Not {n}."}
    return {"prompt": [asked], "completion": [good if n % 2 else bad], "label": bool(n % 2)}


def orpo_mix(n: int) -> Row:
    talk = _turns(n, 1 + n % 2)
    bad = {"role": "assistant", "content": f"Not {n}." + " No." * (n % 3)}
    asked = talk[-2]["content"]
    source = ("made up", "drawn")[n % 2]
    return {"source": source, "chosen": talk, "rejected": [*talk[:-1], bad], "prompt": asked, "question": asked}


def no_robots(n: int) -> Row:
    messages = [{"role": "system", "content": "Be kind."}, *_turns(n)][n % 2 :]
    return {"prompt": messages[0]["content"], "prompt_id": f"{n:064x}", "messages": messages, "category": "Open QA"}


def support(n: int) -> Row:
    asked, answer = _turns(n)
    return {"messages": [asked, {**answer, "content": f"<think>Easy.</think>\n\n{answer['content']}"}]}


SHAPES: dict[str, Callable[[int], Row]] = {
    "trl-lib/Capybara": capybara,
    "databricks/databricks-dolly-15k": dolly,
    "HuggingFaceH4/ultrachat_200k": ultrachat,
    "HuggingFaceH4/ultrafeedback_binarized": ultrafeedback,
    "openai/gsm8k": gsm8k,
    "nvidia/HelpSteer3": helpsteer3,
    "HuggingFaceFW/fineweb-edu": fineweb,
    "HuggingFaceTB/finemath": finemath,
    "allenai/tulu-3-sft-mixture": tulu,
    "HuggingFaceH4/Multilingual-Thinking": multilingual,
    "trl-lib/kto-mix-14k": kto_mix,
    "mlabonne/orpo-dpo-mix-40k": orpo_mix,
    "HuggingFaceTB/smol-smoltalk": tulu,
    "HuggingFaceH4/no_robots": no_robots,
    "s3://support": support,
}
"""The data sets, by what their address has between `hf://datasets/` and its settings, or begins with."""


def name_of(uri: str) -> str:
    """Returns the name in `SHAPES` of what an address leads to."""
    address = uri.removeprefix("hf://datasets/").partition("?")[0]
    return next((name for name in SHAPES if address == name or address.startswith(f"{name}/")), address)


def write(uri: str, folder: Path, *, held_out: bool) -> str:
    """Writes rows of the shape that an address has, and returns where.

    Args:
        uri: The address.
        folder: For the file.
        held_out: Whether they are held out: fewer, and others.
    """
    shape = SHAPES[name_of(uri)]
    first, count = (1000, HELD_OUT) if held_out else (10 + 100 * random.Random(uri).randrange(9), COUNT)
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    path.write_text("".join(json.dumps(shape(first + n)) + "\n" for n in range(count)), encoding="utf-8")
    return str(path)
