"""A stage as a process of its own, without Kubeflow: `python -m baton.kfp.process STAGE ARGUMENT…`.

Stages of a run on this machine start so (`baton.kfp.processes`), chunks on the nodes of a train job, and benchmarks.
A further stage is a function here and a row of `STAGES`. Functions import lazily: a process loads its own stage alone.
"""

import sys

from baton.train import readahead

if __name__ == "__main__":  # before anything else is imported
    readahead.start(*sys.argv[1:2])

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from baton import events, machine
from baton.recipe import load
from baton.runs.documents import RunInfo
from baton.runs.outcomes import Winner
from baton.runs.run import Run, Sweep
from baton.scratch import scratch_folder


def data_split(recipe: Path, run_name: str) -> None:
    from baton.data.split import split_data

    split_data(load.loads(recipe.read_text(encoding="utf-8")), run_name)


def tokenize(run_uri: str) -> None:
    from baton.data.tokenize import tokenize_run

    tokenize_run(run_uri)


def train_chunk(run_uri: str, index: int, leave_out: list[str]) -> None:
    from baton.train.chunk import run_chunk

    run_chunk(run_uri, index, tuple(leave_out))


def take_turns(first: int, last: int, runs: list[str], rung: int, device: str) -> None:
    from baton.train.turns import Device, take_turns

    take_turns(runs, first, last, device=Device(rung, device) if device else None)


def checkpoint(run_uri: str, index: int) -> None:
    from baton.checkpoint.proof import promote

    promote(Run.open(run_uri), index)


def check_turns(index: int, runs: list[str]) -> None:
    for uri in runs:
        checkpoint(uri, index)


def pages(runs: list[str]) -> None:
    from baton.pages.publish import write_progress

    for uri in runs:
        write_progress(uri)


def evaluate(run_uri: str) -> None:
    from baton.evaluate.evaluate import evaluate_run

    evaluate_run(run_uri)


def begin(recipe: Path, name: str, store: str, bracket: int) -> None:
    from baton.recipe import parameters
    from baton.sweep.trials import start_bracket

    given = parameters.given_parameters(store=store)
    chosen = parameters.apply_parameters(load.loads(recipe.read_text(encoding="utf-8")), given, {})
    events.emit(events.Prepares(preparations=start_bracket(chosen, name, bracket)[1]))


def enter(sweep_uri: str, bracket: int) -> None:
    from baton.sweep.trials import create_trials

    events.emit(events.Entered(runs=create_trials(Sweep.open(sweep_uri), bracket)))


def judge(sweep_uri: str, rung: int) -> None:
    from baton.sweep.trials import rank_trials

    verdict = rank_trials(Sweep.open(sweep_uri), rung)
    events.emit(events.Verdict(kept=verdict.kept, winner=verdict.winner))


def page(sweep_uri: str, rung: int) -> None:
    from baton.pages.publish import write_progress
    from baton.sweep.page import publish

    sweep = Sweep.open(sweep_uri)
    if verdict := sweep.rung(rung):
        later = [entry for entry in sweep.document().rungs if entry.bracket == verdict.bracket and entry.rung > rung]
        winner = sweep.read(Winner)
        continues = set(verdict.kept) if later else {winner.id if winner else ""}
        for trial in (*verdict.kept, *(stopped.id for stopped in verdict.stopped)):
            run = sweep.run(sweep.trial(trial))
            if run.read(RunInfo):
                write_progress(run.uri, is_stopped=trial not in continues)
    publish(sweep, rung)  # last: it links the pages that are there


def first_rows(recipe: Path, count: int, side: str, target: Path) -> None:
    from baton.data.ingest import first_rows

    chosen = load.loads(recipe.read_text(encoding="utf-8"))
    with scratch_folder("head") as scratch, target.open("w", encoding="ascii") as file:
        file.writelines(json.dumps(row) + "\n" for row in first_rows(chosen, count, side or None, scratch))


def preview(recipe: Path, count: int, side: str, target: Path) -> None:
    from baton.data.ingest import preview

    with scratch_folder("head") as scratch:
        seen = preview(load.loads(recipe.read_text(encoding="utf-8")), count, side or None, scratch)
    target.write_text(json.dumps(seen.model_dump(mode="json")), encoding="ascii")  # a text may be half of a character


def survey(sources: Path, target: Path) -> None:
    from baton.data.ingest import survey

    found = survey(json.loads(sources.read_text(encoding="utf-8")))
    target.write_text(json.dumps(found.model_dump(mode="json")), encoding="ascii")


STAGES: dict[Callable[..., None], str] = {  # its parameters are the arguments → name in events
    data_split: "data split",
    tokenize: "tokenize",
    first_rows: "data split",
    preview: "preview",
    survey: "data split",
    train_chunk: "train chunk {index}",
    take_turns: "train chunks {first} to {last}",
    checkpoint: "checkpoint {index}",
    check_turns: "checkpoints {index}",
    pages: "pages of trials",
    evaluate: "evaluate",
    begin: "begin bracket {bracket}",
    enter: "enter bracket {bracket}",
    judge: "judge rung {rung}",
    page: "page of rung {rung}",
}


def main() -> None:
    machine.end_with_parent()
    parser = argparse.ArgumentParser(description="Run a stage.")
    stages = parser.add_subparsers(dest="stage", required=True)
    for function in STAGES:
        arguments = stages.add_parser(function.__name__)
        for name, kind in function.__annotations__.items():
            if name in ("rung", "device") and function is take_turns:
                arguments.add_argument(f"--{name}", type=kind, default=kind(), help="tells devices of a rung apart")
            elif kind in (str, int, Path):
                arguments.add_argument(name, type=kind)
            elif name == "runs":
                arguments.add_argument(name, nargs="+")
    stages.choices["train_chunk"].add_argument(
        "--leave-out", action="append", default=[], choices=["rng", "hooks"], help="what not to restore (a test)"
    )
    given = vars(parser.parse_args())
    stage = given.pop("stage")
    function = globals()[stage]
    with events.stage(STAGES[function].format_map(given)):
        function(**given)


if __name__ == "__main__":
    main()
