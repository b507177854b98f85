"""Additions to MkDocs: pages of files outside docs/, diagrams without a network, llms.txt (`mkdocs.yml`).

Pages link to files of the repository, so that the links work in an editor, on a forge and here. A file outside docs/
that some page links to becomes a page below repository/: Markdown unchanged, anything else as a block of code. MkDocs
then checks all links and anchors.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
VENDOR = {
    "site/vendor/mermaid.js": "@mermaid-js/tiny/dist/mermaid.tiny.js",
    "site/vendor/iframe-worker.js": "iframe-worker/shim/index.js",
}
LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
CELL_CODE = re.compile(r"<code>[^<]*</code>(?=(?:(?!<td|<th|<pre).)*?</t[dh]>)", re.DOTALL)
FENCE = re.compile(r"^ *(?P<marks>```+|~~~+).*?^ *(?P=marks) *$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".sh": "sh", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Adds files outside docs/ that pages link to, llms.txt, and the two scripts that npm has fetched."""
    for uri, text in _for_models(config):
        files.append(File.generated(config, uri, content=text))
    for uri, path in VENDOR.items():
        script = ROOT / "build" / "site-tools" / "node_modules" / path
        if not script.is_file():
            raise PluginError(f"there is no {script}: `make site` fetches it with npm")
        files.append(File.generated(config, uri, abs_src_path=str(script)))
    waiting, seen = (
        ["README.md", "AGENTS.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())],
        set[str](),
    )
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, _site_uri(path), content=_page_text(path)))
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            waiting += [target for _, target in _links(text, path) if _is_a_page(target)]
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns each link to a file of the repository into one to its page here."""
    if not _repository_path(page.file.src_uri).endswith(".md"):
        page.meta["search"] = {"exclude": True}
    return _for_the_site(markdown, page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    r"""Writes `\|` in the code of a table as `|`, as GitHub does."""
    return CELL_CODE.sub(lambda match: match[0].replace("\\|", "|"), html)


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Gives a page with diagrams the script that draws them: 2.5 MB that no other page loads."""
    if 'class="mermaid"' not in output:
        return output
    script = posixpath.relpath("site/vendor/mermaid.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)


def _for_models(config: Any) -> Iterator[tuple[str, str]]:
    """llms.txt, with links to this site, and llms-full.txt: all pages as one text."""
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    links = list(_links(text, "llms.txt"))
    pages = (
        f"<!-- {path} -->\n\n{(ROOT / path).read_text(encoding='utf-8')}" for _, path in links if path.endswith(".md")
    )
    yield "llms-full.txt", "\n\n".join(pages)
    for match, path in reversed(links):
        address = (config.site_url or "") + _address(path)
        text = f"{text[: match.start('path')]}{address}{text[match.end('path') :]}"
    yield "llms.txt", text


def _links(text: str, path: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each link outside code to something that is in the repository, with its path from the root."""
    blocks = [match.span() for match in FENCE.finditer(text)]
    for match in LINK.finditer(text):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
        if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
            target = f"{target}/README.md"
        in_code = any(begin <= match.start() < end for begin, end in blocks)
        if not in_code and not target.startswith("..") and (ROOT / target).exists():
            yield match, target


def _is_a_page(path: str) -> bool:
    """Whether a file is shown as a page; data and pictures of docs/ are files of the site as they are."""
    return path.endswith(".md") or not (path.startswith("docs/") or path == "llms.txt")


def _site_uri(path: str) -> str:
    """Path of a repository's file among the sources of the site."""
    if path.startswith("docs/") or path == "llms.txt":
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _address(path: str) -> str:
    """Its path in the built site."""
    uri = _site_uri(path)
    if uri.endswith("README.md"):
        return posixpath.join(posixpath.dirname(uri), "index.html")
    return f"{uri.removesuffix('.md')}.html" if uri.endswith(".md") else uri


def _repository_path(uri: str) -> str:
    """The opposite."""
    if not uri.startswith("repository/"):
        return f"docs/{uri}"
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def _for_the_site(text: str, uri: str) -> str:
    path = _repository_path(uri)
    for match, target in reversed(list(_links(text, path))):
        relative = posixpath.relpath(_site_uri(target), posixpath.dirname(uri) or ".")
        text = f"{text[: match.start('path')]}{relative}{text[match.end('path') :]}"
    return text


def _page_text(path: str) -> str:
    """The page of a file: Markdown as it is, anything else as a block of code; of a folder, all that is in it."""
    if path.endswith(".md"):
        return (ROOT / path).read_text(encoding="utf-8")
    place = ROOT / path
    listed = sorted(file for file in place.iterdir() if file.is_file()) if place.is_dir() else [place]
    parts = [f"# {path}"]
    for file in listed:
        parts += [f"## {file.name}"] if place.is_dir() else []
        parts += [f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8').rstrip()}\n````"]
    return "\n\n".join(parts) + "\n"
