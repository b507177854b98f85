"""The prose rule, checked: banned words, sentence openings and sentence length, part of `make lint`.

python -m tools.prose [PATH …]

Docs, command help and messages take all rules; docstrings and comments take all but the length of sentences. Docstrings
of `baton/recipe` and `baton/cli` are docs and help: the reference is written from them.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "baton")
HELP = ("baton/recipe/", "baton/cli/")  # docstrings here are docs and help
MAX_WORDS = 25
GENERATED = "Written by `make"  # pages written from docstrings, help or tests, which are checked themselves

# Rule → pattern, matched in the text without code. Plain words, in any case.
BANNED = {
    "what … is": r"what(?: [\w'-]+){0,4} (?:is|are|was|were)",
    "beside(s)": r"besides?",
    "the one before": r"the ones? before",
    "the one that": r"the ones? that",
    "of those": r"of those",
    "of which": r"of which",
    "of whose": r"of whose",
    "nobody": r"nobody",
    "lie": r"(?:lies?|lay|lain)(?!-)",
    "stand": r"(?:stands?|stood)(?!-)",
    "say": r"(?:says?|said)",
    "leaves": r"leaves",
    "anew": r"anew",
    "mend": r"mend(?:s|ed|ing)?",
    "come to": r"(?:comes|came|coming|come) to",
    "looked at": r"look(?:s|ed)? at",
    "that is to say": r"that is to say",
    "hand on": r"hand(?:s|ed|ing)? (?:on|out)",
    "go away": r"go(?:es|ne)? away",
    "dear": r"dear(?:er|est)?",
    "bring along": r"(?:brings?|brought) along",
    "taken over": r"taken over",
}
_BANNED = {rule: re.compile(rf"(?<![\w-]){pattern}(?!\w)", re.IGNORECASE) for rule, pattern in BANNED.items()}
OPENER = re.compile(r"(?:What|Where|Whose|Which)\b(?!-)")
SENTENCE_END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\betc)[.!?][\"')\]*_]*\s+(?=[\"'(\[*_]*[\w`\u2060])")
CODE = "\u2060"  # a word of code
TAG = "\0"  # a tag of a template, between two passages
_CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_CODE_LIST = re.compile(rf"{CODE}(?:(?:, | or | and |, or |, and | / ){CODE})+")
_WORD = re.compile(rf"[^\W_]|{CODE}")


@dataclass(frozen=True)
class Passage:
    """A piece of prose: a paragraph, cell, docstring, comment or message."""

    path: str
    line: int
    text: str
    kind: str


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def check(text: str, *, limit: int | None = MAX_WORDS) -> Iterator[tuple[str, str]]:
    """Yields broken rule and sentence for each fault of a Markdown text; without `limit`, sentences have any length."""
    plain = _plain(text)
    for sentence in SENTENCE_END.split(plain):
        shown = " ".join(sentence.replace(CODE, "`…`").split())
        for rule, pattern in _BANNED.items():
            if pattern.search(sentence):
                yield rule, shown
        if match := OPENER.match(sentence.lstrip("\"'([*_ ")):
            yield f"opens with {match[0]}", shown
        if limit is not None and (number := num_words(sentence)) > limit:
            yield f"{number} words", shown


def num_words(text: str) -> int:
    """Returns a plain text's number of words; a list of code names counts as one."""
    return sum(1 for word in _CODE_LIST.sub(CODE, text).split() if _WORD.search(word))


def _plain(text: str) -> str:
    text = _CODE_SPAN.sub(CODE, text)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)  # links: their text
    text = re.sub(r"https?://\S+|<[^>\s][^>]*>|[\w.-]*/[\w./-]+", CODE, text)  # addresses, tags, paths
    return " ".join(text.split())


def markdown(path: str, text: str) -> Iterator[Passage]:
    """Yields a page's paragraphs, list items, headings and cells; code blocks and generated pages have none."""
    if GENERATED in text[:2000]:
        return
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    block: list[str] = []
    first, fence = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip().lstrip("> ")
        if fence:
            fence = "" if stripped.startswith(fence) and not stripped.strip("`~") else fence
            continue
        opens = re.match(r"`{3,}|~{3,}", stripped)
        starts = not stripped or opens or re.match(r"[-*+] |\d+\. |#+ |\||!!! |\?\?\? |=== |<[/!a-zA-Z]", stripped)
        if starts and block:
            yield Passage(path, first, " ".join(block), "docs")
            block = []
        if opens:
            fence = opens[0]
        elif stripped.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", _CODE_SPAN.sub(CODE, stripped).strip("|")):
                if not re.fullmatch(r"[\s:-]*", cell):
                    yield Passage(path, number, cell.strip(), "docs")
        elif stripped.startswith("#"):
            yield Passage(path, number, stripped.lstrip("# "), "docs")
        elif stripped:
            first = first if block else number
            block.append(re.sub(r"^(?:[-*+]|\d+\.) (?:\[[ x]\] )?", "", stripped) if starts else stripped)


