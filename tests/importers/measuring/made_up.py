"""Rows made up in the shape that an example names, and the example with its addresses replaced by their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ROWS = 20

SEES = ("llava", "vision", "audio", "mllm", "rlhf_v", "math_shepherd")
"""Parts of the names of data sets that hold pictures, sound or rewards per step: no rows are made for those."""


def _question(n: int) -> str:
    return f"What is {n} and {n + 2}?"


def _answer(n: int) -> str:
    return f"It is {2 * n + 2}" + ", as one sees" * (n % 3) + "."


def _instruction(n: int) -> Row:
    return {"instruction": _question(n), "input": "Count." if n % 2 else "", "output": _answer(n)}


def axolotl_row(entry: Row, rl: str, n: int) -> Row:
    """Returns a row as axolotl's documentation has it for a data set's `type` and the keys that name columns."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        names = {part: str(kind.get(f"field_{part}", part)) for part in ("instruction", "input", "output")}
        return {names[part]: value for part, value in _instruction(n).items()}
    kind = str(kind or "")
    if kind.startswith("alpaca"):
        return _instruction(n)
    if kind == "jeopardy":
        return {"question": _question(n), "category": "sums", "answer": _answer(n)}
    if rl or kind.startswith("bradley_terry"):
        return _judged(entry, rl, kind, n)
    if kind in ("chat_template", "sharegpt"):
        name = entry.get("field_messages", "conversations" if kind == "sharegpt" else "messages")
        return {name: _conversation(entry, n)}
    return {entry.get("field") or entry.get("text_column") or "text": f"{_question(n)} {_answer(n)}"}


def _conversation(entry: Row, n: int) -> list[Row]:
    names = entry.get("message_property_mappings") or {}
    role = names.get("role") or entry.get("message_field_role", "role")
    content = names.get("content") or entry.get("message_field_content", "content")
    short = role == "from"
    turns = [("human" if short else "user", _question(n)), ("gpt" if short else "assistant", _answer(n))] * (n % 2 + 1)
    if "drop_system_message" in entry:
        turns.insert(0, ("system", "Be brief."))
    messages = [{role: who, content: text} for who, text in turns]
    if thinking := entry.get("field_thinking"):
        messages[-1][thinking] = "One adds the two."
    return messages


def _judged(entry: Row, rl: str, kind: str, n: int) -> Row:
    style, _, last = kind.rpartition(".")
    good, bad, question = _answer(n), f"Not {n}.", _question(n)
    if rl == "kto":
        return {"prompt": question, "completion": good if n % 2 else bad, "label": bool(n % 2)}
    if kind == "chat_template.default":
        chosen, rejected = (entry.get(f"field_{name}", name) for name in ("chosen", "rejected"))
        asked = [{"role": "user", "content": question}]
        answers = {
            chosen: {"role": "assistant", "content": good},
            rejected: {"role": "assistant", "content": bad},
        }
        return {entry.get("field_messages", "messages"): asked, **answers}
    if last in ("ultra", "argilla") and style:
        pairs = {"chosen": good, "rejected": bad}
        talks = {
            name: [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            for name, text in pairs.items()
        }
        return {"prompt": question, **talks}
    return {"system": "", "input": question, "chosen": good, "rejected": bad}


def axolotl(document: Row, path: Path, folder: Path) -> Path:
    """Writes an axolotl example with its addresses replaced by files of rows, and returns where."""
    document = deepcopy(document)
    rl = str(document.get("rl") or "")
    for name in ("datasets", "test_datasets", "pretraining_dataset"):
        entries = document.get(name)
        if isinstance(entries, str):
            document[name] = entries = [{"path": entries}]
        for at, entry in enumerate(entries or []):
            file = folder / f"{name}-{at}.jsonl"
            _write(file, [axolotl_row(entry, rl, n) for n in range(ROWS)])
            for key in ("data_files", "name", "split", "revision", "ds_type"):
                entry.pop(key, None)
            entry["path"] = str(file)
    return _example(document, path, folder)


def llamafactory(document: Row, path: Path, folder: Path, root: Path) -> Path:
    """Writes a LLaMA-Factory example whose data sets are the first rows of those in its checkout, or made-up ones."""
    document = deepcopy(document)
    known = json.loads((root / "data/dataset_info.json").read_text(encoding="utf-8"))
    info: Row = {}
    for name in [part.strip() for key in ("dataset", "eval_dataset") for part in _names(document.get(key))]:
        entry = dict(known.get(name) or {})
        held = root / "data" / str(entry.get("file_name", "-"))
        rows = _first(held) if held.is_file() else [_described(entry, n) for n in range(ROWS)]
        for key in ("hf_hub_url", "ms_hub_url", "om_hub_url", "subset", "split", "revision", "folder"):
            entry.pop(key, None)
        entry["file_name"] = f"{name}.jsonl"
        _write(folder / entry["file_name"], rows)
        info[name] = entry
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    document["dataset_dir"] = str(folder)
    return _example(document, path, folder)


def _names(value: object) -> list[str]:
    return [str(part) for part in value] if isinstance(value, list) else str(value or "").split(",") if value else []


def _first(path: Path) -> list[Row]:
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return [row for row in rows[:ROWS] if isinstance(row, dict)]


def _described(entry: Row, n: int) -> Row:
    columns = entry.get("columns") or {}
    if entry.get("formatting") in ("sharegpt", "openai"):
        tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
        tags |= entry.get("tags") or {}
        turns = ((tags["user_tag"], _question(n)), (tags["assistant_tag"], _answer(n)))
        return {
            columns.get("messages", "conversations"): [
                {tags["role_tag"]: who, tags["content_tag"]: text} for who, text in turns
            ]
        }
    names = {"instruction": "prompt", "input": "query", "output": "response"}
    return {columns.get(names[part], part): value for part, value in _instruction(n).items()}


def _example(document: Row, path: Path, folder: Path) -> Path:
    import yaml

    target = folder / path.name
    target.write_text(yaml.safe_dump(document), encoding="utf-8")
    return target


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sees(document: Row) -> bool:
    """Tells whether an example is for pictures or sound, or judges steps: what Baton refuses."""
    named: list[str] = [*_names(document.get("dataset"))]
    for name in ("datasets", "pretraining_dataset"):
        entries = document.get(name)
        named += [
            str(e.get("path") if isinstance(e, dict) else e) for e in (entries if isinstance(entries, list) else [])
        ]
    return "processor_type" in document or any(part in name.lower() for name in named for part in SEES)


Walk = Callable[[Path], Iterator[Path]]


def examples(root: Path) -> list[Path]:
    """Returns the example files of a checkout, in order."""
    folder = root / "examples"
    return sorted(path for path in folder.rglob("*") if path.suffix in (".yml", ".yaml") and os.path.isfile(path))
