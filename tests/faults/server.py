"""The process of the faulty proxy: `python -m tests.faults.server http://HOST:PORT`; it ends when its input does.

It prints its own port and the port of its control, which takes one JSON list a connection: the name of a
command and its arguments.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import deque
from typing import Any
from urllib.parse import urlsplit

from tests.faults.exchange import Exchange, Link
from tests.faults.rules import CutError, Rule, chosen
from tests.faults.wire import Head, Wire

HOST = "127.0.0.1"


class Proxy:
    """Listens, and serves each client by the rules of the moment.

    Args:
        address: Host and port of upstream.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._rules: dict[int, Rule] = {}
        self._active: list[Rule] = []
        self._log: deque[str] = deque(maxlen=10_000)
        self._clients: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._comeback: asyncio.TimerHandle | None = None
        # Bound and never listening, it keeps the port ours while connections are refused.
        self._holder = self._bound(0)
        self.port: int = self._holder.getsockname()[1]

    def _bound(self, port: int) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((HOST, port))
        sock.setblocking(False)
        return sock

    def listen(self) -> None:
        """Take connections."""
        if self._comeback is not None:
            self._comeback.cancel()
            self._comeback = None
        if self._listener is None:
            self._listener = self._bound(self.port)
            self._listener.listen(1024)
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def refuse(self, seconds: float | None = None) -> None:
        """Refuse connections, and reset those there are but the caller's, for seconds or until told to listen."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        others = self._clients - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if seconds is not None and self._comeback is None:
            self._comeback = asyncio.get_running_loop().call_later(seconds, self.listen)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        task = asyncio.create_task(self._serve(sock))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, sock: socket.socket) -> None:
        client = Wire(sock)
        link = Link(client, self._address)
        try:
            while (request := await Head.read(client)) and await self._exchange(link, request):
                pass
            await client.finish()
        except CutError as cut:
            if not cut.is_reset:
                await client.finish()
        except (OSError, ValueError):
            pass
        finally:
            client.reset()
            link.drop_upstream()

    async def _exchange(self, link: Link, request: Head) -> bool:
        self._log.append(f"{request.method} {request.target}")
        return await Exchange(link, request, chosen(self._active, request), self.refuse).run()

    def add(self, options: dict[str, Any]) -> int:
        """Put a rule after the others; returns its number."""
        number = len(self._rules) + 1
        rule = Rule(number=number, **options)
        self._rules[number] = rule
        self._active.append(rule)
        return number

    def remove(self, number: int) -> None:
        """End a rule; it keeps its counts."""
        rule = self._rules[number]
        if rule in self._active:
            self._active.remove(rule)
        rule.release()

    def clear(self) -> None:
        """End all rules, and listen."""
        for rule in list(self._active):
            self.remove(rule.number)
        self.listen()

    def counts(self, number: int) -> list[int]:
        """Returns how many requests a rule matched, struck and holds."""
        rule = self._rules[number]
        return [rule.seen, rule.hits, len(rule.holds)]

    def release(self, number: int, count: int | None) -> None:
        """Let go of requests that a rule holds."""
        self._rules[number].release(count)

    def requests(self) -> list[str]:
        """Returns the requests that came, oldest first."""
        return list(self._log)

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do one command of the test's."""
        name, *arguments = json.loads(await reader.readline())
        result = getattr(self, name)(*arguments)
        if asyncio.iscoroutine(result):
            result = await result
        writer.write(json.dumps(result).encode() + b"\n")
        await writer.drain()
        writer.close()


async def serve(upstream: str) -> None:
    """Serve until the input ends."""
    parts = urlsplit(upstream)
    proxy = Proxy((socket.gethostbyname(parts.hostname or ""), parts.port or 80))
    control = await asyncio.start_server(proxy.control, HOST, 0)
    proxy.listen()
    print(json.dumps([proxy.port, control.sockets[0].getsockname()[1]]), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    await ended.wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
