"""Reads a page as its reader's browser does: tags, text, plots, and the one script that may run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from baton.pages import plots

VOID = {"meta", "link", "br", "hr", "img", "input"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Page(HTMLParser):
    """Checks the nesting of tags and collects text, tags, ids, references, scripts, plots and copied texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.resources: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.plots: list[dict[str, Any]] = []
        self.copied: list[str] = []
        self.policy = ""
        self.pieces: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = {name: value or "" for name, value in attrs}
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if "data-plot" in values:
            self.plots.append(json.loads(values["data-plot"]))
        if "data-copy" in values:
            self.copied.append(values["data-copy"])
        if tag == "a":
            self.links.append(values.get("href", ""))
        for name, value in values.items():
            assert not name.startswith("on"), f"{tag} has a handler: {name}"
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "data", "srcset") and tag != "a":
                self.resources.append(value)
            self.resources += re.findall(r"url\(([^)]*)\)", value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.pieces))

    def plot(self, y: str) -> dict[str, Any]:
        """Returns the plot with this name on its y-axis."""
        (plot,) = [plot for plot in self.plots if plot["y"] == y]
        return plot

    def curves(self, y: str) -> dict[str, list[tuple[float, float]]]:
        """Returns a plot's points by curve."""
        return {curve["name"]: list(zip(curve["xs"], curve["ys"], strict=True)) for curve in self.plot(y)["curves"]}


def read(html: str) -> Page:
    """Returns a page after checking that it loads nothing and that no script but ours can run."""
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(reference.startswith("#") and reference[1:] in page.ids for reference in page.resources)
    assert not page.tags & {"link", "img", "iframe", "object", "embed", "image", "base"}
    ours = ("../", "data-quality.html", "report.html")
    assert all(link.startswith(("https://", "http://", *ours)) for link in page.links)
    assert not re.search(r"@import|url\(", html[html.index("<style>") : html.index("</style>")])
    if "".join(page.scripts):
        assert "".join(page.scripts) == str(plots.script())
        assert page.policy == f"{POLICY}; script-src '{plots.script_digest()}'"
    else:
        assert page.policy == POLICY
        assert not page.plots
    return page
