"""Pages of rows: as the model sees them, with trained, cut and unused tokens; and the page of a run's rows.

The latter is written before a GPU is paid for and again once they are tokenized.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any, TypedDict

from baton.errors import DamagedError
from baton.pages import html, plots
from baton.pages.html import count
from baton.pages.plots import Curve, Mark, Plot
from baton.recipe.data import Data
from baton.runs.documents import Preview, PreviewRow, Token, TokenizedRows, TokensMeta, TokenSpan
from baton.runs.run import Run
from baton.store.manifest import usable_manifest

BYTES = re.compile(r"\\x[89a-f][0-9a-f]")  # a byte that is no whole character
VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})
LEARNED = {  # kind of rows → note on the page
    "sequences": "",
    "pairs": "The model learns to prefer the chosen answer to the rejected one.",
    "scored": "The model learns to score the chosen text above the rejected one, each as a whole.",
    "rated": "The model learns from the label of each answer.",
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


def render_preview(name: str, seen: Preview, learned_from: str) -> str:
    """Returns the page of a recipe's rows as one HTML document that loads nothing; see `MethodSpec.rows`."""
    environment = html.environment(Path(__file__).parent)
    rejected = sum(row.rejected is not None for row in seen.rows)
    return environment.get_template("seen_rows.html.j2").render(
        name=name,
        tone="warn" if rejected else "good",
        sentence=preview_sentence(seen),
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


def preview_sentence(seen: Preview) -> str:
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
        found.told.append(f"{learned:,} {'trained' if first.side in ('train', None) else 'scored'}")
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


class Rendering(TypedDict):
    told: str
    row: str  # the first training sequence, trained parts in marks; empty where it is not shown


def read_rendering(run: Run) -> Rendering | None:
    """Returns the template noted by tokenize, None where rows were not made into conversations."""
    tokens = run.raw(TokenizedRows.NAME) or {}
    if not tokens.get("rendered"):
        return None
    prefix = tokens["prefix"]
    manifest = usable_manifest(run.storage, prefix)
    meta = manifest and TokensMeta.read(manifest.meta, run.storage.uri(prefix))
    return {"told": tokens["rendered"], "row": next(iter(meta.first.get("train", ())), "") if meta else ""}


def without_row(rendered: Rendering | None) -> Rendering | None:
    return rendered and {**rendered, "row": ""}


# Findings of a run: in all, row by row, and as a page.
QUALITY, FINDINGS, PAGE = "quality.json", "quality.jsonl", "data-quality.html"

# Title of each check, and why it matters, in the order of the page.
CHECKS = {
    "rejected": ("Unusable rows", "They are broken, or lack a field, and nothing is learned from them."),
    "few_rows": ("Enough rows", "With too few training rows a model learns them by heart."),
    "truncation": ("Length", "Tokens beyond max_length are cut off and never learned."),
    "leakage": ("Leakage", "A model that has seen the held-out rows in training looks better than it is."),
    "duplicates": ("Duplicates", "Rows that occur several times are learned by heart and paid for each time."),
    "near_duplicates": ("Near duplicates", "Rows of nearly the same text add cost and no knowledge."),
    "empty": ("Near-empty fields", "Near-empty text teaches next to nothing."),
    "encoding": ("Encoding", "Text that was decoded with the wrong table teaches garbage."),
    "control_characters": ("Control characters", "The model learns and writes them like any other character."),
    "turns": ("Turns", "Chat templates need known roles, with user and assistant in turn."),
    "language": ("Language", "Rows in a language that is not expected pull the model towards it."),
    "secrets": ("Secrets", "A model can repeat the keys and passwords that it was trained on."),
    "emails": ("E-mail addresses", "A model can repeat the addresses of real people."),
    "same_answers": ("Same answers", "A preference without a difference teaches nothing."),
}

SEVERITY = ("failed", "warn", "fixed", "ok", "off")  # verdicts, the gravest first
MARKS = {  # tone, symbol and words
    "failed": ("bad", "✗", "not allowed"),
    "warn": ("warn", "!", "look at it"),
    "fixed": ("good", "✓", "dealt with"),
    "ok": ("good", "✓", "fine"),
    "off": ("", "–", "off"),
}
STATES = {"failed": ("bad", "do not train"), "warn": ("warn", "look first"), "ok": ("good", "ready")}
SIDES = {"train": ("blue", "to train on"), "eval": ("orange", "evaluation"), "test": ("purple", "test")}
HUES = ("blue", "orange", "green", "purple", "amber", "sky")  # of the most frequent languages; the others are grey


class CheckCounts(TypedDict):
    rows: int  # with a finding, `of` as many
    of: int
    share: float
    mended: int
    dropped: int
    examples: list[dict[str, Any]]


class CheckVerdict(CheckCounts):
    action: str
    verdict: str


class ListedCheck(CheckVerdict):
    name: str
    title: str
    why: str
    told: str


def collect(run: Run, data: Data | None = None) -> dict[str, Any]:
    """Returns the findings on a run's rows, checks by severity, judged by `data` or the run's own settings."""
    data = data or run.recipe().data
    quality, tokens = run.raw(QUALITY) or {}, run.raw("tokens.json") or {}
    by_check: dict[str, CheckCounts] = dict(quality.get("checks", {}))
    if lengths := tokens.get("lengths"):
        over, of = 0 if data.packing is True else int(lengths["over"]), int(lengths["rows"])
        dropped = over if data.quality.truncation == "fix" else 0
        share = round(over / of, 6) if of else 0.0
        by_check["truncation"] = {
            "rows": over, "of": of, "share": share, "mended": 0, "dropped": dropped, "examples": [],
        }  # fmt: skip
    checks: list[ListedCheck] = []
    for name, (title, why) in CHECKS.items():
        if name in by_check:
            check = judged(name, by_check[name], data)
            checks.append({"name": name, "title": title, "why": why, **check, "told": told(name, check, data)})
    checks.sort(key=lambda check: SEVERITY.index(check["verdict"]))
    worst = checks[0]["verdict"] if checks else "ok"
    return {
        "run": run.name,
        "source": ", ".join(source.uri for source in data.sources),
        "state": worst if worst in ("failed", "warn") else "ok",
        "sentence": sentence(checks),
        "checks": checks,
        **{part: quality.get(part, {}) for part in ("rows", "languages", "columns")},
        **{place: quality.get(place) for place in ("findings_uri", "rejected_uri")},
        "sources": quality.get("sources") or [f"From {', '.join(source.uri for source in data.sources)}"],
        "lengths": lengths,
        "rendered": read_rendering(run),
        "max_length": data.max_length,
        "joined": data.packing is True,
    }


def seen(run: Run) -> list[PreviewRow]:
    """Returns the first rows of each side as the model sees them, once they are tokenized."""
    tokens = run.read(TokenizedRows)
    manifest = tokens and usable_manifest(run.storage, tokens.prefix)
    rows: list[PreviewRow] = []
    if tokens and manifest:
        names = [f"seen/{side}-" for side in ("train", "eval", "test")]
        for path in (path for name in names for path in sorted(manifest.files) if path.startswith(name)):
            where = manifest.path(tokens.prefix, path)
            # Lost or damaged files do not fail the split: the tokenize stage makes them again.
            with contextlib.suppress(FileNotFoundError, DamagedError):
                rows += [PreviewRow.read(line, run.storage.uri(where)) for line in run.storage.read(where).splitlines()]
    return rows


def without_examples(found: dict[str, Any]) -> dict[str, Any]:
    checks = [{**check, "examples": []} for check in found["checks"]]
    return {**found, "checks": checks, "rendered": without_row(found["rendered"])}


def judged(name: str, check: CheckCounts, data: Data) -> CheckVerdict:
    if name == "rejected":
        verdict = "failed" if check["rows"] > data.max_rejected * check["of"] else "warn" if check["rows"] else "ok"
        return {**check, "action": f"at most {percent(data.max_rejected)}", "verdict": verdict}
    action = str(getattr(data.quality, name))
    is_found = check["rows"] > 0
    if name == "few_rows":
        is_found = check["rows"] < check["of"]
    elif name == "truncation" and action != "fix":
        is_found = check["rows"] > data.quality.truncated_share * check["of"]
    is_fixed = action == "fix" and name != "few_rows" and check["mended"] + check["dropped"] == check["rows"]
    verdict = "off" if action == "off" else "ok"
    if is_found and action != "off":
        verdict = "failed" if action == "fail" else "fixed" if is_fixed else "warn"
    return {**check, "action": action, "verdict": verdict}


def told(name: str, check: CheckVerdict, data: Data) -> str:
    rows = int(check["rows"])
    if check["verdict"] == "off":
        return "not checked"
    if name == "few_rows":
        advice = f", at least {check['of']:,} are advised" if rows < check["of"] else ""
        return f"{count(rows, 'row')} to train on{advice}"
    if name == "language" and not data.quality.languages:
        return "any language"
    if not rows:
        return "nothing found"
    what = f"{count(rows, 'row')} ({percent(check['share'])})"
    if name == "truncation":
        return f"{what} longer than {data.max_length:,} tokens{', dropped' if check['dropped'] else ''}"
    done = [
        f"{number:,} {part}" for part, number in (("mended", check["mended"]), ("dropped", check["dropped"])) if number
    ]
    return f"{what}{': ' if done else ''}{', '.join(done)}"


def sentence(checks: list[ListedCheck]) -> str:
    """Returns the verdict on all checks, to decide whether to pay for a GPU."""
    worst = min((check["verdict"] for check in checks), key=SEVERITY.index, default="ok")
    words = [check["title"].lower() for check in checks if check["verdict"] == worst]
    listed = " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
    if worst == "failed":
        return f"Do not train on this yet. The recipe forbids these findings: {listed}."
    if worst == "warn":
        return f"Check {listed} before you pay for a GPU."
    if worst == "fixed":
        return f"These rows are ready: {listed} {'was' if len(words) == 1 else 'were'} dealt with."
    return "These rows are ready: no check found anything."


def percent(share: float | None) -> str:
    if share is None:
        return "—"
    if share == 0:
        return "0%"
    if share < 0.0001:
        return "< 0.01%"
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def write(run: Run) -> str:
    page = render(collect(run), seen(run))
    run.storage.write(run.path(PAGE), page.encode())
    return page


def refresh(run: Run) -> None:
    """Writes the page again, if the run has it: the split could not count tokens yet."""
    if run.raw(QUALITY):
        write(run)


def render(found: dict[str, Any], rows: Sequence[PreviewRow] = ()) -> str:
    """Returns the page as one HTML document that loads nothing."""
    environment = html.environment(Path(__file__).parent)
    environment.filters |= {"percent": percent}
    tone, word = STATES[found["state"]]
    histogram = length_plot(found) if found["lengths"] and found["lengths"]["rows"] else None
    return environment.get_template("quality.html.j2").render(
        found=found,
        tone=tone,
        word=word,
        marks=MARKS,
        tiles=_tiles(found),
        sides=_sides(found["rows"]),
        languages=_languages(found["languages"]),
        histogram=histogram,
        length_note=_length_note(found),
        rows=shown(rows),
    )


def _tiles(quality: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows, lengths = quality["rows"], quality["lengths"]
    tiles = []
    if rows:
        tiles = [
            ("Training rows", f"{rows['train']:,}", f"of {count(rows['looked_at'], 'row')} looked at"),
            ("Held out", f"{rows['eval'] + rows['test']:,}", f"{rows['eval']:,} evaluation, {rows['test']:,} test"),
            ("Dropped", f"{rows['dropped']:,}", "by checks set to fix"),
            ("Mended", f"{rows['mended']:,}", "by checks set to fix"),
            ("Unusable", f"{rows['rejected']:,}", "broken, or without a field"),
        ]
    if lengths:
        tiles.append(("Longest row", f"{lengths['longest']:,}", f"tokens; {lengths['mean']:,.0f} on average"))
    return tiles


def _sides(rows: dict[str, int]) -> list[tuple[str, str, str, float]]:
    total = sum(rows.get(side, 0) for side in SIDES)
    return [
        (color, name, f"{rows[side]:,}", rows[side] / total)
        for side, (color, name) in SIDES.items()
        if rows.get(side, 0)
    ]


def _languages(languages: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """Returns colour, name, no count and share of the most frequent languages, and of the rest."""
    shares = [(code, share) for code, share in languages.get("shares", []) if code != "und"]
    unclear = sum(share for code, share in languages.get("shares", []) if code == "und")
    shown = [(color, code, "", share) for color, (code, share) in zip(HUES, shares, strict=False)]
    rest = {"others": sum(share for _, share in shares[len(HUES) :]), "unclear": unclear}
    return shown + [("grey", name, "", share) for name, share in rest.items() if share > 0]


def _length_note(quality: dict[str, Any]) -> str:
    lengths = quality["lengths"]
    if not lengths:
        return ""
    limit = quality["max_length"]
    if quality["joined"]:
        return f"Rows are joined, and cut into sequences of max_length, {limit:,} tokens."
    if not lengths["over"]:
        return f"Every row fits into max_length, {limit:,} tokens."
    share = percent(lengths["over"] / lengths["rows"])
    rest = "is" if lengths["over"] == 1 else "are"
    return f"{count(lengths['over'], 'row')} ({share}) {rest} longer than max_length, {limit:,} tokens."


def length_plot(quality: dict[str, Any]) -> Plot | None:
    """Returns the rows by length, too long ones in another colour, and the line of max_length."""
    limit = int(quality["max_length"])
    bars = length_bars(quality["lengths"], limit)
    curves = [
        Curve(name=name, color=color, bars=True, points=_steps([bar for bar in bars if (bar[0] >= limit) is over]))
        for name, color, over in (("rows that fit", "blue", False), ("longer rows", "orange", True))
    ]
    return plots.plot(
        "Rows by their number of tokens",
        "rows",
        curves,
        x="tokens in a row",
        log_x=2,
        marks=[Mark(at=limit, text=f"max_length {limit:,}", color="ink")],
        from_zero=True,
        height=280,
    )


def _steps(bars: Sequence[tuple[float, float, int]]) -> plots.Points:
    """Returns the outline of bars, which falls to 0 where the next one does not follow at once."""
    points: dict[float, float] = {}
    for low, high, rows in bars:
        points |= {low: float(rows), high: 0.0}
    return sorted(points.items())


def length_bars(lengths: dict[str, Any], limit: int) -> list[tuple[float, float, int]]:
    """Returns the histogram's bars: from, to, rows. Classes end at powers of two and halfway between."""
    bars: list[tuple[float, float, int]] = []
    over = int(lengths["over"])
    for bound, rows in reversed(lengths["histogram"]):
        low = bound * 3 / 4 if bound & (bound - 1) == 0 else bound * 2 / 3  # at a power of two, or between
        if low < limit < bound:  # cut at max_length, by the number of longer rows
            bars.append((limit, bound, min(over, rows)))
            bound, rows = limit, rows - min(over, rows)
        bars.append((low, bound, rows))
        over -= rows if low >= limit else 0
    return bars[::-1]
