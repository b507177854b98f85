"""Pages that live, served in the test's own process, and a browser to look at them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from baton.runs.run import Run, Sweep
from baton.watch import server
from tests.support.browser import CHROMIUM, Page, browser

TOKEN = "a-token-of-the-tests"

Serve = Callable[[Run | Sweep], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serves the pages of a run or a sweep, and returns their address without its token."""
    servers: list[uvicorn.Server] = []

    def start(of: Run | Sweep) -> str:
        listening = server.listen(0)
        config = uvicorn.Config(
            server.Pages(of, TOKEN).app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        made = uvicorn.Server(config)
        threading.Thread(target=made.run, args=([listening],), daemon=True).start()
        until = time.monotonic() + 20
        while not made.started:
            assert time.monotonic() < until
            time.sleep(0.01)
        servers.append(made)
        return f"http://{server.HOST}:{listening.getsockname()[1]}"

    yield start
    for each in servers:
        each.should_exit = True


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The tab of a browser that the module's tests share."""
    if CHROMIUM is None and not os.environ.get("CI"):
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    profile: Path = tmp_path_factory.mktemp("browser") / "profile"
    with browser(profile) as tab:
        tab.shape(1200)
        yield tab
