"""The server of pages that live: on this machine alone, while its command runs.

A page is an empty shell; the content comes as server-sent events, and only to whoever sends the token. The token is in
the printed address behind `#`, which no browser sends to a server or names to another site. As no cookie is kept, a
foreign page has nothing to borrow. A name that leads here by another server's DNS is refused by its `Host`.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import Literal

import uvicorn
from jinja2 import Environment
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from baton.errors import BatonError, UserError
from baton.pages import run_page
from baton.runs.run import Run, Sweep
from baton.sweep import page as sweep_page
from baton.sweep import steer
from baton.watch.views import RunView, SweepView

logger = logging.getLogger("baton")

HOST = "127.0.0.1"
PAUSE_S, PAUSE_HERE_S = 2.0, 1.0  # between two rounds, of a bucket and of a folder
SHARE = 4  # a round's time is followed by this multiple of it, at least, up to `LONG_PAUSE_S`
LONG_PAUSE_S = 3.0  # so that a curve grows within 5 s of its step
LONGEST_PAUSE_S = 30.0  # after errors
ALIVE_S = 15.0  # between signs of life on a connection where nothing changes
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # not possible in a page's own policy
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Feed:
    """Renders a page while somebody reads it, and passes what has changed on to all readers."""

    def __init__(self, view: RunView | SweepView, lock: threading.Lock) -> None:
        self._view, self._lock = view, lock
        self._readers = 0
        self._number, self._event = 0, ""
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._work: asyncio.Task[None] | None = None

    def hurry(self) -> None:
        """Has the page rendered at once."""
        self._wanted.set()

    async def events(self) -> AsyncIterator[str]:
        """Yields server-sent events: the page, then each change of it."""
        self._readers += 1
        if self._work is None:
            self._work = asyncio.create_task(self._render())
        seen = 0
        try:
            while True:
                event = ": nothing has changed\n\n"
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ALIVE_S), self._changed:
                        while self._number == seen:
                            await self._changed.wait()
                        seen, event = self._number, self._event
                yield event
        finally:
            self._readers -= 1
            if not self._readers and self._work:  # without a reader, the store is asked no more
                self._work.cancel()
                self._work = None

    async def _render(self) -> None:
        pause = 0.0
        while True:
            began = time.monotonic()
            self._wanted.clear()
            try:
                event = _event("page", await run_in_threadpool(self._rendered))
                least = PAUSE_HERE_S if self._view.storage.is_local else PAUSE_S
                pause = max(least, min(SHARE * (time.monotonic() - began), LONG_PAUSE_S))
            except Exception as error:  # of the store, or of a document that is half written: told, and tried again
                if not isinstance(error, BatonError):
                    logger.exception("the page was not rendered")
                event = _event("trouble", str(error) if isinstance(error, BatonError) else f"Not read: {error!r}")
                pause = min(max(2 * pause, PAUSE_S), LONGEST_PAUSE_S)
            if event != self._event:
                async with self._changed:
                    self._number, self._event = self._number + 1, event
                    self._changed.notify_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), pause)

    def _rendered(self) -> str:
        with self._lock:  # a fork's seals would take a read of this thread for one of the fork's
            return self._view.render().partition("<main>")[2].rpartition("</main>")[0]


def _event(kind: str, value: str) -> str:
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n"


class Order(BaseModel):
    """A request for a trial."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trial: str
    action: Literal["stop", "resume", "promote", "clone"]
    why: str = ""
    changes: list[str] = []  # of a clone, `PATH=VALUE`

    def carry_out(self, sweep: Sweep) -> str:
        """Writes what the command of that name writes, and returns the answer in words."""
        if self.action == "clone":
            made, forked = steer.fork(sweep, self.trial, None, self.changes)
            joins = steer.when(sweep, steer.joins(sweep))
            return "\n".join([f"{made.id} begins at step {forked.step} and joins {joins}.", *forked.lines])
        why = self.why.strip() or steer.BY_HAND
        told = steer.ask(sweep, self.trial, "stop" if self.action == "stop" else "go", why)
        return f"{self.trial}: advances at each rung, whatever its place" if self.action == "promote" else told


class Pages:
    """The application: pages of a run, or of a sweep and its trials."""

    def __init__(self, of: Run | Sweep, token: str) -> None:
        self._of, self._token = of, token
        self._lock = threading.Lock()
        self._feeds: dict[str, Feed] = {}
        run_shell = _shell(run_page.environment, "run_page.html.j2")
        sweep_shell = _shell(sweep_page.environment, "sweep.html.j2")
        shell = sweep_shell if isinstance(of, Sweep) else run_shell
        routes = [
            Route("/", lambda request: HTMLResponse(shell, headers=HEADERS)),
            Route("/events", self._events),
        ]
        if isinstance(of, Sweep):
            routes += [
                Route("/runs/{run}", lambda request: HTMLResponse(run_shell, headers=HEADERS)),
                Route("/runs/{run}/events", self._events),
                Route("/steer", self._steer, methods=["POST"]),
            ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
        self.app = Starlette(routes=routes, middleware=[hosts])

    def _is_allowed(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("latin-1")
        return secrets.compare_digest(given, f"Bearer {self._token}".encode())

    async def _events(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _refused()
        name = request.path_params.get("run", "")
        if name not in self._feeds:
            view: RunView | SweepView
            if isinstance(self._of, Run):
                view = RunView(self._of)
            elif not name:
                view = SweepView(self._of)
            elif name in {trial.run for trial in (await run_in_threadpool(self._of.document)).trials}:
                view = RunView(Run(self._of.storage, name))
            else:
                return _answer(404, f"sweep {self._of.name!r} has no trial with the run {name!r}.")
            self._feeds.setdefault(name, Feed(view, self._lock))
        return StreamingResponse(self._feeds[name].events(), media_type="text/event-stream", headers=HEADERS)

    async def _steer(self, request: Request) -> Response:
        if not self._is_allowed(request):
            return _refused()
        try:
            order = Order.model_validate_json(await request.body())
            told = await run_in_threadpool(self._carry_out, order)
        except ValidationError as error:
            return _answer(400, "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()))
        except BatonError as error:
            return _answer(400 if isinstance(error, UserError) else 502, str(error))
        if feed := self._feeds.get(""):
            feed.hurry()
        return JSONResponse({"told": told}, headers=HEADERS)

    def _carry_out(self, order: Order) -> str:
        assert isinstance(self._of, Sweep)
        with self._lock:
            return order.carry_out(self._of)


def _answer(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers=HEADERS)


def _refused() -> JSONResponse:
    return _answer(401, "This address has no valid token: open the newest address that `baton watch` has printed.")


@cache
def _shell(environment: Callable[[Path], Environment], page: str) -> str:
    """Returns a page without content, with the style and script that its content needs."""
    return environment(Path(__file__).parent).get_template("watch.html.j2").render(page=page, live=True)


def listen(port: int) -> socket.socket:
    """Returns a socket on this machine's loopback; port 0 is any free one."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        message = f"port {port} of {HOST} cannot be used: {error.strerror}."
        raise UserError(message, remedy="Choose another --port.") from None


def serve(of: Run | Sweep, listening: socket.socket, token: str) -> None:
    """Serves pages until the process is interrupted."""
    # A reader's connection has no end of its own: after a second it is cut.
    config = uvicorn.Config(
        Pages(of, token).app,
        log_level="critical",
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listening])
