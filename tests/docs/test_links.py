"""All links and anchors of Markdown resolve; each page of docs/ is in the navigation or in internals/index.md."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDERS = ("baton", "components", "docs", "examples", "images", "k8s", "pipelines", "tests")
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        ROOT / "llms.txt",
        *(page for name in FOLDERS for page in ROOT.glob(f"{name}/**/*.md")),
    ]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"|\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(?P<indent> *)(?P<marks>```+|~~~+).*?^ *(?P=marks) *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.MULTILINE)
MENTION = re.compile(r"(?<![\w/.-])docs/(?:[\w/-]+\.(?:md|json|yaml|svg|png)|reference/recipe\b)")
ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:")


def _links(text: str) -> Iterator[str]:
    for match in LINK.finditer(CODE.sub("", FENCE.sub("", text))):
        yield next(target for target in match.groups() if target)


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub, and the site by `toc.slugify`, give a page's headings."""
    taken: Counter[str] = Counter()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\- ]", "", unicodedata.normalize("NFC", words).lower()).strip().replace(" ", "-")
        taken[plain] += 1
        if taken[plain] > 1:
            raise AssertionError(f"two headings '{heading}': GitHub and the site number the second one differently")
    return set(taken)


@cache
def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _broken(path: str, text: str) -> list[str]:
    broken = []
    for link in _links(text):
        if ELSEWHERE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), name)) if name else path
        if target != path and not (ROOT / target).exists():
            broken.append(f"{link}: there is no {target}")
        elif anchor and (
            not target.endswith(".md") or anchor not in _anchors(text if target == path else _text(target))
        ):
            broken.append(f"{link}: {target} has no heading with that anchor")
    return broken


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path: str) -> None:
    assert _broken(path, _text(path)) == []


@pytest.mark.parametrize(
    "planted",
    [
        "[a](nowhere.md)",
        "[a](trust/signing.md#nowhere)",
        "[a](#nowhere)",
        "![a](pictures/nowhere.svg)",
        "[![a](no.svg)](trust/signing.md)",
    ],
)
def test_a_link_that_leads_nowhere_is_noticed(planted: str) -> None:
    assert len(_broken("docs/planted.md", f"# Here\n\n{planted}, `[b](code.md)`\n\n```\n[c](code.md)\n```\n")) == 1
    assert (
        _broken(
            "docs/planted.md", "# Here, and `there`\n\n[a](#here-and-there) [b](trust/signing.md#auditing-a-chunk)\n"
        )
        == []
    )


def test_files_that_code_and_messages_name_are_there() -> None:
    named = {
        (source.relative_to(ROOT).as_posix(), path)
        for folder in ("baton", "components", "images", "k8s", "pipelines")
        for suffix in ("py", "yaml", "yml", "md", "sh")
        for source in (ROOT / folder).glob(f"**/*.{suffix}")
        for path in MENTION.findall(source.read_text(encoding="utf-8"))
    }
    assert ("baton/importers/draft.py", "docs/reference/recipe") in named
    assert sorted(item for item in named if not (ROOT / item[1]).exists()) == []


class _Navigation(yaml.SafeLoader):
    """Reads mkdocs.yml without what its tags import."""


_Navigation.add_multi_constructor("!ENV", lambda loader, suffix, node: None)
_Navigation.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def _pages_of(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _pages_of(value)
    elif isinstance(nav, list):
        for value in nav:
            yield from _pages_of(value)


def test_every_page_is_in_the_navigation() -> None:
    listed = Counter(_pages_of(yaml.load(_text("mkdocs.yml"), _Navigation)["nav"]))
    assert [page for page, times in listed.items() if times > 1] == []
    pages = {path.removeprefix("docs/") for path in PAGES if path.startswith("docs/")}
    for folder in ("internals", "internals/decisions"):  # off the navigation: each index lists its folder
        links = {link.partition("#")[0] for link in _links(_text(f"docs/{folder}/index.md"))}
        listed.update(posixpath.normpath(f"{folder}/{link}") for link in links if not link.startswith(".."))
    listed["internals/index.md"] += 1
    inside = {page for page in listed if not page.startswith("repository/")}
    missing = [
        f"docs/{page} is not in the nav of mkdocs.yml, nor in docs/internals/index.md"
        for page in sorted(pages - inside)
    ]
    assert missing + [f"{page} is listed, and not there" for page in sorted(inside - pages)] == []
    for page in listed:
        assert not page.startswith("repository/") or (ROOT / page.removeprefix("repository/")).exists()


def test_llms_txt_names_every_page_but_decision_records() -> None:
    named = {link.partition("#")[0] for link in _links(_text("llms.txt"))}
    records = "docs/internals/decisions/0"
    pages = {path for path in PAGES if path.startswith("docs/") and not path.startswith(records)}
    assert sorted(pages - named) == []
