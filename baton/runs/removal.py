"""Removal of a run: its folder in the store, where no other run or sweep needs it. Data of several runs stays."""

from baton.errors import UserError
from baton.runs import lineage, objects
from baton.runs.outcomes import TrialInfo
from baton.runs.run import Run


def require_removable(run: Run, others: lineage.Family) -> None:
    """Refuses a run that is running, or that a sweep, another run or retraining needs.

    Args:
        run: A run that exists.
        others: Runs of its store that stay, and itself.
    """
    if run.storage.cannot_remove:
        raise run.storage.cannot_remove
    if run.name in others and others[run.name].state == "running":
        raise UserError(f"run {run.name!r} is running.", remedy=f"Stop it first: `baton stop {run.name}`.")
    if trial := run.read(TrialInfo):
        raise UserError(f"run {run.name!r} is trial {trial.id} of sweep {trial.sweep!r}, which needs it.")
    for member in others.values():
        if member.parent == run.name and member.kind == "continues":
            raise UserError(f"run {member.name!r} starts from the model of run {run.name!r}, and needs it.")
    for model in run.storage.list("models"):
        accepted = lineage.newest_accepted(run.storage, model).model
        if accepted and accepted.run == run.name:
            raise UserError(f"run {run.name!r} has the model in use of {model!r}, which retraining needs.")


def num_bytes(run: Run) -> int:
    """Returns the size of a run's folder."""
    return sum(found.size for found in run.storage.find(run.path()).values())


def remove(run: Run) -> None:
    """Removes a run's folder; after an interrupted removal the run has no checkpoints, and can be removed again."""

    def order(name: str) -> int:
        base = name.rpartition("/")[2]
        return 0 if base.startswith("manifest") else 2 if name in objects.HEADS else 1

    names = sorted(run.storage.find(run.path()), key=order)
    for name in names:
        run.storage.remove(run.path(name))
    folders = {run.path(name).rpartition("/")[0] for name in names}
    above = {"/".join(folder.split("/")[:depth]) for folder in folders for depth in range(2, folder.count("/") + 2)}
    for folder in sorted(above, reverse=True):
        run.storage.tidy(folder)
