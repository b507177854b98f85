"""Spot or on-demand capacity for a run with a deadline: the policy of `resources.capacity: spot-first`.

After Uniform Progress of Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024. There
a job may change its machine at any moment; a chunk on demand stays there until its end.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

from baton.recipe.recipe import Recipe
from baton.runs.documents import NodeChoice, Progress
from baton.runs.plan import Plan
from baton.runs.run import Run
from baton.runs.spending import reserve, save_interval

SPOT, ON_DEMAND = "spot", "on-demand"
NODES = "BATON_NODES"  # environment variable: labels of this pod's nodes as JSON, where a chunk was told
MACHINE_S = 180.0  # until a machine that was asked for has booted and has the image


@dataclass(frozen=True)
class Course:
    """Work and time of a run, in seconds; moments count from the start of its first chunk."""

    work: float  # of all steps, on one machine without a change
    time: float  # until its last step has to end
    change: float  # of a change to another machine: start, restore, and steps trained again

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, note: Progress) -> Course | None:
        """Returns the course of a run by its newest note; None before its first step, or without `budget.by`."""
        step_s = note.seconds_per_step
        if not (recipe.budget and recipe.budget.ends_at and step_s and note.started):
            return None
        ends_at = recipe.budget.ends_at - reserve(recipe, plan, note.start_seconds, step_s)
        unsaved = save_interval(recipe, plan, step_s) / 2  # lost at a random moment
        change = MACHINE_S + note.start_seconds + unsaved
        return cls(plan.num_steps * step_s, ends_at - note.started, change)

    def spot_until(self, done: float) -> float:
        """Returns the moment until which a run without a machine may wait for spot capacity.

        Until then it is not behind uniform progress, and two changes of machine still leave time for the rest.

        Args:
            done: Work that a checkpoint holds, in seconds.
        """
        return min(done * self.time / self.work, self._latest(done, changes=2))

    def after_chunk(self, machine: str | None, done: float, now: float) -> str:
        """Returns the capacity for the next chunk.

        Args:
            machine: Capacity of the machine that there is; None where it was lost.
            done: Work that a checkpoint holds, in seconds.
            now: This moment.
        """
        if machine == SPOT:  # kept while there is time for the rest after a change to another
            until = self._latest(done, changes=1)
        elif machine == ON_DEMAND:  # given up only so far ahead that a wait pays for the two changes
            until = self.spot_until(done) - 2 * self.change
        else:
            until = self.spot_until(done)
        return SPOT if now <= until else ON_DEMAND

    def _latest(self, done: float, changes: int) -> float:
        return self.time - (self.work - done) - changes * self.change


def capacity_of(recipe: Recipe, nodes: dict[str, str]) -> str:
    """Returns the capacity of nodes by their labels."""
    return SPOT if nodes == recipe.resources.nodes_of(SPOT) else ON_DEMAND


def capacity_here(recipe: Recipe) -> str | None:
    """Returns the capacity of this pod's node, None where it is not known."""
    told = os.environ.get(NODES)
    return capacity_of(recipe, json.loads(told)) if told else recipe.resources.capacity


def next_nodes(run: Run, plan: Plan, index: int, step: int, nodes: dict[str, str], *, is_lost: bool) -> dict[str, str]:
    """Returns the node labels for the next train-chunk of a run with `capacity: spot-first`, and notes them.

    Args:
        run: The run.
        plan: The run's.
        index: Number of the chunk that has ended.
        step: Newest step.
        nodes: Labels of the nodes of that chunk.
        is_lost: Whether its machine is preempted.
    """
    recipe, note = run.recipe(), run.read(Progress) or Progress(step=0)
    course, resources = Course.of(recipe, plan, note), recipe.resources
    if course:
        machine = None if is_lost else capacity_of(recipe, nodes)
        done, now = step * note.seconds_per_step, time.time() - note.started
        nodes = resources.nodes_of(course.after_chunk(machine, done, now))
    run.write(NodeChoice(chunk=index + 1, nodes=nodes))
    return nodes
