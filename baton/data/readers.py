"""Reads a source's files of every type, told by content, and yields unreadable parts as `UnusableRow`.

Docstrings of the standard library are a source too: real text on every machine with Python.
"""

from __future__ import annotations

import ast
import codecs
import json
import re
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from urllib.parse import parse_qs

from baton.data import files, parquet
from baton.data.files import lines
from baton.data.rows import (
    MAX_ROW,
    SHOWN,
    TOKEN,
    TOO_LONG,
    SourceRow,
    UnreadableError,
    UnusableRow,
    as_read,
    require_few_signs,
    row_value,
)
from baton.errors import UserError
from baton.recipe.data import Csv
from baton.store import sources
from baton.store.sources import SourceFile

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages", "__pycache__"}
MAX_DOC = 400  # longest docstring taken, in characters: one paragraph


def stdlib_rows() -> Iterator[dict[str, str]]:
    """Yields `{"prompt": signature, "completion": first paragraph of the docstring}`, files in name order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(file.relative_to(root).parts):
            yield from _documented(file)


def _documented(file: Path) -> Iterator[dict[str, str]]:
    try:
        tree = ast.parse(file.read_bytes())  # never imported
    except (SyntaxError, ValueError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
            paragraph = " ".join(doc.split("\n\n", 1)[0].split())
            if 20 <= len(paragraph) <= MAX_DOC and paragraph.isascii():
                signature = f"def {node.name}({ast.unparse(node.args)}):"
                yield {"prompt": signature, "completion": paragraph}


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes of `ast.walk` in its order, without expressions: no function is defined in one."""
    todo: deque[ast.AST] = deque([tree])
    while todo:
        node = todo.popleft()
        todo.extend(
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case)
        )
        yield node


NAMED = {".ndjson": "jsonl", ".feather": "arrow", **dict.fromkeys(sources.TEXTS, "text")}
"""Types not named after their suffix."""
LOOKED_AT = 20  # first lines, each tried as JSON
RETURNS = re.compile(rb'(?:[^"\r\n]++|"[^"]*+")*+\r(?!\n)')
"""Header of a table whose records end in carriage returns alone."""
AS_IT_IS = Csv()


def read(
    source: str, sample_by: str, seen: Callable[[str], None] = lambda kind: None, csv: Csv = AS_IT_IS
) -> Iterator[SourceRow | UnusableRow]:
    """Yields every row of a source in a stable order.

    `sample_by` is a text file's row: `line`, `paragraph` or `document`. `seen` is called with the type of each file:
    `jsonl`, `json`, `csv`, `tsv`, `parquet`, `arrow`, `text`; or with `builtin` or `hub`.

    Raises:
        UserError: the source does not exist or has a type that is not supported.
    """
    if source == sources.BUILTIN:
        seen("builtin")
        yield from (SourceRow(source, number, dict(row)) for number, row in enumerate(stdlib_rows(), 1))
    elif sources.is_dataset_id(source):
        seen("hub")
        yield from _dataset(source)
    else:
        for file in sources.files([source]):
            yield from _file(file, sample_by, seen, csv)


