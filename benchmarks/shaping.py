"""A slower network in front of a server: `python -m benchmarks.shaping HOST PORT ROUND_TRIP_S BYTES_PER_S`.

Prints its own port, and passes on what it gets. A new connection waits one round trip, every byte half of one. Each
direction has one token bucket for all connections together. It runs in a process of its own, until its input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable

BLOCK = 256 * 1024
BURST = 0.02
"""Seconds' worth of bytes that may pass at once."""
IN_FLIGHT = 64
"""Blocks of one direction of one connection on their way: 16 MB hide 80 ms at 200 MB/s."""


class TokenBucket:
    """Bytes a second, shared by all that ask.

    Args:
        rate: Bytes a second.
        clock: Seconds, by any clock that runs on.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._free_at = clock()

    def wait_for(self, num_bytes: int) -> float:
        """Takes so many bytes, and returns the seconds until the last of them may pass."""
        now = self._clock()
        self._free_at = max(self._free_at, now - BURST) + num_bytes / self._rate
        return max(0.0, self._free_at - now)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: TokenBucket, delay: float
) -> None:
    """Passes one direction on until it ends: read at the bucket's rate, written `delay` seconds later."""
    blocks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)
    loop = asyncio.get_running_loop()

    async def write() -> None:
        while True:
            due, block = await blocks.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not block:
                break
            writer.write(block)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    writing = asyncio.ensure_future(write())
    with contextlib.suppress(OSError):
        while block := await reader.read(BLOCK):
            await asyncio.sleep(bucket.wait_for(len(block)))
            await blocks.put((loop.time() + delay, block))
            if writing.done():
                break
    if not writing.done():
        await blocks.put((loop.time() + delay, b""))
    with contextlib.suppress(OSError):
        await writing


async def serve(host: str, port: int, round_trip: float, rate: float) -> None:
    """Passes connections on until the standard input closes."""
    up, down = TokenBucket(rate), TokenBucket(rate)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(round_trip)
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection(host, port, limit=BLOCK)
            await asyncio.gather(
                _pass_on(reader, server_writer, up, round_trip / 2),
                _pass_on(server_reader, writer, down, round_trip / 2),
            )
            server_writer.close()
        writer.close()

    front = await asyncio.start_server(connect, "127.0.0.1", 0, limit=BLOCK)
    print(front.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    os._exit(0)  # with connections that are open


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:5])))
