"""Benchmarks in the docs: a short page of main figures, a long one of all, and figures on other pages.

Figures are kept in `docs/internals/benchmarks.json`, so that rows can be measured one at a time.

python -m benchmarks.published   # fills all pages from those figures, as `make docs` does
"""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter

from benchmarks import rows
from benchmarks.bench import ROUNDS
from benchmarks.table import cell
from tests.support import pictures
from tests.support.pictures import picture

ROOT = Path(__file__).parents[1]
FIGURES = "docs/internals/benchmarks.json"
OUTPUTS = ("docs", "README.md")
"""Paths that a commit need not have for it to be the measured one: `publish` writes there."""
MAX_LOAD, MAX_OTHERS = 0.5, 0.1
"""Load of the minute before the start, and cores that other processes may use while a row is measured."""
COLORS = [pictures.COLORS[name] for name in ("blue", "orange", "green", "purple", "amber", "sky", "grey", "ink")]
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "obstore")

HEAD = """# Benchmarks, all figures

<!-- Written by `make docs` from docs/internals/benchmarks.json. -->

Baton against training without it, or against the limit of machine and server. Each row states the conditions, and the
sides on which the preparation of data counts. Sides run in turn. Cells hold the median of all rounds, with least and
greatest. [Benchmarks](../trust/benchmarks.md) has the main figures.

"""
MAIN = {  # row and figure → its name on the short page
    ("boundary", "chunk boundary", "script"): "gap between two chunks",
    ("boundary", "chunk boundary", "DCP"): "the same, `async_save`",
    ("boundary", "chunk boundary", "Lightning"): "the same, Lightning",
    ("boundary", "chunk boundary", "rclone"): "the same, rclone's mount",
    ("boundary-network", "chunk boundary", "script"): f"gap between two chunks, {rows.NETWORK}",
    ("imports", "start to first step", "script"): "start of a process to its first step",
    ("restore", "the same, as a chunk waits for it", "script"): "wait for a checkpoint of 925 MB",
    ("restore", "speed of fetch", "Run:ai's streamer"): "speed of a verified fetch",
    ("restart", "from its end to the next one's first step", "fresh"): "lost process to the next one's first step",
    ("goodput", "goodput, a kill every 30 s", "script"): "goodput, a kill every 30 s",
    ("goodput", "goodput, a kill every 30 s", "DCP"): "the same, `async_save`",
    ("goodput", "goodput, a kill every 30 s", "Lightning"): "the same, Lightning",
    ("goodput", "goodput, a kill every 30 s", "rclone"): "the same, rclone's mount",
    ("goodput", "goodput, a kill every 60 s", "script"): "goodput, a kill every 60 s",
    ("notice", "notice to checkpoint, 77m", "JIT"): "SIGTERM to a checkpoint of 925 MB in the store",
    ("save-stall", "stall per checkpoint", "script"): "stall per checkpoint of 925 MB",
    ("save-stall", "stall per checkpoint", "DCP"): "the same, `async_save`",
    ("save-stall", "stall per checkpoint", "Lightning"): "the same, Lightning",
    ("save-stall", "extra time per step", "script"): "extra time per step, a checkpoint every 8 steps",
    ("memory", "the same", "script"): "peak host memory",
    ("tokenize", "speed", "SFTTrainer"): "speed of tokenizing",
    ("searches", "samples saved, eta 2", ""): "samples saved by pruning, against all trials to the end",
    ("searches", "searches of 30 with the winner of a full search, eta 2", ""): "searches of 30 with the same winner",
    ("sweep", "time", "a process a chunk"): "eight LoRA configurations in turns in one process",
    ("sweep", "time", "TRL"): "the same, TRL one after the other",
}

