"""The faulty proxy's rules: which requests they take, and what they do to a body on its way."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from tests.faults.wire import Body, Head, SendFailedError, Wire


class CutError(Exception):
    """The connection to the client ends here.

    Args:
        is_reset: Whether the client sees a reset rather than an end.
    """

    def __init__(self, is_reset: bool = True) -> None:
        self.is_reset = is_reset


@dataclass
class Rule:
    """A fault and the requests it is for; `faults.FaultyProxy` says what the options mean."""

    number: int
    kind: str
    methods: Sequence[str] = ()
    path: str = ""
    pattern: str = ""
    header: str = ""
    skip: int = 0
    times: int | None = None
    chance: float = 1.0
    seed: int = 0
    code: int = 0
    name: str = ""
    after: int | None = None
    of: str = "answer"
    seconds: float | None = None
    rate: float | None = None
    seen: int = 0
    hits: int = 0
    holds: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def takes(self, request: Head) -> bool:
        """Returns whether the rule applies to a request, and counts it."""
        if not self._matches(request):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.hits >= self.times):
            return False
        if self._random.random() >= self.chance:
            return False
        self.hits += 1
        return True

    def _matches(self, request: Head) -> bool:
        spellings = (request.target, unquote(request.target))
        return (
            (not self.methods or request.method in self.methods)
            and any(self.path in spelling for spelling in spellings)
            and any(re.search(self.pattern, spelling) for spelling in spellings)
            and (not self.header or any(name.lower() == self.header.lower() for name, _ in request.headers))
        )

    @property
    def is_final(self) -> bool:
        """Whether no later rule has a say."""
        return self.kind in ("status", "reset", "short", "lost_answer", "refuse") or (
            self.kind == "stall" and self.seconds is None
        )

    async def hold(self) -> None:
        """Wait for the rule's time, if it has one, or until the test lets go."""
        hold = asyncio.get_running_loop().create_future()
        self.holds.append(hold)
        try:
            await asyncio.wait({hold}, timeout=self.seconds)
        finally:
            if hold in self.holds:
                self.holds.remove(hold)

    def release(self, count: int | None = None) -> None:
        """Let go of the requests held longest, or of all."""
        for hold in self.holds[:count]:
            self.holds.remove(hold)
            hold.set_result(None)

    async def stall(self) -> None:
        """Wait, and go on only if the wait had an end.

        Raises:
            CutError: the wait had none, and the test let go.
        """
        await self.hold()
        if self.seconds is None:
            raise CutError


def chosen(rules: Iterable[Rule], request: Head) -> list[Rule]:
    """Returns the rules that apply to a request, in their order, up to the first that lets no other follow."""
    taken = []
    for rule in rules:
        if rule.takes(request):
            taken.append(rule)
            if rule.is_final:
                break
    return taken


async def pump(
    head: bytes,
    body: Body,
    sink: Wire | None,
    rules: Sequence[Rule] = (),
    rate: float | None = None,
    reads_on: bool = False,
) -> None:
    """Pass a message on as it comes, with what rules do to its body.

    Args:
        head: Its head.
        body: Its body, still unread.
        sink: Where it goes; None reads it and forgets it.
        rules: Those that act on this body, each at its offset or, in a shorter body, just before the end.
        rate: Bytes a second, or None for as fast as it goes.
        reads_on: Whether a sink that takes no more is forgotten, rather than an error.

    Raises:
        CutError: a rule ended the connection.
        ReadFailedError: the message ended early.
        SendFailedError: the sink takes no more.
    """
    passage = Passage(sink, rules, rate, body.length, reads_on)
    if body.length == 0:
        await passage.finish()
    await passage.send(head)
    async for piece in body.pieces():
        if piece.is_data:
            await passage.data(piece.view)
        else:
            if piece.is_last:
                await passage.finish()
            await passage.send(piece.view)
        await asyncio.sleep(0)  # sockets that are always ready would keep all others waiting
    await passage.finish()


class Passage:
    """One message's way through the proxy: sends, at a rate, and acts at the offsets where rules say so."""

    def __init__(
        self, sink: Wire | None, rules: Sequence[Rule], rate: float | None, length: int | None, reads_on: bool
    ) -> None:
        self._sink = sink
        self._rate = rate
        self._clock = 0.0
        self._reads_on = reads_on
        self._passed = 0
        last = length - 1 if length else None
        due = [(rule.after or 0 if last is None else min(rule.after or 0, last), rule) for rule in rules]
        self._due = sorted(due, key=lambda pair: pair[0])

    async def send(self, view: bytes | memoryview) -> None:
        """Send no faster than the rate."""
        step = len(view) if self._rate is None else max(1, int(self._rate / 50))
        for start in range(0, len(view), step or 1):
            part = view[start : start + step]
            if self._rate is not None:
                self._clock = max(self._clock, time.monotonic()) + len(part) / self._rate
                await asyncio.sleep(self._clock - time.monotonic())
            await self._send(part)

    async def _send(self, part: bytes | memoryview) -> None:
        if self._sink is None:
            return
        try:
            await self._sink.send(part)
        except SendFailedError:
            if not self._reads_on:
                raise
            self._sink = None

    async def data(self, view: memoryview) -> None:
        """Pass data on, and act where it is time to."""
        while self._due and self._due[0][0] < self._passed + len(view):
            at, rule = self._due.pop(0)
            offset = at - self._passed
            if rule.kind == "corrupt":
                view[offset] ^= 1
                continue
            await self._data(view[:offset])
            view = view[offset:]
            await self._act(rule)
        await self._data(view)

    async def _data(self, view: memoryview) -> None:
        self._passed += len(view)
        await self.send(view)

    async def finish(self) -> None:
        """Act for the rules whose offset the body did not reach."""
        while self._due:
            _, rule = self._due.pop(0)
            await self._act(rule)

    async def _act(self, rule: Rule) -> None:
        if rule.kind == "stall":
            await rule.stall()
        elif rule.kind != "corrupt":
            raise CutError(is_reset=rule.kind == "reset")
