"""Rows as the model sees them, as a page and as a part of one: trained, cut and unused tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile
from pathlib import Path

from baton.pages import html
from baton.pages.html import count
from baton.runs.documents import Preview, PreviewRow, Token, TokenSpan

BYTES = re.compile(r"\\x[89a-f][0-9a-f]")  # a byte that is no whole character
VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
LEARNED = {  # kind of rows → note on the page
    "sequences": "",
    "pairs": "The model learns to prefer the chosen answer to the rejected one.",
    "scored": "The model learns to score the chosen text above the rejected one, each as a whole.",
    "rated": "The model learns from each answer what its label says.",
    "prompts": "The model writes the answers itself in training, so that no token here is trained.",
}


@dataclass(frozen=True)
class Part:
    name: str  # empty for the whole row
    told: str  # its tokens, counted
    spans: list[tuple[str, str]]  # tone and text
    tokens: list[tuple[str, str, int | None, bool]]  # tone, text, id (None for left out ones), whether a line ends here


@dataclass(frozen=True)
class PreviewView:
    file: str
    line: int
    side: str | None
    label: bool | None
    rejected: str | None
    columns: dict[str, str]
    told: list[str] = field(default_factory=list)
    shares: list[tuple[str, float]] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


def render(name: str, seen: Preview, learned_from: str) -> str:
    """Returns the page of a recipe's rows as one HTML document that loads nothing; see `MethodSpec.rows`."""
    environment = html.environment(Path(__file__).parent)
    rejected = sum(row.rejected is not None for row in seen.rows)
    return environment.get_template("seen_rows.html.j2").render(
        name=name,
        tone="warn" if rejected else "good",
        sentence=sentence(seen),
        note=" ".join(filter(None, (LEARNED[learned_from], seen.note))),
        tiles=[
            ("Method", seen.method, "training.method"),
            ("Rows", f"{len(groups(seen.rows)):,}", f"{rejected:,} not used"),
            ("Tokens", f"{sum(row.length for row in seen.rows):,}", "of these rows"),
            ("Trained", f"{sum(row.learned for row in seen.rows):,}", "tokens that are learned from"),
            ("max_length", f"{seen.max_length:,}", "rows are joined" if seen.joined else "longer rows are cut"),
        ],
        rows=shown(seen.rows),
    )


def sentence(seen: Preview) -> str:
    used = [row for row in seen.rows if row.rejected is None]
    rejected = len(groups(seen.rows)) - len(groups(used))
    cut = len(groups([row for row in used if row.kept < row.length]))
    parts = [f"{count(len(groups(used)), 'row')} as the model sees {'it' if len(groups(used)) == 1 else 'them'}"]
    parts += [f"{cut:,} cut at {seen.max_length:,} tokens"] if cut else []
    parts += [f"{rejected:,} not used"] if rejected else []
    return ", ".join(parts) + "."


def groups(rows: Sequence[PreviewRow]) -> list[list[PreviewRow]]:
    """Returns the sequences of each row together."""
    return [list(group) for _, group in groupby(rows, key=lambda row: (row.source, row.side))]


def shown(rows: Sequence[PreviewRow]) -> list[PreviewView]:
    return [_shown(group) for group in groups(rows)]


def parts(rows: Sequence[PreviewRow]) -> Iterator[tuple[str, list[TokenSpan], list[Token]]]:
    """Yields the parts of a row; a prompt that two answers share is a part of its own."""

    def num_present(spans: Sequence[TokenSpan]) -> int:
        return sum(span.tokens for span in spans if not span.left_out)

    heads = [list(takewhile(lambda span: not (span.trained or span.cut), row.spans)) for row in rows]
    taken = 0
    if len(rows) > 1 and heads[0] and all(head == heads[0] for head in heads) and len(heads[0]) < len(rows[0].spans):
        taken = len(heads[0])
        yield "prompt", heads[0], rows[0].tokens[: num_present(heads[0])]
    for row in rows:
        name = row.part if row.label is None or len(rows) == 1 else f"rated {'good' if row.label else 'bad'}"
        yield name, row.spans[taken:], row.tokens[num_present(row.spans[:taken]) :]


def tone(span: TokenSpan) -> str:
    return "gap" if span.left_out else "cut" if span.cut else "trained" if span.trained else "read"


def _shown(rows: Sequence[PreviewRow]) -> PreviewView:
    first = rows[0]
    found = PreviewView(
        file=first.source.file,
        line=first.source.line,
        side=first.side,
        label=first.label if len(rows) == 1 else None,
        rejected=next((row.rejected for row in rows if row.rejected), None),
        columns=first.columns,
    )
    if not first.length:
        found.parts.append(Part("", "", [("read", first.text)] if first.text else [], []))
        return found
    length, kept, learned = (sum(getattr(row, name) for row in rows) for name in ("length", "kept", "learned"))
    found.told.append(count(length, "token"))
    if found.rejected is None:
        found.told.append(f"{learned:,} trained")
        if kept < length:
            found.told.append(f"{length - kept:,} cut")
        shares = {"trained": learned, "read": kept - learned, "cut": length - kept}
        found.shares.extend((name, shares[name] / length) for name in ("read", "trained", "cut") if shares[name])
    for name, spans, tokens in parts(rows):
        texts = [(tone(span), _gap(span) if span.left_out else span.text) for span in spans]
        found.parts.append(
            Part(name, count(sum(span.tokens for span in spans), "token"), texts, _tokens(spans, tokens))
        )
    return found


def _gap(span: TokenSpan) -> str:
    return f" … {count(span.tokens, 'token')} … "


def _tokens(spans: Sequence[TokenSpan], tokens: Sequence[Token]) -> list[tuple[str, str, int | None, bool]]:
    rest = iter(tokens)
    listed: list[tuple[str, str, int | None, bool]] = []
    for span in spans:
        if span.left_out:
            listed.append(("gap", _gap(span), None, False))
            continue
        for token in islice(rest, span.tokens):
            halves = " bytes" if BYTES.search(token.text) else ""
            listed.append((tone(span) + halves, token.text.translate(VISIBLE), token.id, "\n" in token.text))
    return listed
