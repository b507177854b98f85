"""The baton: the one value that goes from stage to stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Baton:
    """What a stage is given: its run, and what Kubeflow's cache has to tell apart. As text `URI#MADE.LOSSES`.

    It holds no checkpoint, time or id of Kubeflow's: those would be others on each submission, and stages that could be
    taken from the cache would run again. What a stage needs besides, it asks the store for.
    """

    run_uri: str
    """Address of the run."""
    made: str = ""
    """When the run was created: one of the same name that was deleted and begun anew is another one."""
    losses: int = 0
    """How often something was gone that a finished stage had left, see `data_split.losses`."""

    def __str__(self) -> str:
        return f"{self.run_uri}#{self.made}.{self.losses}" if self.made else self.run_uri

    @classmethod
    def read(cls, text: str) -> Baton:
        """Returns a baton from its text; the address of a run alone is one, too."""
        uri, mark, rest = text.rpartition("#")
        made, _, losses = rest.rpartition(".")
        return cls(uri, made, int(losses)) if mark and losses.isdigit() else cls(text)
