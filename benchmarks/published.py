"""Benchmarks in the docs: a short page of main figures, and a long one of all of them.

Figures are kept in `docs/internals/benchmarks.json`, so that rows can be measured one at a time.

python -m benchmarks.published   # writes both pages again from those figures
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter

from benchmarks import rows
from benchmarks.table import cell
from tests.support import pictures
from tests.support.pictures import picture

DOCS = Path(__file__).parents[1] / "docs"
FIGURES = "internals/benchmarks.json"
COLORS = [pictures.COLORS[name] for name in ("blue", "orange", "green", "purple", "amber", "sky", "grey", "ink")]
LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "obstore")

HEAD = """# Benchmarks, all figures

<!-- Written by `make bench ARGS="--publish"`. -->

Baton against a plain TRL script that does the same, or against the limit of machine and server. Both sides run in turn.
Cells hold the median of all rounds, with least and greatest. [Benchmarks](../trust/benchmarks.md) has the main figures.

"""
SIDES = ("ours", "theirs", "ratio")
MAIN = {  # row and figure → its name on the short page
    ("boundary", "chunk boundary", "script"): "gap between two chunks",
    ("imports", "start to first step", "script"): "start of a process to its first step",
    ("restore", "the same, as a chunk waits for it", "script"): "wait for a checkpoint of 925 MB",
    ("restart", "from its end to the next one's first step", "fresh"): "lost process to the next one's first step",
    ("goodput", "goodput, a kill every 30 s", "script"): "goodput, a kill every 30 s",
    ("goodput", "goodput, a kill every 60 s", "script"): "goodput, a kill every 60 s",
    ("save-stall", "stall per checkpoint", "script"): "stall per checkpoint of 925 MB",
    ("save-stall", "extra time per step", "script"): "extra time per step, a checkpoint every 8 steps",
    ("memory", "the same", "script"): "peak host memory",
    ("tokenize", "speed", "SFTTrainer"): "speed of tokenizing",
}


def publish(document: Mapping[str, Any], folder: Path = DOCS) -> None:
    """Replaces rows of earlier benchmarks, and writes pages and charts.

    Args:
        document: JSON of `python -m benchmarks`.
        folder: The folder of the docs.
    """
    path = folder / FIGURES
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    about = {key: document[key] for key in ("created", "machine", "server")}
    about["versions"] = {name: document["versions"][name] for name in LIBRARIES if name in document["versions"]}
    about["commit"] = _commit()
    known |= {name: {"about": about, **row} for name, row in document["rows"].items()}
    known = {name: known[name] for name in rows.ALL if name in known}
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write(known, folder)


def write(known: Mapping[str, Any], folder: Path = DOCS) -> None:
    """Writes pages and charts of figures."""
    for name, text in pages(known).items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, row in known.items():
        for end, chart in row["charts"].items():
            drawn = picture(f"{name}-{end}", chart["title"], partial(_plot, chart))
            (folder / "pictures" / f"bench-{name}-{end}.svg").write_text(drawn, encoding="utf-8")


def pages(known: Mapping[str, Any]) -> dict[str, str]:
    """Returns both pages in Markdown, by path below the docs."""
    contents = "\n".join(f"- [{row['title']}](#{name})" for name, row in known.items())
    every = f"{HEAD}{contents}\n" + "".join(_section(name, row) for name, row in known.items())
    return {"trust/benchmarks.md": _overview(known), "internals/benchmarks.md": every}


def _overview(known: Mapping[str, Any]) -> str:
    lines = []
    for (name, what, other), title in MAIN.items():
        for figure in known[name]["figures"] if name in known else ():
            if (figure["what"], figure["other"]) == (what, other):
                sides = {side: [statistics.median(figure[side])] if figure[side] else [] for side in SIDES}
                lines.append(_line({**figure, **sides, "what": f"[{title}](../internals/benchmarks.md#{name})"}))
    machine = next(iter(known.values()))["about"]["machine"]
    kills = "![Goodput under kill -9](../pictures/bench-goodput-kills.svg)\n\n" if "goodput" in known else ""
    return f"""# Benchmarks

<!-- Written by `make bench ARGS="--publish"`. -->

Baton against a plain TRL script that does the same: same model, rows, steps and store. Measured in turn on
{machine["processor"]}, {machine["cores"]} cores, with an S3 server on the same cores. Medians of all rounds.

| | Baton | compared with | ratio | goal | met |
|---|---|---|---|---|---|
{chr(10).join(lines)}

{kills}Goodput: useful steps, relative to an undisturbed run. Missed goals stay in the table. These two cores train and
serve; a GPU host has free cores for uploads.

[All figures](../internals/benchmarks.md), with conditions, versions and commits. Measure again:
`make bench ARGS="--only boundary"`.
"""


def _section(name: str, row: Mapping[str, Any]) -> str:
    about, machine = row["about"], row["about"]["machine"]
    figures = "\n".join(_line(figure) for figure in row["figures"])
    pictures = "".join(
        f"\n![{chart['title']}](../pictures/bench-{name}-{end}.svg)\n" for end, chart in sorted(row["charts"].items())
    )
    void = [figure["void"] for figure in row["figures"] if figure["void"]]
    notes = "".join(f"- {note}\n" for note in [*row["notes"], *void])
    versions = ", ".join(f"{library} {version}" for library, version in about["versions"].items())
    return (
        f"\n## {name}\n\n{_sentence(row['title'])} {_sentence(row['conditions'])}\n{pictures}\n"
        f"| | Baton | compared with | ratio | goal | met |\n|---|---|---|---|---|---|\n{figures}\n\n{notes}\n"
        f"<sub>{about['created'][:10]}, commit {about['commit']}, {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory'] / 2**30:.0f} GiB; S3: {about['server']}; {versions}; "
        f'`make bench ARGS="--only {name}"`, {row["seconds"] / 60:.0f} min.</sub>\n'
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


def _commit() -> str:
    """Returns the commit that is measured, with a word where the code differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=DOCS.parent, capture_output=True, text=True, check=True).stdout

    measured = ("baton", "components", "pipelines", "benchmarks", "tests", "requirements.lock")
    changed = git("status", "--porcelain", "--", *measured).strip()
    return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if changed else "")


if __name__ == "__main__":
    write(json.loads((DOCS / FIGURES).read_text(encoding="utf-8")))
