"""What a train chunk tells."""

from __future__ import annotations

from typing import ClassVar

from baton.components.shared.core.events.event import Event


class Phase(Event, kind="phase"):
    """A phase begins, one of `core.state.Phase`; of a checkpoint, with its step."""

    phase: str
    step: int | None = None
    chunk: int | None = None
    target: int | None = None
    processes: int | None = None
    rows: int | None = None


class Slice(Event, kind="slice"):
    """The files of training rows that a chunk needs are there."""

    files: int
    of: int
    bytes: int


class MicroBatch(Event, kind="micro_batch"):
    """The rows per forward pass that `auto` has come to, and the passes per step."""

    size: int
    accumulation: int
    found_by: str


class Step(Event, kind="step"):
    """A step, of so many, and its loss."""

    step: int
    of: int
    loss: float


class Staging(Event, kind="staging"):
    """Checkpoints are staged elsewhere than before."""

    place: str
    reason: str


class Superseded(Event, kind="superseded"):
    """A checkpoint made way for a newer one."""

    step: int


class StoreUnavailable(Event, kind="store_unavailable"):
    """A checkpoint cannot be saved for now; nothing has been for so many seconds."""

    step: int
    unsaved: float
    reason: str


class Checkpoint(Event, kind="checkpoint"):
    """A checkpoint is committed; how many seconds its upload and its commit took."""

    step: int
    uri: str
    digest: str
    bytes: int
    seconds: dict[str, float]


class Skipped(Event, kind="skipped"):
    """A checkpoint is damaged and not used."""

    step: int
    reason: str


class Consistent(Event, kind="consistent"):
    """This machine differs from the checkpoint's, so bits may differ."""

    changed: list[str]


class NotCarried(Event, kind="not_carried"):
    """State of the user's code is not in a checkpoint, so that a chunk after it resumes without: place → why."""

    step: int
    lost: dict[str, str]

    REMEDY: ClassVar[str] = (
        "Give its class state_dict and load_state_dict, or set `stateless = True` on it where training does not depend "
        "on it."
    )

    @property
    def text(self) -> str:
        """The event in words."""
        places = "; ".join(f"state of `{name}` is not carried: {why}" for name, why in self.lost.items())
        return f"{places[:1].upper()}{places[1:]}. Chunks that resume from step {self.step} are only consistent."


class Restored(Event, kind="restored"):
    """The state in memory was compared with the checkpoint's: the parts that differ."""

    step: int
    wrong: list[str]


class Scored(Event, kind="scored"):
    """A trial's score; None for one that is not finite."""

    trial: str
    chunk: int
    step: int
    value: float | None


class AlreadyDone(Event, kind="already_done"):
    """A chunk's target is committed: there is nothing to train."""

    chunk: int
    step: int


class Restarted(Event, kind="restarted"):
    """A chunk's process was lost, and another one resumes from the newest checkpoint."""

    chunk: int
    attempt: int
    of: int
    reason: str


class StepSkipped(Event, kind="step_skipped"):
    """A step is taken back: the chunk resumes from the checkpoint before it, and skips it."""

    step: int
    chunk: int
    message: str
    rows: str


class Partial(Event, kind="partial"):
    """A chunk leaves before its target."""

    chunk: int
    step: int
    of: int
    notice: str


class Finished(Event, kind="finished"):
    """Evaluation has stopped improving: the run ends here."""

    chunk: int
    step: int


class Stopped(Event, kind="stopped"):
    """A chunk of a trial that was stopped trains nothing."""

    chunk: int
    step: int
