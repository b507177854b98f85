"""Spent and predicted device time of a run with a budget."""

from baton.documents import Json
from baton.recipe.recipe import Recipe
from baton.runs.documents import Progress, RunCost, RunInfo
from baton.runs.plan import Plan
from baton.runs.run import Run

STARTS = 3  # of a process: for evaluation, for export, and for one that takes over from a lost one


def reserve(recipe: Recipe, plan: Plan, start_seconds: float, step_seconds: float) -> float:
    """Returns the seconds kept for evaluation and export of a run with a budget.

    Args:
        recipe: The run's.
        plan: The run's.
        start_seconds: Of a process, until its first step.
        step_seconds: Of a step.
    """
    assert recipe.budget
    if (given := recipe.budget.reserve_seconds) is not None:
        return given
    # The held-out rows in batches of a step, by the shares of the split.
    sizes = (recipe.data.split.eval, recipe.data.split.test)
    share, rows = sum(size for size in sizes if size < 1), sum(size for size in sizes if size >= 1)
    steps = plan.steps_per_epoch * share / (1 - share) + rows / recipe.training.batch_size
    return STARTS * start_seconds + steps * step_seconds


def save_interval(recipe: Recipe, plan: Plan, step_seconds: float) -> float:
    """Returns the seconds between checkpoints; with `continuous`, which depends on the store, a step."""
    chunks = recipe.chunks
    if chunks.checkpoint_every:
        return chunks.every_seconds or (chunks.every_steps or 1) * step_seconds
    if chunks.checkpoints_per_epoch:
        return plan.steps_per_epoch / chunks.checkpoints_per_epoch * step_seconds
    return plan.num_steps / recipe.num_chunks * step_seconds


def spending(run: Run, work: RunCost, step: int) -> Json | None:
    """Returns a run's budget, spent device time and predicted end; None without a budget.

    Args:
        run: The run.
        work: Of its newest checkpoint.
        step: Newest step.
    """
    info = run.read(RunInfo)
    if info is None or not info.recipe.get("budget"):
        return None
    recipe = run.recipe()
    assert recipe.budget
    budget, end, note = recipe.budget, run.end(info), run.read(Progress) or Progress(step=0)
    plan = run.read(Plan)
    last_step = end.last_step if end else plan.num_steps if plan else step
    spent = max(work.device_seconds, note.device_seconds)
    priced = max(work.priced_seconds, note.priced_seconds) or spent
    # A note of steps that were withdrawn, or lost, is ahead of the step.
    rest = max(last_step - step, 0) * note.seconds_per_step * recipe.devices
    told: Json = {
        "limit": budget.limit,
        "by": budget.by,
        "device_seconds": round(spent, 1),
        "spent": budget.cost(priced),
        "predicted_device_seconds": round(spent + rest, 1),
        "predicted": budget.cost(priced + rest * (priced / spent if spent else 1.0)),  # at the mean price so far
    }
    if end:
        told |= {"last_step": last_step, "stable_until": end.stable_until, "is_decayed": end.is_decayed}
        told["reason"] = end.reason
    return told


def in_words(told: Json) -> str:
    """Returns a run's spending as a sentence, without a full stop."""
    limits = [str(limit) for limit in (told["limit"], told["by"] and f"by {told['by']}") if limit]
    words = f"spent {told['spent']} of {', '.join(limits)}"
    if "last_step" not in told:
        return f"{words}; the whole plan would cost {told['predicted']}"
    decay = "after the decay" if told["is_decayed"] else "without a decay of the learning rate"
    return f"{words}; {told['reason']} ends the run at step {told['last_step']:,}, {decay}"
