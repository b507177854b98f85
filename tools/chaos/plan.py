"""What happens to which attempt: drawn from a seed and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from tests.exactness import matrix
from tests.exactness.matrix import Cell

UPLOADS = ("PUT", "POST")
FILE = r"/step-\d+/[0-9a-f]{12}/"
EXPORTED = r"/exports?/(\w+/)?[0-9a-f]{12}/"

CELLS = (
    Cell("sft", "lora", "dropout", matrix.adapter(dropout=0.3)),
    Cell("dpo", "lora", "plain"),
    Cell("grpo", "full", "three iterations", matrix.training(grpo={**matrix.WRITES, "num_iterations": 3})),
    Cell("sft", "full", "accumulation", matrix.training(micro_batch_size=2)),
    Cell("pretrain", "full", "attention dropout", {"model": matrix.SCRATCH}),
    Cell("kto", "lora", "plain"),
    Cell("sft", "full", "workers", matrix.training(workers=2)),
    Cell("reward", "full", "plain"),
    Cell("distillation", "full", "kept completions", matrix.training(micro_batch_size=2)),
    Cell("orpo", "freeze", "last layer", matrix.training(trainable={"last_layers": 1, "patterns": ["norm"]})),
)
"""What runs are made of, one after the other and again."""


@dataclass(frozen=True)
class Moment:
    """Between two things that a stage does: a request to the store, or a phase that it tells.

    Attributes:
        name: What the page calls it.
        methods: Of the request.
        pattern: Of its path.
        of: `request`: held before the store hears of it; `half`: after some of its body; `answer`: done, and not told.
        phase: The phase, in place of a request.
        once: Whether it comes once in a stage.
    """

    name: str
    methods: tuple[str, ...] = UPLOADS
    pattern: str = ""
    of: str = "request"
    phase: str = ""
    once: bool = False


MOMENTS: dict[str, tuple[Moment, ...]] = {
    "train_chunk": (
        Moment("a checkpoint's file half up", pattern=FILE, of="half"),
        Moment("a checkpoint's file up, not told", pattern=FILE, of="answer"),
        Moment("all files up, no manifest", pattern=r"/step-\d+/manifest"),
        Moment("manifest put, not told", pattern=r"/step-\d+/manifest", of="answer"),
        Moment("between manifest and prune", pattern=r"/step-\d+/removed-"),
        Moment("marked, manifest not gone", ("DELETE",), r"/step-\d+/manifest"),
        Moment("manifest gone, files not", ("DELETE",), FILE),
        Moment("a checkpoint half read", ("GET",), FILE, "answer"),
        *(Moment(f"phase {phase}", phase=phase, once=True) for phase in ("restore", "first-step")),
        *(Moment(f"phase {phase}", phase=phase) for phase in ("training", "snapshot")),
    ),
    "checkpoint": (
        Moment("read back, not promoted", pattern="/promoted.json", once=True),
        Moment("promoted, not told", pattern="/promoted.json", of="answer", once=True),
        Moment("the proof half up", pattern="/proof/", of="half", once=True),
        Moment("between manifest and prune", pattern=r"/step-\d+/removed-"),
        Moment("manifest gone, files not", ("DELETE",), FILE),
    ),
    "evaluate": (
        Moment("the model half read", ("GET",), FILE, "answer"),
        Moment("examples half up", pattern="/examples.jsonl", of="half", once=True),
        Moment("examples up, figures not", pattern="/evaluation.json", once=True),
        Moment("figures up, not told", pattern="/evaluation.json", of="answer", once=True),
    ),
    "export": (
        Moment("the model half read", ("GET",), FILE, "answer"),
        Moment("an export's file half up", pattern=EXPORTED, of="half"),
        Moment("an export's files up, no manifest", pattern=r"/exports?/(\w+/)?manifest"),
        Moment("an export's manifest put, not told", pattern=r"/exports?/(\w+/)?manifest", of="answer"),
        Moment("exported, not noted", pattern="/export.json", once=True),
    ),
}
WEATHER = ("cut", "stalled", "503", "500", "reset", "answers lost", "short answers")
"""How the store is away."""
FULL = ("memory", "disk", "memory and disk", "node cache")
"""What is full."""
KILLS = {"train_chunk": (3, 7), "checkpoint": (2, 4), "evaluate": (3, 6), "export": (3, 7)}
"""How often a stage of a run is killed: at least and at most."""


@dataclass(frozen=True)
class Plan:
    """What happens to one attempt at a stage.

    Attributes:
        kill: Whether it is killed.
        moment: Where, None for a time.
        share: When: of the time that the stage takes undisturbed, or of what `skip` lets by.
        skip: Requests or phases of that moment to let by first.
        weather: How the store is away for a while, empty where it is not.
        weather_at: When that begins, as a share of the stage's time.
        weather_s: Seconds it lasts.
        full: What is full, empty for nothing.
        full_at: When it fills up, as a share of the stage's time; 0 is before the stage.
    """

    kill: bool = False
    moment: Moment | None = None
    share: float = 0.0
    skip: int = 0
    weather: str = ""
    weather_at: float = 0.0
    weather_s: float = 0.0
    full: str = ""
    full_at: float = 0.0


def kills_of(seed: int, run: int, stage: str, index: int) -> int:
    """Returns how often a stage is to be killed."""
    return Random(f"{seed}-{run}-{stage}-{index}").randint(*KILLS[stage])


def attempt(seed: int, run: int, stage: str, index: int, number: int, *, kill: bool) -> Plan:
    """Returns what happens to an attempt.

    Args:
        seed: Decides all.
        run: Number of the run.
        stage: The stage.
        index: Its chunk.
        number: Of the attempt at it.
        kill: Whether it may still be killed.
    """
    drawn = Random(f"{seed}-{run}-{stage}-{index}-{number}")
    moment = drawn.choice(MOMENTS[stage]) if drawn.random() < 0.5 else None
    share, skip = drawn.random(), drawn.choice((0, 0, 1, 2))
    plan: dict[str, Any] = {
        "kill": kill,
        "moment": moment,
        "share": share,
        "skip": skip if moment and not moment.once else 0,
    }
    kind, at, seconds = drawn.choice(WEATHER), drawn.random(), drawn.uniform(0.3, 3.0)
    if drawn.random() < 0.25:
        plan |= {"weather": kind, "weather_at": at, "weather_s": seconds}
    what, full_at = drawn.choice(FULL), drawn.choice((0.0, drawn.random()))
    if drawn.random() < 0.2:
        plan |= {"full": what, "full_at": full_at}
    return Plan(**plan)