def python(path: str, text: str) -> Iterator[Passage]:
    """Yields a module's docstrings, comments and messages: literals of five words or more, f-strings as one."""
    tree = ast.parse(text)
    inside: set[int] = set()  # parts of an f-string, or bare texts
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            inside.add(id(node.value))
            kind = "help" if path.startswith(HELP) else "docstring"
            for offset, paragraph in _paragraphs(node.value.value):
                yield Passage(path, node.lineno + offset, paragraph, kind)
        elif isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else CODE for part in node.values]
            message = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            message = node.value
        else:
            continue
        if _is_prose(message):
            for offset, paragraph in _paragraphs(message):
                yield Passage(path, node.lineno + offset, paragraph, "message")
    comment: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if comment and (line != last + 1 or token.line[: token.start[1]].strip()):
                yield Passage(path, first, " ".join(comment), "comment")
                comment = []
            first = first if comment else line
            comment.append(token.string.lstrip("#: "))
            last = line if not token.line[: token.start[1]].strip() else -1
    if comment:
        yield Passage(path, first, " ".join(comment), "comment")


def jinja(path: str, text: str) -> Iterator[Passage]:
    """Yields a template's text between tags, and its literals for people."""

    def erase(pattern: str, mark: str) -> str:
        return re.sub(pattern, lambda match: mark + "\n" * match[0].count("\n"), text, flags=re.DOTALL)

    def passage(start: int, words: str) -> Passage:
        return Passage(path, text.count("\n", 0, start) + 1, words, "message")

    text = erase(r"\{#.*?#\}|<(style|script)\b.*?</\1>|\{% (?:block|macro) style\b.*?\{% end(?:block|macro) %\}", TAG)
    for tag in re.finditer(r"\{\{.*?\}\}|\{%.*?%\}", text, re.DOTALL):
        for literal in re.finditer(r"'([^'\n]*)'|\"([^\"\n]*)\"", tag[0]):
            if _is_prose(words := literal[1] or literal[2] or ""):
                yield passage(tag.start() + literal.start(), words)
    text = erase(r"\{\{.*?\}\}", CODE)
    text = erase(r"\{%.*?%\}|</?[a-z][^>]*>", TAG)
    for part in re.finditer(rf"[^{TAG}]*[^{TAG}\s]", text):
        yield passage(part.end() - len(part[0].lstrip()), part[0].strip())


def _is_prose(text: str) -> bool:
    """Tells whether a literal is for people: five words, and no markup, pattern or script."""
    return len(re.findall(r"(?:^|\s)[\"'(]*[A-Za-z]{2,}(?=[\s.,;:)\"']|$)", text)) >= 5 and not re.search(
        r"</|\\[sbwdn]|\(\?|[;{]\s*\n|^#!|function ?\(", text
    )


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields line offset and text of each paragraph or item; indented examples have none."""
    block: list[str] = []
    first, fenced = 0, False
    lines = text.split("\n")
    for offset, line in enumerate([*lines, ""]):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced, stripped = not fenced, ""
        elif fenced or stripped.startswith(("$ ", ">>> ", "python -m", "baton ")):
            stripped = ""
        if block and (not stripped or (re.match(r"[-*] |\d+\. |[\w*.` ]{1,40}: ", stripped) and _indent(line) > 0)):
            yield first, " ".join(block)
            block = []
        if stripped:
            first = first if block else offset
            block.append(stripped)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


READERS = {".md": markdown, ".py": python, ".j2": jinja}


def passages(paths: list[str]) -> Iterator[Passage]:
    """Yields the prose of files and of all pages, modules and templates below folders."""
    for given in paths:
        top = ROOT / given
        for file in [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.suffix in READERS):
            yield from READERS[file.suffix](file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))


def findings(paths: list[str]) -> Iterator[Finding]:
    """Yields the faults in files and folders."""
    for passage in passages(paths):
        limit = MAX_WORDS if passage.kind in ("docs", "help", "message") else None
        for rule, sentence in check(passage.text, limit=limit):
            yield Finding(passage.path, passage.line, rule, f"[{passage.kind}] {sentence}")


def main() -> int:
    """Prints the faults; 1 where there are some."""
    parser = argparse.ArgumentParser(description="Check prose in docs, help, messages, docstrings and comments.")
    parser.add_argument("paths", nargs="*", help="files and folders (default: all)")
    parser.add_argument("--count", action="store_true", help="print numbers by file and rule alone")
    arguments = parser.parse_args()
    found = list(findings(arguments.paths or list(CHECKED)))
    if arguments.count:
        for counted in (Counter(finding.path for finding in found), Counter(finding.rule for finding in found)):
            print(*(f"{number:6} {name}" for name, number in counted.most_common()), "", sep="\n")
    else:
        print(*found, sep="\n")
    print(f"{len(found)} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
