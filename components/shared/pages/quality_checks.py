"""The verdict on a run's rows, in words: what the split found, what the tokenizer measured, check by check."""

from __future__ import annotations

from typing import Any, TypedDict

from baton.components.shared.pages import rendered
from baton.components.shared.pages.rendering import count
from baton.components.shared.recipe import Data
from baton.components.shared.runs.documents.data import Tokens
from baton.components.shared.runs.documents.rows import SeenRow
from baton.components.shared.runs.run import Run
from baton.components.shared.store import bundles

QUALITY, FINDINGS, PAGE = "quality.json", "quality.jsonl", "data-quality.html"
"""Files of a run: what was found in all, row by row, and as a page."""

CHECKS = {
    "rejected": ("Unusable rows", "They are broken, or lack a field, and nothing is learned from them."),
    "few_rows": ("Enough rows", "With too few training rows a model learns them by heart."),
    "truncation": ("Length", "What lies beyond max_length is cut off and never learned."),
    "leakage": ("Leakage", "A model that has seen the held-out rows in training looks better than it is."),
    "duplicates": ("Duplicates", "Rows that occur several times are learned by heart and paid for each time."),
    "near_duplicates": ("Near duplicates", "Rows that say nearly the same add cost and no knowledge."),
    "empty": ("Near-empty fields", "From next to nothing, next to nothing is learned."),
    "encoding": ("Encoding", "Text that was decoded with the wrong table teaches garbage."),
    "control_characters": ("Control characters", "They are learned like any other character, and written again."),
    "turns": ("Turns", "Chat templates need known roles, with user and assistant in turn."),
    "language": ("Language", "Rows in a language that is not expected pull the model towards it."),
    "secrets": ("Secrets", "A model can repeat the keys and passwords that it was trained on."),
    "emails": ("E-mail addresses", "A model can repeat the addresses of real people."),
    "same_answers": ("Same answers", "A preference without a difference teaches nothing."),
}
"""What each check is called, and why it matters; the order in which they are listed."""

SEVERITY = ("failed", "warn", "fixed", "ok", "off")
"""Verdicts, the gravest first."""


class Counts(TypedDict):
    """What a check counted: rows that it found something in, of how many, what became of them, and the first ones."""

    rows: int
    of: int
    share: float
    mended: int
    dropped: int
    examples: list[dict[str, Any]]


class Verdict(Counts):
    """A check's counts, what the recipe asks of it and how it came out."""

    action: str
    verdict: str


class Judged(Verdict):
    """A check as the page lists it."""

    name: str
    title: str
    why: str
    told: str


def collect(run: Run, data: Data | None = None) -> dict[str, Any]:
    """Returns what is known about the rows of a run.

    Args:
        run: The run.
        data: Settings by which to judge; the run's own when left out.

    Returns:
        `run`, `source`, `state` (`failed`, `warn` or `ok`), `sentence`, `rows` (by what became of them), `checks` (in
        order of severity, each with `name`, `title`, `why`, `told` and what `quality.json` says), `languages`,
        `sources` (in a line each, with which columns became what),
        `columns`, `findings_uri`, `rejected_uri`, `max_length`, whether rows are `joined` and cut, and, once they are
        tokenized, `lengths` and how texts are `rendered`, if they became turns of a conversation.
    """
    data = data or run.recipe().data
    quality, tokens = run.get(QUALITY) or {}, run.get("tokens.json") or {}
    by_check: dict[str, Counts] = dict(quality.get("checks", {}))
    if lengths := tokens.get("lengths"):
        by_check["truncation"] = _truncation(lengths, data)
    checks: list[Judged] = []
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
        "rendered": rendered.of(run),
        "max_length": data.max_length,
        "joined": data.packing is True,
    }


def seen(run: Run) -> list[SeenRow]:
    """Returns the first rows of each side as the model sees them, once they are tokenized."""
    tokens = run.read(Tokens)
    manifest = tokens and bundles.read_manifest(run.storage, tokens.prefix)
    rows: list[SeenRow] = []
    if tokens and manifest:
        names = [f"seen/{side}-" for side in ("train", "eval", "test")]
        for path in (path for name in names for path in sorted(manifest.files) if path.startswith(name)):
            where = manifest.path(tokens.prefix, path)
            lines = run.storage.read(where).splitlines()
            rows += [SeenRow.read(line, run.storage.uri(where)) for line in lines]
    return rows


def without_examples(found: dict[str, Any]) -> dict[str, Any]:
    """Returns what `collect` returned, without what rows say."""
    checks = [{**check, "examples": []} for check in found["checks"]]
    return {**found, "checks": checks, "rendered": rendered.told(found["rendered"])}


def judged(name: str, check: Counts, data: Data) -> Verdict:
    """Returns what a check counted with its `action` and `verdict`.

    Args:
        name: The check; `rejected` for rows that could not be used.
        check: `rows`, `of`, `share`, `mended`, `dropped`.
        data: Settings.
    """
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


def _truncation(lengths: dict[str, Any], data: Data) -> Counts:
    """Returns what the tokenizer measured as the counts of a check."""
    over, of = 0 if data.packing is True else int(lengths["over"]), int(lengths["rows"])
    dropped = over if data.quality.truncation == "fix" else 0
    share = round(over / of, 6) if of else 0.0
    return {"rows": over, "of": of, "share": share, "mended": 0, "dropped": dropped, "examples": []}


def told(name: str, check: Verdict, data: Data) -> str:
    """Returns what a check found, in a few words."""
    rows = int(check["rows"])
    if check["verdict"] == "off":
        return "not looked at"
    if name == "few_rows":
        advice = f", at least {check['of']:,} are advised" if rows < check["of"] else ""
        return f"{count(rows, 'row')} to train on{advice}"
    if name == "language" and not data.quality.languages:
        return "none is expected"
    if not rows:
        return "nothing found"
    what = f"{count(rows, 'row')} ({percent(check['share'])})"
    if name == "truncation":
        return f"{what} longer than {data.max_length:,} tokens{', dropped' if check['dropped'] else ''}"
    done = [
        f"{number:,} {part}" for part, number in (("mended", check["mended"]), ("dropped", check["dropped"])) if number
    ]
    return f"{what}{': ' if done else ''}{', '.join(done)}"


def sentence(checks: list[Judged]) -> str:
    """Returns the verdict on all checks, for people who decide whether to pay for a GPU."""
    failed = [check["title"].lower() for check in checks if check["verdict"] == "failed"]
    warned = [check["title"].lower() for check in checks if check["verdict"] == "warn"]
    fixed = [check["title"].lower() for check in checks if check["verdict"] == "fixed"]
    if failed:
        return f"Do not train on this yet. What the recipe forbids was found: {_listed(failed)}."
    if warned:
        return f"Look at {_listed(warned)} before you pay for a GPU."
    if fixed:
        return f"These rows are ready: {_listed(fixed)} {'was' if len(fixed) == 1 else 'were'} dealt with."
    return "These rows are ready: no check found anything."


def percent(share: float | None) -> str:
    """Returns a share in percent, small ones with as many digits as it takes to see them."""
    if share is None:
        return "—"
    if share == 0:
        return "0%"
    if share < 0.0001:
        return "< 0.01%"
    return f"{share:.2%}" if share < 0.01 else f"{share:.1%}"


def _listed(words: list[str]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
