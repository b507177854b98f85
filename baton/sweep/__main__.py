"""A sweep's stages as processes, for a machine where the trials take turns.

`python -m baton.sweep begin RECIPE.json NAME STORE BRACKET`, `… enter SWEEP_URI BRACKET`,
`… judge SWEEP_URI RUNG`, `… page SWEEP_URI RUNG`
"""

import argparse
from pathlib import Path

from baton import events
from baton.runs.sweep import Sweep

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Begin a bracket of a sweep, or judge one of its rungs.")
    stages = parser.add_subparsers(dest="stage", required=True)
    begins = stages.add_parser("begin")
    begins.add_argument("recipe", type=Path)
    begins.add_argument("name")
    begins.add_argument("store")
    for stage, number in (("enter", "bracket"), ("judge", "rung"), ("page", "rung")):
        stages.add_parser(stage).add_argument("sweep_uri")
        stages.choices[stage].add_argument(number, type=int)
    begins.add_argument("bracket", type=int)
    given = parser.parse_args()
    if given.stage == "judge":
        with events.stage(f"judge rung {given.rung}"):
            from baton.sweep.judge import rank_trials

            verdict = rank_trials(Sweep.open(given.sweep_uri), given.rung)
            events.emit(events.Verdict(kept=verdict.kept, winner=verdict.winner))
    elif given.stage == "page":
        with events.stage(f"page of rung {given.rung}"):
            from baton.sweep.judge import publish

            publish(Sweep.open(given.sweep_uri), given.rung)
    elif given.stage == "enter":
        with events.stage(f"enter bracket {given.bracket}"):
            from baton.sweep.trials import create_trials

            events.emit(events.Entered(runs=create_trials(Sweep.open(given.sweep_uri), given.bracket)))
    else:
        with events.stage(f"begin bracket {given.bracket}"):
            from baton.recipe import load, parameters
            from baton.sweep.trials import start_bracket

            recipe = load.loads(given.recipe.read_text(encoding="utf-8"))
            recipe = parameters.apply_parameters(recipe, parameters.given_parameters(store=given.store), {})
            events.emit(events.Prepares(preparations=start_bracket(recipe, given.name, given.bracket)[1]))
