"""Spent and predicted device time of a run with a budget."""

from baton.documents import Json
from baton.runs.documents import Progress, RunCost, RunInfo
from baton.runs.plan import Plan
from baton.runs.run import Run


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
    # A note of steps that were withdrawn, or lost, is ahead of the step.
    rest = max(last_step - step, 0) * note.seconds_per_step * recipe.devices
    told: Json = {
        "limit": budget.limit,
        "by": budget.by,
        "device_seconds": round(spent, 1),
        "spent": budget.cost(spent),
        "predicted_device_seconds": round(spent + rest, 1),
        "predicted": budget.cost(spent + rest),
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
