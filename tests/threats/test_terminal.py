"""What rows, messages and answers may do to the terminal that they are shown on: nothing."""

from __future__ import annotations

import io
import json
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.errors import MarkupError
from rich.progress import Progress
from rich.text import Text

from baton.components.shared.core import events
from baton.components.shared.core.errors import UserError
from baton.pipelines.cli import display, options, sweep_display
from baton.pipelines.local.processes import TrialFailed
from baton.pipelines.local.terminal import Terminal, visible

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
    monkeypatch.setattr(sweep_display, "console", console)
    with display.Display(0) as shown:
        heard = sweep_display.heard(shown.heard)
        for each in (events.Stage("data split", "started"), event, events.Stage("data split", "done")):
            heard(each)
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


def test_rows_on_a_real_terminal(tmp_path: Path, tiny_base: str) -> None:
    rows = [{"prompt": f"{MARKUP}{ESCAPES}", "completion": f"{ESCAPES}{number}"} for number in range(8)]
    (tmp_path / f"rows{MARKUP.replace('/', '')}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text(f"name: x\nmodel: {{base: {tiny_base}}}\ndata: {{source: '*.jsonl'}}\n")
    shown = on_terminal(
        *(sys.executable, "-m", "baton.pipelines", "data", "show", str(tmp_path / "r.yaml")),
        *("--page", str(tmp_path / "page.html")),
    )
    assert "\\x1b[2J\\x1b]0;pwned" in shown.replace("\r\n", "")
    assert not any(command in shown for command in ("\x1b[2J", "\x1b]0", "\x1b]8", "\x9b", "\u202e"))


def test_an_error_that_quotes_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), options.reported():
        raise UserError(f"row 3 is {ESCAPES}")
    assert capsys.readouterr().err.count("\\x1b") == 4
