"""One request through the faulty proxy, and its answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from xml.sax.saxutils import escape

from tests.faults.rules import CutError, Rule, pump
from tests.faults.wire import Body, Head, Wire

ERRORS = {
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    502: "ServiceUnavailable",
    503: "SlowDown",
}
"""What S3 calls an error, by status."""

OF_THIS_HOP = ("Connection", "Keep-Alive", "Proxy-Connection")


class Link:
    """A client's connection, and the one to upstream that goes with it.

    Args:
        client: The client's connection.
        address: Host and port of upstream.
    """

    def __init__(self, client: Wire, address: tuple[str, int]) -> None:
        self.client = client
        self._address = address
        self._upstream: Wire | None = None

    async def upstream(self) -> Wire:
        """Returns the connection to upstream: the one of the last exchange if that is still good."""
        if self._upstream is not None and self._upstream.is_idle():
            return self._upstream
        self.drop_upstream()
        sock = socket.socket()
        self._upstream = Wire(sock)
        await asyncio.get_running_loop().sock_connect(sock, self._address)
        return self._upstream

    def drop_upstream(self) -> None:
        """Close the connection to upstream, if there is one."""
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None


class Exchange:
    """One request and its answer.

    Args:
        link: The connections, with the request's head read.
        request: That head.
        rules: What applies to it, in order.
        refuse: Stops the proxy's listening, for seconds or until the test says so.
    """

    def __init__(
        self, link: Link, request: Head, rules: list[Rule], refuse: Callable[[float | None], Awaitable[None]]
    ) -> None:
        self.link = link
        self.client = link.client
        self.request = request
        self.body = Body.of_request(link.client, request)
        self.rules = rules
        self.refuse = refuse
        self.rate = min((rule.rate for rule in rules if rule.rate is not None), default=None)
        self.keeps_client = request.keeps_alive
        self.keeps_upstream = True
        self.awaits_continue = request.awaits_continue and self.body.length != 0

    async def run(self) -> bool:
        """Pass the request on and the answer back, but for what the rules want.

        Returns:
            Whether the client's connection is good for another request.

        Raises:
            CutError: a rule ended the connection.
            OSError: a peer did.
        """
        for rule in self.rules:
            await self._meet(rule)
            if rule.kind == "status":
                await self._answer(rule)
                return self.keeps_client
        await self._forward()
        return self.keeps_client

    async def _meet(self, rule: Rule) -> None:
        """What a rule does before the request goes anywhere."""
        match rule.kind:
            case "latency":
                await asyncio.sleep(rule.seconds or 0)
            case "pause" if rule.of == "request":
                await rule.hold()
            case "drop_header":
                self.request = self.request.without(rule.name)
            case "stall" if rule.after is None:
                await rule.stall()
            case "reset" if rule.after is None:
                raise CutError
            case "refuse":
                await self.refuse(rule.seconds)
                raise CutError

    async def _answer(self, rule: Rule) -> None:
        """Answer in upstream's stead."""
        if self.awaits_continue:
            self.keeps_client = False
        else:
            await pump(b"", self.body, None)
        error = escape(rule.name or ERRORS.get(rule.code, ""))
        resource = escape(self.request.target.partition("?")[0])
        text = '<?xml version="1.0" encoding="UTF-8"?>\n' + (
            f"<Error><Code>{error}</Code><Message>{error}, says the faulty proxy.</Message>"
            f"<Resource>{resource}</Resource><RequestId>{rule.number:016X}</RequestId></Error>"
        )
        phrase = HTTPStatus(rule.code).phrase
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))]
        head = self._for_client(Head(f"HTTP/1.1 {rule.code} {phrase}", headers))
        await self.client.send(head + (b"" if self.request.method == "HEAD" else text.encode()))

    def _for_client(self, head: Head) -> bytes:
        head = head.without(*OF_THIS_HOP)
        if not self.keeps_client:
            head.headers.append(("Connection", "close"))
        elif not self.request.first.endswith("HTTP/1.1"):
            head.headers.append(("Connection", "keep-alive"))
        return head.encode()

    async def _forward(self) -> None:
        upstream = await self.link.upstream()
        sending = asyncio.create_task(self._send(upstream))
        answering = asyncio.create_task(self._pass_answer(upstream, sending))
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_EXCEPTION)
            for task in (answering, sending):
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)
        if not self.keeps_upstream:
            self.link.drop_upstream()

    async def _send(self, upstream: Wire) -> None:
        """Send the request; an upstream that takes no more may have answered."""
        rules = [rule for rule in self.rules if rule.after is not None and rule.of == "request"]
        head = self.request.without(*OF_THIS_HOP).encode()
        await pump(head, self.body, upstream, rules, self.rate, reads_on=True)

    async def _pass_answer(self, upstream: Wire, sending: asyncio.Task[None]) -> None:
        head = await self._final_head(upstream)
        body = Body.of_answer(upstream, head, self.request.method)
        # Told nothing, the client may send the body all the same, or not: the two cannot be told apart.
        is_refused = self.awaits_continue and not sending.done()
        if is_refused:
            sending.cancel()
        if is_refused or body.ends_with_connection:
            self.keeps_client = False
        self.keeps_upstream = self.keeps_client and head.keeps_alive
        for rule in self.rules:
            if rule.kind == "pause" and rule.of == "answer":
                await rule.hold()
        if any(rule.kind == "lost_answer" for rule in self.rules):
            await pump(b"", body, None)
            raise CutError
        rules = [rule for rule in self.rules if rule.after is not None and rule.of == "answer"]
        await pump(self._for_client(head), body, self.client, rules, self.rate)

    async def _final_head(self, upstream: Wire) -> Head:
        while head := await Head.read(upstream):
            if head.status >= 200:
                return head
            self.awaits_continue = False
            await self.client.send(head.encode())
        raise CutError