def kind_of(file: SourceFile, head: bytes) -> str:
    """Returns a file's type by its unpacked beginning, else by its name; raises UserError where neither tells."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"ARROW1"):
        return "arrow"
    text = next(files.text_blocks([head]), b"")
    if file.suffix in (".json", ".jsonl", ".ndjson"):
        return _json_kind(text, file.suffix)
    if file.suffix in sources.SUFFIXES:
        return NAMED.get(file.suffix, file.suffix[1:])
    if text.lstrip()[:1] in (b"{", b"["):
        return _json_kind(text, ".json")
    raise UserError(
        f"data.source: {file.uri} has type {file.suffix!r}, and its content is of no known one.",
        remedy=f"Supported: {', '.join(sources.SUFFIXES)}, each also followed by {', '.join(sources.COMPRESSED)}.",
    )


def _json_kind(text: bytes, suffix: str) -> str:
    """Tells lines of JSON from an array, and from objects that are spread over lines."""
    first, _, rest = text.strip().partition(b"\n")
    if re.match(rb"\s*\[\s*{", text):
        return "jsonl" if suffix != ".json" and rest and _is_value(first) else "json"
    whole_lines = (line for line in islice(text.lstrip().split(b"\n"), LOOKED_AT) if line.startswith(b"{"))
    if suffix != ".json" or len(first) >= files.BLOCK // 2 or any(map(_is_value, whole_lines)):
        return "jsonl"
    return "json"


def _is_value(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _file(file: SourceFile, sample_by: str, seen: Callable[[str], None], csv: Csv) -> Iterator[SourceRow | UnusableRow]:
    try:
        stream = files.blocks(file)
        head = next(stream, b"")
        kind = kind_of(file, head)
        seen(kind)
        if kind in ("parquet", "arrow"):
            stream.close()
            yield from parquet.read_parquet(file) if kind == "parquet" else parquet.read_arrow(file)
            return
        is_table = kind in ("csv", "tsv")
        text = files.text_blocks(chain([head], stream), csv.encoding if is_table else None)
        sample = next(text, b"")
        ends_in_return = RETURNS.match(sample) if is_table else b"\r" in sample and b"\n" not in sample
        text, end = chain([sample], text), b"\r" if ends_in_return else b"\n"
        match kind:
            case "jsonl":
                yield from files.read_jsonl(file.uri, lines(text, end))
            case "json":
                yield from _json_values(file.uri, text)
            case "csv" | "tsv":
                separator = csv.delimiter or ("\t" if kind == "tsv" else None)
                yield from files.read_delimited(file.uri, lines(text, end), sample, separator)
            case _:
                if files.marked_encoding(head) and b"\t" in sample.partition(end)[0]:
                    raise UnreadableError("a table of text in UTF-16; give its name the ending .tsv", raw=head[:SHOWN])
                yield from files.read_plain_text(file.uri, lines(text, end), sample_by)
    except UnreadableError as error:
        yield UnusableRow(file.uri, error.line, error.reason, as_read(error.raw), rest=True)


def _dataset(source: str) -> Iterator[SourceRow | UnusableRow]:
    """Reads a hub dataset: `hf://datasets/org/name[@revision][?config=…&split=…]`."""
    import datasets

    address, _, query = source.removeprefix("hf://datasets/").partition("?")
    name, _, revision = address.rstrip("/").partition("@")
    options = {key: values[0] for key, values in parse_qs(query).items()}
    try:
        rows = datasets.load_dataset(
            name, options.get("config"), split=options.get("split", "train"), revision=revision or None, streaming=True
        )
        for number, values in enumerate(rows, 1):
            if _num_bytes(values) <= MAX_ROW:
                yield SourceRow(source, number, dict(values))
            else:
                yield UnusableRow(source, number, TOO_LONG, as_read(_beginning(values)))
    except Exception as error:
        raise UserError(
            f"data.source {source!r} cannot be read from the hub: {type(error).__name__}: {error}",
            remedy="Check the name, config and split, and that the hub can be reached.",
        ) from None


def _num_bytes(values: object) -> int:
    if isinstance(values, str):
        return len(values) if values.isascii() else len(values.encode("utf-8", "surrogatepass"))
    if isinstance(values, bytes):
        return len(values)
    if isinstance(values, dict):
        return sum(_num_bytes(key) + _num_bytes(value) for key, value in values.items())
    return sum(map(_num_bytes, values)) if isinstance(values, list | tuple) else 8


def _beginning(values: dict[str, object]) -> bytes:
    texts = {name: value[:SHOWN] if isinstance(value, str) else "…" for name, value in values.items()}
    return ", ".join(f"{name}: {text}" for name, text in texts.items()).encode("utf-8", "backslashreplace")[:SHOWN]


SPACE = re.compile(r"[ \t\r\n]*")
LONGEST_TOKEN = 16
"""Characters from the end within which an error may come from a literal or an escape that is cut there."""


def _json_values(file: str, stream: Iterable[bytes]) -> Iterator[SourceRow | UnusableRow]:
    """Reads the objects of an array, or consecutive ones; a row's number is its place, from 1.

    A broken value is rejected alone where its brackets tell where it ends.
    """
    text = _JsonText(stream)
    in_array = text.peek() == "["
    text.at += in_array
    number = 1
    try:
        while (sign := text.peek()) and not (in_array and sign == "]"):
            yield text.value(file, number, in_array)
            number += 1
            sign = text.peek()
            if in_array and sign == ",":
                text.at += 1
            elif in_array and sign and sign != "]":
                raise text.damaged("broken JSON: expected , or ]")
        if in_array and not sign:
            raise text.damaged("broken JSON: the array does not end")
        text.at += in_array
        if text.peek() or text.broken_off:
            raise text.damaged("broken JSON: text after the array")
    except UnreadableError as error:
        raise UnreadableError(error.reason, number, error.raw or text.rest()) from None


class _JsonText:
    """A window on a text, which moves on as values are taken."""

    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = iter(stream)
        # Bytes that are not UTF-8 travel as surrogates, so that only their value is lost.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text = ""
        self.at = 0
        self._ended = False
        self._error: UnreadableError | None = None

    def more(self) -> bool:
        """Doubles the window at least, so that a long value is looked at few times; tells whether there was more."""
        wanted = max(len(self._text) - self.at, files.BLOCK)
        blocks = [self._text[self.at :]]
        while wanted > 0 and not self._ended:
            try:
                block = next(self._stream, b"")
            except UnreadableError as error:  # the text before it is read first
                self._error, block = error, b""
            self._ended = not block
            blocks.append(self._decoder.decode(block, final=self._ended))
            wanted -= len(blocks[-1])
        before = len(blocks[0])
        self._text, self.at = "".join(blocks), 0
        return len(self._text) > before

    def peek(self) -> str:
        """Moves over white space and returns the next character, none at the end."""
        while True:
            self.at = SPACE.match(self._text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self.at < len(self._text) or not self.more():
                return self._text[self.at : self.at + 1]

    def value(self, file: str, number: int, in_array: bool) -> SourceRow | UnusableRow:
        while True:
            try:
                require_few_signs(self._text, self.at)
                value, end = row_value(lambda decoder: decoder.raw_decode(self._text, self.at))
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - LONGEST_TOKEN
                if cut and self._may_grow() and self.more():
                    continue
                return self._broken(file, number, f"broken JSON: {error.msg}", in_array)
            except (ValueError, RecursionError) as error:  # a number of too many digits, too deep or too many
                return self._broken(file, number, f"broken JSON: {error}", in_array)
            if end == len(self._text) and self._may_grow() and self.more():
                continue  # a number may continue
            raw, self.at = self._text[self.at : end], end
            if len(raw) > MAX_ROW:
                return UnusableRow(file, number, TOO_LONG, _as_read(raw[:SHOWN]))
            if files.ESCAPED.search(raw):
                return UnusableRow(file, number, "not UTF-8", _as_read(raw))
            return files.as_row(file, number, value, raw)

    def _broken(self, file: str, number: int, reason: str, in_array: bool) -> UnusableRow:
        """Takes an unreadable value, up to where its brackets close, or raises UnreadableError."""
        while (end := self._end(in_array)) is None:
            if not self._may_grow() or not self.more():
                raise self.damaged(reason if self._may_grow() else f"broken JSON: {TOO_LONG}")
        raw, self.at = self._text[self.at : end], end
        return UnusableRow(file, number, reason, _as_read(raw))

    def _end(self, in_array: bool) -> int | None:
        depth = 0
        for token in TOKEN.finditer(self._text, self.at):
            sign = token[0]
            depth += (sign in "[{") - (sign in "]}")
            if in_array and (depth < 0 or (depth == 0 and sign == ",")):
                return token.start()
            if not in_array and depth <= 0 and sign in "]}":
                return token.end()
        return None

    def _may_grow(self) -> bool:
        return len(self._text) - self.at <= MAX_ROW

    @property
    def broken_off(self) -> bool:
        return self._error is not None

    def rest(self) -> bytes:
        return self._text[self.at : self.at + SHOWN].encode("utf-8", "surrogateescape")

    def damaged(self, reason: str) -> UnreadableError:
        """Returns the error of a text in which nothing more can be told apart."""
        return UnreadableError(self._error.reason if self._error else reason, raw=self.rest())


def _as_read(text: str) -> str:
    return as_read(text.encode("utf-8", "surrogateescape"))
