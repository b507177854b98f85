"""The scenarios: who is at work at once, and what befalls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.recipe.run import Keep
from tools.schedules.actors import ONE, House
from tools.schedules.invariants import FROZEN
from tools.schedules.scheduler import Actor
from tools.schedules.store import NONE, Faults

Work = Callable[[House, Actor], object]
TWO = Keep(last=2, best=0)
NO_DEATH = ("refused", "lost")
HOURS = (7.0, 40.0, 4000.0)
"""Seconds by which a pause may last longer."""
PROMPT = Faults(0, jumps=(1.0, 12.0, 25.0), stops=0.15, prompt=True)
"""Processes that are stopped for long, over a network that is quick."""


@dataclass(frozen=True)
class Scenario:
    """Processes of a run, and what was there before them.

    Attributes:
        name: For the table.
        before: Steps that are committed.
        actors: What each does.
        conditional: Whether the store knows put-if-absent; else a lease takes its place.
        faults: What the store may do.
        skews: Seconds by which an actor's wall clock is ahead.
        keep: What retention keeps.
        copies: Whether checkpoints have a file that does not change.
        links: Whether a copy of it shares its bytes.
        strict, one_winner, rots: see `invariants.Truth`.
        target: Step that a fresh process brings the run to at the end.
        share: Of all schedules; where there are few orders, `test_schedules.py` goes through all of them.
    """

    name: str
    actors: dict[str, Work]
    before: tuple[int, ...] = ()
    conditional: bool = True
    faults: Faults = NONE
    skews: dict[str, float] = field(default_factory=dict)
    keep: Keep = ONE
    copies: bool = False
    links: bool = False
    strict: bool = False
    one_winner: bool = True
    rots: bool = False
    target: int = 20
    share: int = 10


def commit(step: int) -> Work:
    """An actor that commits a step."""
    return lambda house, actor: house.commit(actor, house.open(actor), step)


def train(target: int, index: int = 1, every: int = 10) -> Work:
    """A chunk."""
    return lambda house, actor: house.train(actor, target, every, index)


def stage(index: int) -> Work:
    """A checkpoint stage, some time after its chunk."""
    return lambda house, actor: house.stage(actor, index)


def chunk_and_stage(target: int, index: int) -> Work:
    """A chunk, and the checkpoint stage after it."""

    def work(house: House, actor: Actor) -> None:
        house.train(actor, target, 10, index)
        house.stage(actor, index)

    return work


def prune(house: House, actor: Actor) -> None:
    """An actor that applies retention."""
    house.prune(actor)


def restore(target: int) -> Work:
    """An actor that restores."""
    return lambda house, actor: house.restore(actor, house.open(actor), target)


def supersede(*steps: int) -> Work:
    """A chunk that does not wait for its checkpoints."""
    return lambda house, actor: house.supersede(actor, *steps)


def rot(step: int, *, cut: bool = False, name: str = "weights.bin") -> Work:
    """Bytes of a step that change."""
    return lambda house, actor: house.rot(actor, step, cut=cut, name=name)


def rot_and_train(*steps: int) -> Work:
    """All that is committed rots, and a process finds that and trains anew."""

    def work(house: House, actor: Actor) -> None:
        for step in sorted(house.truth.steps):
            house.rot(actor, step)
        house.train(actor, max(steps))

    return work


COPIES = [
    Scenario(
        "copies and removals",
        {"A": train(40, 2), "P": prune, "Q": prune},
        (10, 20),
        keep=TWO,
        copies=True,
        strict=True,
        target=60,
        share=4,
    ),
    Scenario(
        "a copy and the removal of its source",
        {"A": commit(30), "P": prune, "Q": prune},
        (10, 20),
        copies=True,
        strict=True,
        target=40,
        share=2,
    ),
    Scenario(
        "two writers copy the same",
        {"A": commit(30), "B": commit(30), "P": prune},
        (10, 20),
        keep=TWO,
        copies=True,
        links=True,
        faults=Faults(2),
        target=40,
        share=4,
    ),
    Scenario(
        "copies, a zombie, faults",
        {"A": train(40, 2), "Z": train(40, 2)},
        (10, 20),
        keep=TWO,
        copies=True,
        faults=Faults(3),
        target=60,
        share=6,
    ),
    Scenario(
        "copies of what changed after all",
        {"A": train(60, 3), "R": restore(60)},
        (10, 20),
        keep=TWO,
        copies=True,
        links=True,
        strict=True,
        target=60,
        share=2,
    ),
    Scenario(
        "links, kept with holes",
        {"A": train(60, 3), "P": prune},
        (20,),
        keep=Keep(last=1, best=0, every=20),
        copies=True,
        links=True,
        strict=True,
        target=80,
        share=2,
    ),
    Scenario(
        "links, damage of what they share",
        {"D": rot(10, name=FROZEN), "A": train(30, 2), "P": prune},
        (10, 20),
        keep=TWO,
        copies=True,
        links=True,
        rots=True,
        faults=Faults(1),
        target=30,
        share=6,
    ),
    Scenario(
        "copies of what is cut",
        {"D": rot(10, cut=True, name=FROZEN), "A": train(40, 2), "B": train(40, 2)},
        (10, 20),
        keep=TWO,
        copies=True,
        rots=True,
        target=40,
        share=4,
    ),
    Scenario(
        "links and long pauses",
        {"W": commit(30), "P": prune, "Q": prune},
        (10, 20, 40),
        keep=Keep(last=3, best=0),
        copies=True,
        links=True,
        faults=Faults(2, jumps=HOURS),
        target=60,
        share=4,
    ),
    Scenario(
        "lease, copies",
        {"A": commit(30), "B": commit(30), "P": prune},
        (10, 20),
        keep=TWO,
        copies=True,
        conditional=False,
        faults=Faults(2, jumps=HOURS[:2]),
        one_winner=False,
        target=40,
        share=4,
    ),
]
"""Of checkpoints with a file that does not change, which is copied from one of them."""


SCENARIOS = [
    Scenario("two writers", {"A": commit(10), "B": commit(10)}, strict=True, target=10, share=1),
    Scenario("four writers", {name: commit(10) for name in "ABCD"}, strict=True, target=10, share=8),
    Scenario("two writers, faults", {"A": commit(10), "B": commit(10)}, faults=Faults(2), target=10, share=2),
    Scenario(
        "two removals and a reader",
        {"P": prune, "Q": prune, "R": restore(40)},
        (10, 20, 30),
        strict=True,
        target=40,
        share=6,
    ),
    Scenario(
        "removals that die", {"P": prune, "Q": prune, "R": restore(30)}, (10, 20), faults=Faults(2), target=30, share=10
    ),
    Scenario("a zombie", {"A": train(20), "Z": train(20)}, strict=True, faults=Faults(1, ("died",)), share=8),
    Scenario("a zombie, faults", {"A": train(20), "Z": train(20)}, faults=Faults(3), share=8),
    Scenario(
        "a new pod beside a zombie", {"Z": train(40, 2), "R": restore(40)}, (10,), strict=True, target=40, share=4
    ),
    Scenario(
        "clocks and long pauses",
        {"W": commit(20), "P": prune, "Q": prune},
        (10, 30),
        faults=Faults(2, jumps=HOURS),
        skews={"P": 7200.0, "Q": -7200.0, "W": 7200.0},
        target=40,
        share=12,
    ),
    Scenario(
        "a commit and its removal",
        {"A": commit(10), "B": commit(10), "P": prune},
        (20,),
        faults=Faults(2, jumps=HOURS[:2]),
        share=4,
    ),
    Scenario(
        "commits and removals",
        {"A": commit(10), "B": commit(10), "C": commit(10), "P": prune, "Q": prune},
        (20,),
        faults=Faults(2),
        share=4,
    ),
    Scenario("stages at once", {"A": chunk_and_stage(20, 1), "B": chunk_and_stage(40, 2)}, (10,), target=40, share=2),
    Scenario(
        "damage and repair", {"D": rot(20), "A": train(20), "P": prune}, (10, 20), rots=True, faults=Faults(1), share=8
    ),
    Scenario(
        "damage, repair and long pauses",
        {"D": rot(20), "A": train(20), "P": prune},
        (10, 20),
        rots=True,
        faults=Faults(2, jumps=HOURS[:2]),
        share=6,
    ),
    Scenario("a cut file", {"D": rot(20, cut=True), "A": train(20), "B": train(20)}, (10, 20), rots=True, share=4),
    Scenario(
        "listings that lag",
        {"A": train(20), "B": train(20), "R": restore(20)},
        (10,),
        faults=Faults(1, NO_DEATH, lags=True),
        share=6,
    ),
    Scenario("a cut file and a removal", {"D": rot(20, cut=True), "P": prune}, (10, 20), rots=True, share=1),
    Scenario(
        "a newer one takes its place",
        {"A": supersede(10, 20, 30), "P": prune},
        faults=Faults(8, ("refused", "lost", "late"), likely=0.3),
        target=30,
        share=4,
    ),
    Scenario("lease", {"A": commit(10), "B": commit(10)}, conditional=False, faults=PROMPT, target=10, share=8),
    Scenario(
        "lease, three writers",
        {"A": commit(10), "B": commit(10), "C": commit(10)},
        conditional=False,
        faults=replace(PROMPT, most=1, kinds=("refused", "died")),
        target=10,
        share=8,
    ),
    Scenario(
        "lease, late puts",
        {"A": commit(10), "B": commit(10), "P": prune},
        (20,),
        conditional=False,
        faults=Faults(2, jumps=HOURS[:2]),
        one_winner=False,
        share=8,
    ),
    Scenario(
        "lease, a zombie",
        {"A": train(20), "Z": train(20)},
        conditional=False,
        faults=replace(PROMPT, most=1, kinds=("refused", "died")),
        share=6,
    ),
    Scenario(
        "lease, damage and repair",
        {"D": rot(20), "A": train(20), "P": prune},
        (10, 20),
        conditional=False,
        rots=True,
        faults=Faults(1),
        one_winner=False,
        share=6,
    ),
    Scenario(
        "lease, a newer one takes its place",
        {"A": supersede(10, 20, 30), "P": prune},
        conditional=False,
        faults=Faults(8, ("refused", "lost", "late"), likely=0.3),
        one_winner=False,
        target=30,
        share=2,
    ),
    Scenario("proof out of turn", {"S": stage(1), "T": stage(2), "A": train(60, 3)}, (20, 40), target=60, share=2),
    Scenario("names used again", {"P": prune, "D": rot_and_train(30)}, (10, 20, 30), rots=True, target=40, share=2),
    *COPIES,
]
