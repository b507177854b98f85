"""A browser that tests look with: Chromium by its DevTools protocol, clicked by the mouse as a person does."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class DevToolsError(Exception):
    """A call of the protocol that failed."""


class Page:
    """A tab.

    Attributes:
        messages: What it has written to its console, and errors, also of requests.
    """

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.messages: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            document = json.loads(self._socket.recv())
            if document.get("id") == number:
                if "error" in document:
                    raise DevToolsError(method, document["error"])
                return dict(document["result"])
            if document.get("method") == "Runtime.exceptionThrown":
                self.messages.append(json.dumps(document["params"]["exceptionDetails"]))
            elif document.get("method") == "Log.entryAdded":
                self.messages.append(document["params"]["entry"]["text"])

    def js(self, expression: str) -> Any:
        """Returns the value of an expression, awaited."""
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, (expression, done["exceptionDetails"])
        return done["result"].get("value")

    def until(self, expression: str, seconds: float = 10) -> Any:
        """Waits until an expression is true, and returns its value."""
        ends = time.monotonic() + seconds
        while True:
            with contextlib.suppress(DevToolsError):  # the page is left just now
                if value := self.js(f"(found => found instanceof Node || found)({expression})"):
                    return value
            assert time.monotonic() < ends, (
                f"not within {seconds} s: {expression}; {self.messages}; {self.text()[:2000]}"
            )
            time.sleep(0.1)

    def text(self) -> str:
        """Returns the visible text."""
        return str(self.js("document.body.innerText"))

    def click(self, selector: str) -> None:
        """Clicks the middle of an element, which nothing may cover."""
        quoted = json.dumps(selector)
        self.until(f"document.querySelector({quoted})")
        x, y, is_free = self.js(
            f"""(() => {{
                const element = document.querySelector({quoted});
                element.scrollIntoView({{block: "center", inline: "center", behavior: "instant"}});
                const box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
                return [x, y, element.contains(document.elementFromPoint(x, y))];
            }})()"""
        )
        assert is_free, f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """Replaces the text of a field."""
        self.click(selector)
        self.js(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def go(self, address: str) -> None:
        """Opens an address."""
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def shape(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Sets the window's size and the colour scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        time.sleep(0.3)  # for what is drawn after a change of size
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Starts Chromium with an empty profile, and yields its one tab."""
    process = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port, ends = profile / "DevToolsActivePort", time.monotonic() + 60
        while not (port.exists() and port.read_text()):
            assert process.poll() is None, "Chromium has ended"
            assert time.monotonic() < ends, "Chromium does not answer"
            time.sleep(0.05)
        listing = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json/list"
        while True:
            with urllib.request.urlopen(listing, timeout=10) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                break
            time.sleep(0.05)
        yield Page(tabs[0]["webSocketDebuggerUrl"])
    finally:
        process.terminate()
        process.wait(20)
