"""Text of others, shown on a terminal and in pages: rows, messages that quote them, answers. It is read, no more."""

from __future__ import annotations

import io
import json
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from jinja2 import nodes
from rich.console import Console
from rich.errors import MarkupError
from rich.progress import Progress
from rich.text import Text

from baton import events
from baton.cli import display, options
from baton.errors import UserError
from baton.kfp.processes import TrialFailed
from baton.pages import html
from baton.terminal import Terminal, visible

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    {path.parent for room in ("baton", "components", "pipelines") for path in (ROOT / room).glob("**/*.j2")}
)
TEMPLATES = {path.name: path for folder in FOLDERS for path in folder.glob("*.html.j2")}
PARTS = {"macros.html.j2", "page.html.j2", "seen.html.j2"}
"""What pages extend, import and include."""
HOSTILE = (
    "</p></style><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"
    '<svg onload="document.title=\'pwned\'"><a href="javascript:document.title=\'pwned\'">x</a>" {{ 7*7 }}'
)
ESCAPES = "\x1b[2J\x1b]0;pwned\x07\x1b]8;;https://evil.test\x1b\\click\x9b31m\u202egnp.exe"
"""Clears the screen, names the window, makes a link, sets a colour in the eight-bit way, and turns the text around."""
MARKUP = "[/red] [link=https://evil.test]click[/link] [red]"


def test_commands_to_a_terminal_are_written_out() -> None:
    shown = visible(f"a\tb\n{ESCAPES} 日本 🙂")
    assert shown == (
        "a\tb\n\\x1b[2J\\x1b]0;pwned\\x07\\x1b]8;;https://evil.test\\x1b\\click\\x9b31m\\u202egnp.exe 日本 🙂"
    )


@pytest.mark.parametrize("kind", [Terminal, Console])
def test_what_is_printed_is_shown_and_not_obeyed(kind: type[Console]) -> None:
    file = io.StringIO()
    out = kind(file=file, force_terminal=True, color_system="standard", width=200)
    out.print(Text(ESCAPES, "bold green"))
    out.print(ESCAPES, markup=False)
    assert ("\x1b[2J" in file.getvalue()) is (kind is Console), "rich alone lets them through"
    assert file.getvalue().startswith("\x1b[1;32m"), "its own colours are as ever"


def test_progress_still_moves_the_cursor() -> None:
    file = io.StringIO()
    with Progress(console=Terminal(file=file, force_terminal=True)) as bar:
        bar.add_task(f"a{ESCAPES}", total=2)
        bar.refresh()
    assert "\x1b[2K" in file.getvalue()
    assert "\x1b[2J" not in file.getvalue()


EVENTS = [
    events.Rejected(1, 9, f"rows.csv line 3: column 'side' is '{MARKUP}{ESCAPES}'", "s/r"),
    events.Quality("warn", MARKUP + ESCAPES, MARKUP),
    events.Source(MARKUP + ESCAPES, "text", {}),
    TrialFailed("t001", 2, MARKUP + ESCAPES),
]


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_a_run_says_of_its_rows_is_text(
    event: events.Event, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MarkupError):
        Text.from_markup(f"[yellow]{MARKUP}[/]")  # what ended `baton run` where a row held it
    file = io.StringIO()
    console = Terminal(file=file, force_terminal=terminal, color_system=None, width=400)
    monkeypatch.setattr(display, "console", console)
    with display.Display(0) as shown:
        for each in (events.Stage("data split", "started"), event, events.Stage("data split", "done")):
            shown.heard(each)
    assert MARKUP.replace(" ", "") in file.getvalue().replace(" ", "").replace("\n", "")
    assert not any(command in file.getvalue() for command in ("\x1b[2J", "\x1b]", "\x9b", "\u202e"))


def on_terminal(*command: str) -> str:
    """What a command writes to a terminal."""
    leader, follower = pty.openpty()
    with open(leader, "rb", buffering=0) as reader:
        process = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL)
        subprocess.run(["true"], stdout=follower, check=True)
        import os

        os.close(follower)
        written = b""
        try:
            while block := reader.read(65536):
                written += block
        except OSError:  # how a terminal says that nobody writes to it any more
            pass
        assert process.wait() in (0, 2), written.decode(errors="replace")
    return written.decode(errors="replace")