MISSES = {  # row → figure → why its goal is missed; braces hold a figure, what it is compared with, and the side
    "save-stall": {
        "extra time per step": "the stall is {stall per checkpoint|script|ours} of eight steps of {step without "
        "checkpoints|script|ours}. Upload and server share two cores and their memory with the trainer.",
        "stall per checkpoint": "both sides wait for one copy to memory. A script that saves into a mounted bucket "
        "waits {stall per checkpoint|rclone|theirs}.",
    },
    "frontier": {
        "continuous: interval": "`continuous` keeps extra time below 5%. A checkpoint every step has an interval of "
        "{every step: interval|2 uploads alone and a step|ours}, and costs {every step: extra time||ours}.",
    },
    "restore": {
        "fetch alone + restore": "every byte is hashed. A chunk fetches while it imports, and waits {the same, as a "
        "chunk waits for it|script|ours}.",
        "speed of fetch": "the raw reader hashes nothing. One that does reaches {speed of fetch|raw reader that "
        "hashes|theirs}.",
    },
    "restore-network": {
        "fetch alone + restore": "the network is the limit: the raw reader reaches {speed of fetch|raw reader|theirs}. "
        "A chunk waits {the same, as a chunk waits for it|script|ours}.",
    },
    "imports": {"start to first step": "each process imports torch and the libraries; the row has the parts."},
    "goodput": {
        "goodput, a kill every 30 s": "each life begins with a start, so the bound is {its bound, a kill every 30 "
        "s|script|ours}. On average half of an interval of {seconds between checkpoints, a kill every 30 "
        "s|script|ours} is trained again.",
        "goodput, a kill every 60 s": "the bound is {its bound, a kill every 60 s|script|ours}.",
    },
    "sweep": {
        "time": "computing takes the time on two cores. A process a chunk is forked from a warm server, and built "
        "while another one trains.",
    },
}


def refusals(about: Mapping[str, Any], row: Mapping[str, Any] | None = None) -> list[str]:
    """Returns the reasons why figures are no evidence.

    Args:
        about: The state before the start: commit, rounds, load.
        row: A measured row, None before the start.
    """
    found, load = [], about["machine"]["load"][0]
    if about.get("quick"):
        found.append("--quick measures too little")
    if str(about["commit"]).endswith("-dirty"):
        found.append("the code differs from the commit: commit first")
    if load > MAX_LOAD:
        found.append(f"load of {load:.1f} before the start, at most {MAX_LOAD}: wait for a quiet machine")
    if about["rounds"] < ROUNDS:
        found.append(f"{about['rounds']} rounds, at least {ROUNDS}")
    if row and row.get("others", 0.0) > MAX_OTHERS:
        found.append(f"other processes used {row['others']:.2f} cores, at most {MAX_OTHERS}")
    return found


