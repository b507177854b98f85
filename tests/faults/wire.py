"""HTTP/1.1 on plain sockets for the faulty proxy: heads, and bodies that stream without being gathered."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

BUFFER = 512 * 1024
MAX_HEAD = 64 * 1024


class ReadFailedError(ConnectionError):
    """The peer ended the connection in the middle of a message."""


class SendFailedError(ConnectionError):
    """The peer takes no more."""


class Wire:
    """One connection: reads through a buffer, sends without one.

    Args:
        sock: A connected socket, which this object then owns.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    async def until(self, mark: bytes) -> bytes:
        """Returns what comes up to and with a mark; empty if the peer closed before the first byte."""
        while (found := self._buffer.find(mark, self._start, self._end)) < 0:
            if self._end - self._start > MAX_HEAD:
                raise ValueError(f"no {mark!r} in {MAX_HEAD} bytes")
            if not await self._fill():
                if self._start == self._end:
                    return b""
                raise ReadFailedError
        start, self._start = self._start, found + len(mark)
        return bytes(self._view[start : self._start])

    async def some(self, most: int) -> memoryview:
        """Returns between one and `most` bytes, valid until the next read; empty if the peer closed."""
        if self._start == self._end:
            await self._fill()
        start, self._start = self._start, min(self._end, self._start + most)
        return self._view[start : self._start]

    async def _fill(self) -> bool:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER:
            held = self._end - self._start
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        try:
            count = await self._loop.sock_recv_into(self.sock, self._view[self._end :])
        except OSError:
            raise ReadFailedError from None
        self._end += count
        return count > 0

    async def send(self, data: bytes | memoryview) -> None:
        """Sends all of it.

        Raises:
            SendFailedError: the peer takes no more.
        """
        try:
            await self._loop.sock_sendall(self.sock, data)
        except OSError:
            raise SendFailedError from None

    def is_idle(self) -> bool:
        """Returns whether the connection is open and says nothing."""
        if self._start != self._end:
            return False
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def finish(self, patience: float = 1.0) -> None:
        """Close so that the peer gets all that was sent: data left unread would turn the close into a reset."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(patience):
                while await self.some(BUFFER):
                    pass
        except OSError:  # the timeout's error is one too
            pass
        self.close()

    def close(self) -> None:
        """Close at once."""
        self.sock.close()

    def reset(self) -> None:
        """Close with a reset, which drops what is still on its way."""
        if self.sock.fileno() >= 0:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@dataclass
class Head:
    """The first line and the headers of a request or an answer."""

    first: str
    headers: list[tuple[str, str]]

    @classmethod
    async def read(cls, wire: Wire) -> Head | None:
        """Returns the next head on a connection, or None if the peer closed instead."""
        raw = await wire.until(b"\r\n\r\n")
        if not raw:
            return None
        first, *lines = raw[:-4].decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return cls(first, [(name.strip(), value.strip()) for name, _, value in pairs])

    def get(self, name: str) -> str:
        """Returns a header's value, empty if there is no such header."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    def without(self, *names: str) -> Head:
        """Returns the same head without the headers of these names."""
        unwanted = {name.lower() for name in names}
        return Head(self.first, [pair for pair in self.headers if pair[0].lower() not in unwanted])

    def encode(self) -> bytes:
        """Returns the head as it is sent."""
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    @property
    def method(self) -> str:
        """A request's method."""
        return self.first.split(" ")[0]

    @property
    def target(self) -> str:
        """A request's path and query, as sent."""
        return self.first.split(" ")[1]

    @property
    def status(self) -> int:
        """An answer's status."""
        return int(self.first.split(" ")[1])

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection stays open after this message, as far as this side is concerned."""
        said = self.get("Connection").lower()
        return "close" not in said if "HTTP/1.1" in self.first else "keep-alive" in said

    @property
    def awaits_continue(self) -> bool:
        """Whether the client sends the body only when it is told to go on, or tired of waiting."""
        return self.get("Expect").lower() == "100-continue"


class Piece(NamedTuple):
    """Part of a body as it is sent, which is valid until the next one is asked for."""

    view: memoryview
    is_data: bool = True
    """False for what frames the data: the sizes of chunks, and trailers."""
    is_last: bool = False


@dataclass
class Body:
    """A body that is still to be read.

    Attributes:
        wire: Where it comes from.
        length: Its size, or None if that is not known before its end.
        is_chunked: Whether it comes in chunks; what is neither sized nor chunked ends with the connection.
    """

    wire: Wire
    length: int | None = 0
    is_chunked: bool = False

    @classmethod
    def of_request(cls, wire: Wire, head: Head) -> Body:
        """Returns the body that follows a request's head."""
        if "chunked" in head.get("Transfer-Encoding").lower():
            return cls(wire, None, True)
        return cls(wire, int(head.get("Content-Length") or 0))

    @classmethod
    def of_answer(cls, wire: Wire, head: Head, method: str) -> Body:
        """Returns the body that follows an answer's head."""
        if method == "HEAD" or head.status in (204, 304):
            return cls(wire)
        if "chunked" in head.get("Transfer-Encoding").lower():
            return cls(wire, None, True)
        length = head.get("Content-Length")
        return cls(wire, int(length) if length else None)

    @property
    def ends_with_connection(self) -> bool:
        """Whether nothing can follow on the same connection."""
        return self.length is None and not self.is_chunked

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields the body as it comes.

        Raises:
            ReadFailedError: the peer closed before the body's end.
        """
        if self.is_chunked:
            async for piece in self._chunks():
                yield piece
        elif self.length is None:
            while view := await self.wire.some(BUFFER):
                yield Piece(view)
        else:
            async for piece in self._exactly(self.length):
                yield piece

    async def _exactly(self, left: int) -> AsyncIterator[Piece]:
        while left:
            view = await self.wire.some(left)
            if not view:
                raise ReadFailedError
            left -= len(view)
            yield Piece(view)

    async def _chunks(self) -> AsyncIterator[Piece]:
        while size := int((line := await self._line()).partition(b";")[0], 16):
            yield Piece(memoryview(line), is_data=False)
            async for piece in self._exactly(size):
                yield piece
            yield Piece(memoryview(await self._line()), is_data=False)
        trailer = b""
        while trailer != b"\r\n":
            trailer = await self._line()
            line += trailer
        yield Piece(memoryview(line), is_data=False, is_last=True)

    async def _line(self) -> bytes:
        line = await self.wire.until(b"\r\n")
        if not line:
            raise ReadFailedError
        return line