@dataclass(frozen=True)
class Shown:
    """What `baton data show` has written of hostile rows.

    Attributes:
        terminal: To a terminal.
        page: Its page.
    """

    terminal: str
    page: Path


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, tiny_base: str) -> Shown:
    """Rows whose texts, columns and file mean mischief."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [
        {"prompt": f"{MARKUP}{ESCAPES}{HOSTILE}", "completion": f"{n}{ESCAPES}{HOSTILE}", HOSTILE: HOSTILE}
        for n in range(8)
    ]
    (folder / "[b]<img src=x onerror=alert(1)>.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {"name": "x", "model": {"base": tiny_base}, "data": {"source": "*.jsonl", "extra_columns": [HOSTILE]}}
    (folder / "r.yaml").write_text(json.dumps(recipe))
    command = (
        sys.executable,
        "-m",
        "baton",
        "data",
        "show",
        f"{folder}/r.yaml",
        "--page",
        f"{folder}/p.html",
    )
    return Shown(on_terminal(*command), folder / "p.html")


def test_rows_on_a_real_terminal(shown: Shown) -> None:
    assert "\\x1b[2J\\x1b]0;pwned" in shown.terminal.replace("\r\n", "")
    assert not any(command in shown.terminal for command in ("\x1b[2J", "\x1b]0", "\x1b]8", "\x9b", "\u202e"))


def test_an_error_that_quotes_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), options.answer(json=False):
        raise UserError(f"row 3 is {ESCAPES}")
    assert capsys.readouterr().err.count("\\x1b") == 4


def test_there_are_templates() -> None:
    assert {"run_page.html.j2", "seen.html.j2", "quality.html.j2", "sweep.html.j2", "audit.html.j2"} <= set(TEMPLATES)


@pytest.mark.parametrize("name", sorted(set(TEMPLATES) - PARTS))
def test_every_page_forbids_scripts_and_escapes_what_it_is_given(name: str) -> None:
    environment = html.environment(*{path.parent for path in TEMPLATES.values()})
    assert environment.autoescape is True
    seen, asked = set[str](), [name]
    while asked:
        source = environment.loader.get_source(environment, asked.pop())[0]  # type: ignore[union-attr]
        tree = environment.parse(source)
        assert not list(tree.find_all((nodes.MarkSafe, nodes.ScopedEvalContextModifier)))
        assert not [each for each in tree.find_all(nodes.Filter) if each.name == "safe"]
        named = [each.template for each in tree.find_all((nodes.Extends, nodes.Include))]
        parents = [each.value for each in named if isinstance(each, nodes.Const)]
        if len(parents) < len(named):  # chosen when it is rendered
            assert asked == []
            assert name == "watch.html.j2"
            parents += ["run_page.html.j2", "sweep.html.j2"]
        seen.update(parents)
        asked += parents
    assert "page.html.j2" in seen
    page = environment.loader.get_source(environment, "page.html.j2")[0]  # type: ignore[union-attr]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    ours = "{% if scripted | default(false) %}; script-src '{{ script_digest(live | default(false)) }}'{% endif %}"
    asks = "{% if live | default(false) %}; connect-src 'self'{% endif %}"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}{ours}{asks}">' in page


class Elements(HTMLParser):
    """The elements of a page, and those of their attributes that could load or run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.risky: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.risky += [
            f"{name}={value}"
            for name, value in attrs
            if name.startswith("on")
            or (name in ("src", "href", "data", "action") and not (value or "").startswith(("#", "https:", "../")))
        ]


def test_rows_in_their_page_are_text(shown: Shown) -> None:
    page = shown.page.read_text()
    assert page.count("document.title=") >= 8
    elements = Elements(page)
    assert not {"script", "img", "svg", "a", "iframe"} & elements.names
    assert elements.risky == []
    control = Elements(f"<html>{HOSTILE}</html>")
    assert {"script", "img", "svg", "a"} <= control.names
    assert len(control.risky) >= 2


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def title(page: Path, tmp_path: Path) -> str:
    """The title of a page once a browser has loaded it, its scripts run."""
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found, done.stdout[:500]
    return found[1]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_no_script_runs(shown: Shown, tmp_path: Path) -> None:
    assert "pwned" not in title(shown.page, tmp_path)
    # Even unescaped: the page's own policy forbids scripts.
    page = shown.page.read_text()
    body = page.index("<body")
    unescaped = page[: page.index(">", body) + 1] + HOSTILE + page[page.index(">", body) + 1 :]
    (tmp_path / "unescaped.html").write_text(unescaped)
    assert "pwned" not in title(tmp_path / "unescaped.html", tmp_path)
    (tmp_path / "plain.html").write_text(f"<html><head><title>plain</title></head><body>{HOSTILE}</body></html>")
    assert title(tmp_path / "plain.html", tmp_path) == "pwned"