def lowered(row: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Returns the goals of a row that are easier than the published ones and do not state them in `was`."""
    before = {(figure["what"], figure["other"]): figure for figure in known.get("figures", ())}
    found = []
    for figure in row["figures"]:
        old = before.get((figure["what"], figure["other"]))
        if old is None or figure.get("was") is not None:
            continue
        for bound, sign in (("at_least", 1), ("at_most", -1)):
            goal = figure[bound]
            if old[bound] is not None and (goal is None or sign * goal < sign * old[bound]):
                found.append(f"the goal of {figure['what']!r} was {old[bound]:g}: state it in `was`")
    return found


def publish(document: Mapping[str, Any], root: Path = ROOT) -> dict[str, list[str]]:
    """Replaces rows of earlier benchmarks, writes pages and charts, and returns the reasons for all rows left out.

    Args:
        document: JSON of `python -m benchmarks`.
        root: The folder with docs and README.
    """
    path = root / FIGURES
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    about = {key: document[key] for key in ("created", "commit", "rounds", "machine", "server")}
    about["versions"] = {name: document["versions"][name] for name in LIBRARIES if name in document["versions"]}
    refused = {}
    for name, row in document["rows"].items():
        reasons = [*refusals(document, row), *lowered(row, known.get(name, {}))]
        if reasons:
            refused[name] = reasons
        else:
            known[name] = {"about": about, **row}
    known = {name: known[name] for name in rows.ALL if name in known}
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write(known, root)
    return refused


def write(known: Mapping[str, Any], root: Path = ROOT) -> None:
    """Writes pages and charts of figures."""
    for name, text in pages(known, root).items():
        (root / name).write_text(text, encoding="utf-8")
    for name, row in known.items():
        for end, chart in row["charts"].items():
            drawn = picture(f"{name}-{end}", chart["title"], partial(_plot, chart))
            (root / "docs" / "pictures" / f"bench-{name}-{end}.svg").write_text(drawn, encoding="utf-8")


def pages(known: Mapping[str, Any], root: Path = ROOT) -> dict[str, str]:
    """Returns all pages with figures in Markdown, by path."""
    contents = "\n".join(f"- [{row['title']}](#{name})" for name, row in known.items())
    every = f"{HEAD}{contents}\n" + "".join(_section(name, row) for name, row in known.items()) + _missing(known)
    written = {"docs/trust/benchmarks.md": _overview(known), "docs/internals/benchmarks.md": every}
    return written | {name: filled((root / name).read_text(encoding="utf-8"), known) for name in FILLED}


def filled(text: str, known: Mapping[str, Any]) -> str:
    """Returns a page whose marked tables hold the figures; one whose row is not measured keeps its text."""

    def fill(mark: re.Match[str]) -> str:
        table = TABLES[mark["name"]](known)
        return f"{mark['begin']}{table}{mark['end']}" if table else mark[0]

    return _MARKED.sub(fill, text)


_FIGURE = re.compile(r"\{(.*?)\}")
_MARKED = re.compile(
    r"(?P<begin><!-- bench: (?P<name>[\w-]+)[^>]*-->\n)(?P<table>.*?)(?P<end><!-- bench end -->)", re.DOTALL
)


def _readme(known: Mapping[str, Any]) -> str:
    """Returns README's table: sides, spreads, and where and when they were measured."""
    lines, used = [], {}
    for key, title in README.items():
        for name, figure in _figures(known, *key):
            ours, theirs = (cell(figure[side], figure["unit"]) for side in ("ours", "theirs"))
            lines.append(f"| {title} | {ours} | {theirs} |")
            used[name] = known[name]
    if not lines:
        return ""
    return f"| | Baton | script |\n|---|---|---|\n{chr(10).join(lines)}\n\n{_measured(used)}\n"


README = {
    ("boundary", "chunk boundary", "script"): "gap between two chunks, 77 M parameters",
    ("imports", "start to first step", "script"): "start of a process to its first step",
    ("goodput", "goodput, a kill every 30 s", "script"): "goodput with a `kill -9` every 30 s",
    ("goodput", "goodput, a kill every 60 s", "script"): "goodput with a `kill -9` every 60 s",
}


def _row_table(name: str, known: Mapping[str, Any]) -> str:
    """Returns all figures of a row."""
    if name not in known:
        return ""
    lines = "\n".join(_line(figure) for figure in known[name]["figures"])
    return f"{TABLE_HEAD}{lines}\n\n{_measured({name: known[name]})}\n"


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "main": _readme,
    **{name: partial(_row_table, name) for name in ("virtual", "searches", "sweep")},
}
FILLED = ("README.md", "docs/internals/multi-gpu.md", "docs/guides/sweeps-and-forks.md")
TABLE_HEAD = "| | Baton | compared with | ratio | goal | met |\n|---|---|---|---|---|---|\n"


def _figures(known: Mapping[str, Any], name: str, what: str, other: str) -> list[tuple[str, Mapping[str, Any]]]:
    figures = known[name]["figures"] if name in known else ()
    return [(name, figure) for figure in figures if (figure["what"], figure["other"]) == (what, other)]


