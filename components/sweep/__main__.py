"""A sweep's stages as processes, for a machine where the trials take turns.

`python -m baton.components.sweep begin RECIPE.json NAME STORE BRACKET`, `… enter SWEEP_URI BRACKET`,
`… judge SWEEP_URI RUNG`, `… page SWEEP_URI RUNG`
"""

import argparse
from pathlib import Path

from baton.components.shared.core import events
from baton.components.shared.sweeps.sweep import Sweep

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
            from baton.components.sweep.judge import judge

            verdict = judge(Sweep.open(given.sweep_uri), given.rung)
            events.emit(events.Verdict(kept=verdict.kept, winner=verdict.winner))
    elif given.stage == "page":
        with events.stage(f"page of rung {given.rung}"):
            from baton.components.sweep.judge import publish

            publish(Sweep.open(given.sweep_uri), given.rung)
    elif given.stage == "enter":
        with events.stage(f"enter bracket {given.bracket}"):
            from baton.components.sweep.begin import enter

            events.emit(events.Entered(runs=enter(Sweep.open(given.sweep_uri), given.bracket)))
    else:
        with events.stage(f"begin bracket {given.bracket}"):
            from baton.components.shared.recipe import parameters, recipe_file
            from baton.components.sweep.begin import begin

            recipe = recipe_file.loads(given.recipe.read_text(encoding="utf-8"))
            recipe = parameters.changed(recipe, parameters.of(store=given.store), {})
            events.emit(events.Prepares(preparations=begin(recipe, given.name, given.bracket)[1]))
