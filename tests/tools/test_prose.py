"""Prose rules: sentences that fail, similar ones that pass, and the places that are read."""

import pytest

from tools import prose

FAILS = {
    "What is wrong is printed.": "what … is",
    "Print what was found in the rows.": "what … is",
    "Read what the last run is about.": "what … is",
    "What the trainer needs.": "opens with What",
    "Where metrics go.": "opens with Where",
    "Train it. Which rows are drawn depends on the seed.": "opens with Which",
    "**Whose** signature counts.": "opens with Whose",
    "Measure it beside a plain script.": "beside(s)",
    "Besides, it is slow.": "beside(s)",
    "Each phase starts from the one before.": "the one before",
    "The one that trained best wins.": "the one that",
    "Take two of those.": "of those",
    "A list, one of which is whole.": "of which",
    "Rows nobody reads.": "nobody",
    "The store lies in a bucket.": "lie",
    "Files lie below the run.": "lie",
    "A key that stands twice.": "stand",
    "The recipe says so.": "say",
    "A chunk leaves a message.": "leaves",
    "Build it anew.": "anew",
    "`fix` mends the rows.": "mend",
    "That comes to 40 GB.": "come to",
    "Each loss is looked at.": "looked at",
    "That is to say, never.": "that is to say",
    "Chunks hand on to each other.": "hand on",
    "The pod goes away.": "go away",
    "GPUs are dear.": "dear",
    "The image brings along torch.": "bring along",
    "The setting is not taken over.": "taken over",
    " ".join(["word"] * 26) + ".": "26 words",
    "Short. " + "Word" + " word" * 29 + ". Short.": "30 words",
}
PASSES = [
    "Return the newest committed checkpoint.",
    "Set whatever your cluster needs.",
    "Save somewhere else, e.g. in a bucket.",
    "Understand the standard: a stand-alone, outstanding pod.",  # words that contain banned ones
    "Beliefs, allies and recommended amendments.",
    "Turn on the light; 40 GB is enough.",
    "Run `what is this` or `nobody`.",  # code
    "Read [the guide](beside/what-is.md) and https://example.org/lies.",
    "Use " + ", ".join(f"`name_{number}`" for number in range(40)) + ".",  # a list of names is one word
    " ".join(["word"] * 25) + ".",
    " ".join(["word"] * 15) + ". " + " ".join(["Word"] * 15) + ".",
    " ".join(["word"] * 15) + ", 0.5 and v1.2.3 of baton.data.",  # a point within a word ends nothing
]
PAGE = """\
# What fails here

Fine. The store
lies there.

```sh
echo nobody  # beside
```

| key | meaning |
|---|---|
| `anew` | Where rows go. |

- A list item. Which is bad.
  It goes on.

<!-- nobody -->
"""
MODULE = '''
"""Says it."""

x = 1  # nobody reads it
y = 2  # fine


def load(path: str) -> None:
    """Return the rows.

    Args:
        path: The file that lies there.
    """
    # A comment of two lines,
    # anew.
    raise ValueError(f"{path}: the rows of this file lie outside of the {x} folder")


NAME = "lies"
'''
TEMPLATE = """\
{% extends "page" %}{# nobody #}
{% block style %}.lies { top: 0; }{% endblock %}
<p class="beside">Rows of {{ "What anew" }}
lie here{% if it %}. Which is bad{% endif %}.</p>
{{ figure(plot, 'The ends of chunks over all steps, said twice') }}
<script>let nobody;</script>
"""


@pytest.mark.parametrize(("text", "rule"), FAILS.items(), ids=FAILS.values())
def test_fault_is_found(text: str, rule: str) -> None:
    assert rule in [found for found, _ in prose.check(text)]


@pytest.mark.parametrize("text", PASSES)
def test_similar_text_passes(text: str) -> None:
    assert list(prose.check(text)) == []


def test_length_counts_only_with_a_limit() -> None:
    assert list(prose.check(" ".join(["word"] * 60), limit=None)) == []


def test_page_without_code_and_comments() -> None:
    found = [(passage.line, rule) for passage in prose.markdown("a.md", PAGE) for rule, _ in prose.check(passage.text)]
    assert found == [(1, "opens with What"), (3, "lie"), (12, "opens with Where"), (14, "opens with Which")]


def test_generated_page_is_left_to_its_source() -> None:
    assert list(prose.markdown("a.md", "<!-- Written by `make docs` from x. -->\n\nNobody reads it.\n")) == []


def test_module_with_docstrings_comments_and_messages() -> None:
    found = {
        (passage.line, passage.kind, rule)
        for passage in prose.python("baton/x.py", MODULE)
        for rule, _ in prose.check(passage.text)
    }
    assert found == {
        (2, "docstring", "say"),
        (4, "comment", "nobody"),
        (12, "docstring", "lie"),
        (14, "comment", "anew"),
        (16, "message", "lie"),
    }


def test_template_without_tags_styles_and_scripts() -> None:
    found = [(passage.line, rule) for passage in prose.jinja("a.j2", TEMPLATE) for rule, _ in prose.check(passage.text)]
    assert found == [(5, "say"), (3, "lie"), (4, "opens with Which")]