def _measured(used: Mapping[str, Any]) -> str:
    """Returns sentences on processor, commits and load of some rows, and names those that today's rules refuse."""
    if not used:
        return "No figure is published yet."
    commits = dict.fromkeys(f"`{row['about']['commit']}`" for row in used.values())
    loads = [row["about"]["machine"]["load"][0] for row in used.values()]
    about = next(iter(used.values()))["about"]
    least, greatest = (f"{value:.1f}" for value in (min(loads), max(loads)))
    load = least if least == greatest else f"{least} to {greatest}"
    open_rows = [name for name, row in used.items() if refusals(row["about"], row)]
    against = f" Due for a new measurement: {', '.join(open_rows)}." if open_rows else ""
    text = (
        f"Medians, with least and greatest. {about['machine']['processor']}, {about['machine']['cores']} cores. Commit "
        f"{', '.join(commits)}. Load before the start: {load}.{against}"
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _missing(known: Mapping[str, Any]) -> str:
    missing = [f"- {name}: {entry.title}" for name, entry in rows.ALL.items() if name not in known]
    return "\n## Not measured yet\n\n" + "\n".join(missing) + "\n" if missing else ""


def _overview(known: Mapping[str, Any]) -> str:
    lines, used = [], {}
    for key, title in MAIN.items():
        for name, figure in _figures(known, *key):
            lines.append(_line({**figure, "what": f"[{title}](../internals/benchmarks.md#{name})"}))
            used[name] = known[name]
    kills = "![Goodput under kill -9](../pictures/bench-goodput-kills.svg)\n\n" if "goodput" in known else ""
    return f"""# Benchmarks

<!-- Written by `make docs` from docs/internals/benchmarks.json. -->

Baton against training without it: same model, tokens, steps and store. The script is a tuned TRL script. Its tokens
are cached, a thread uploads its checkpoints, and Young and Daly's rule sets their interval. An S3 server runs on the
same cores. Preparing data counts on neither side, except for tokenizing.

{_measured(used)}

{TABLE_HEAD}{chr(10).join(lines)}

{kills}Goodput: useful steps, relative to an undisturbed run. Missed goals stay in the table. These two cores train and
serve; a GPU host has free cores for uploads.

{_missed_goals(known)}{_lowered_goals(known)}\
On Kubeflow, Argo adds time between two chunks: 12 to 20 s with stock settings, 7 to 9 s with
`DEFAULT_REQUEUE_TIME=1s`. Measured on Kubeflow Pipelines 2.17.0 with Argo Workflows 4.0.5. The table has
none of it.

[All figures](../internals/benchmarks.md), with conditions, versions and commits. Measure again:
`make bench ARGS="--only boundary"`. `--publish` refuses local changes, a loaded machine and fewer than five rounds.
"""


def _missed_goals(known: Mapping[str, Any]) -> str:
    def value(mark: re.Match[str]) -> str:
        what, other, side = mark[1].split("|")
        ((_, figure),) = _figures(known, name, what, other)
        return cell(figure["median_min_max"][side][:1], figure["unit"])

    lines = []
    for name, reasons in MISSES.items():
        missed = {figure["what"] for figure in known.get(name, {}).get("figures", ()) if figure["met"] is False}
        for what in (what for what in reasons if what in missed):
            line = f"- [{name}: {what}](../internals/benchmarks.md#{name}): {_FIGURE.sub(value, reasons[what])}"
            lines += textwrap.wrap(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "Missed goals:\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def _lowered_goals(known: Mapping[str, Any]) -> str:
    lines = [
        f"- {figure['what']}: the goal was {figure['was']:g}; it is {figure['goal'].partition(' (was')[0]}. Measured: "
        f"{cell(figure['ratio'] or figure['ours'], figure['ratio_unit'] if figure['ratio'] else figure['unit'])}."
        for row in known.values()
        for figure in row["figures"]
        if figure.get("was") is not None
    ]
    return "Lowered goals:\n\n" + "\n".join(lines) + "\n\n" if lines else ""


def _section(name: str, row: Mapping[str, Any]) -> str:
    about, machine = row["about"], row["about"]["machine"]
    figures = "\n".join(_line(figure) for figure in row["figures"])
    charts = "".join(
        f"\n![{chart['title']}](../pictures/bench-{name}-{end}.svg)\n" for end, chart in sorted(row["charts"].items())
    )
    notes = "".join(f"- {note}\n" for note in row["notes"])
    versions = ", ".join(f"{library} {version}" for library, version in about["versions"].items())
    sides = row["preparation"]
    preparation = "" if sides == "no other side" else f" Preparing data counts on {sides}."
    reasons = refusals(about, row)
    against = f"\n**Due for a new measurement**: {'; '.join(reasons)}.\n" if reasons else ""
    others = f", others used {row['others']:.2f} cores" if "others" in row else ""
    return (
        f"\n## {name}\n\n{_sentence(row['title'])} {_sentence(row['conditions'])}{preparation}\n{against}{charts}\n"
        f"{TABLE_HEAD}{figures}\n\n{notes}\n"
        f"<sub>{about['created'][:10]}, commit {about['commit']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB, load {machine['load'][0]:.1f} before the start{others}; "
        f'S3: {about["server"]}; {versions}; `make bench ARGS="--only {name}"`, {row["seconds"] / 60:.0f} min.</sub>\n'
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _line(figure: Mapping[str, Any]) -> str:
    theirs = f"{figure['other']} {cell(figure['theirs'], figure['unit'])}" if figure["theirs"] else ""
    met = {True: "yes", False: "**no**", None: "–" if figure["goal"] else ""}[figure["met"]]
    ratio = cell(figure["ratio"], figure["ratio_unit"])
    cells = (figure["what"], cell(figure["ours"], figure["unit"]), theirs, ratio, figure["goal"], met)
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |"


def _plot(chart: Mapping[str, Any]) -> Drawing:
    """Draws bars from the left, their parts one after the other, or lines."""
    if chart["lines"]:
        return _lines(chart)
    bars: Mapping[str, Mapping[str, float]] = chart["bars"]
    figure, (ax,) = pictures.blank_figure(90 + 46 * len(bars))
    parts = list(dict.fromkeys(part for found in bars.values() for part in found))
    left = dict.fromkeys(bars, 0.0)
    for part, color in zip(parts, _colors(len(parts)), strict=True):
        lengths = [bars[name].get(part, 0.0) for name in bars]
        ax.barh(list(bars), lengths, left=list(left.values()), color=color, height=0.6, label=part)
        left = {name: left[name] + length for name, length in zip(bars, lengths, strict=True)}
    for name, length in left.items():
        if len(bars[name]) == 1:  # medians of parts do not add up to the median of totals, which the table has
            ax.annotate(f" {length:.3g}", (length, name), va="center", color=pictures.INK)
    ax.grid(visible=False)
    ax.grid(axis="x")
    ax.invert_yaxis()
    ax.set_xlim(0, 1.08 * max(left.values()))
    ax.set_xlabel(chart["unit"])
    if len(parts) > 1:
        ax.legend(ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.0, columnspacing=1.2)
    return figure


def _lines(chart: Mapping[str, Any]) -> Drawing:
    figure, (ax,) = pictures.blank_figure(300)
    for (name, points), color in zip(chart["lines"].items(), _colors(len(chart["lines"])), strict=True):
        ax.plot(*zip(*points, strict=True), color=color, lw=1.6, marker="o", label=name)
    ax.set_ylim(0)
    ax.set_xlabel(chart["across"])
    ax.set_ylabel(chart["unit"])
    ax.xaxis.set_major_formatter(FuncFormatter(pictures.compact))
    ax.legend()
    return figure


def _colors(number: int) -> Sequence[str]:
    return [COLORS[place % len(COLORS)] for place in range(number)]


def commit(root: Path = ROOT) -> str:
    """Returns the commit that is measured, with a word where the code differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--", ".", *(f":!{path}" for path in OUTPUTS)).strip()
    return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if changed else "")


if __name__ == "__main__":
    write(json.loads((ROOT / FIGURES).read_text(encoding="utf-8")))
