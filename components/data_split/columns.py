"""What columns are called: ours, and the names that public data sets have for them."""

from __future__ import annotations

PROMPTS = ("prompt", "question.full_text", "question.problem", "question.text", "question", "query", "problem", "input")
ANSWERS = ("completion", "response", "solution", "answer.0", "answer", "output")
"""A worked solution goes before the bare answer beside it."""
JUDGED = ("preferred", "winner", "choice", "better_response_id", "preference")
MARGINS = ("margin", "preference_strength", "overall_preference")
TOOLS = ("tools", "functions")
NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "messages": {"messages": ("messages",)},
    "sharegpt": {"conversations": ("conversations", "conversation")},
    "prompt-completion": {"prompt": PROMPTS, "completion": ANSWERS},
    "instruction": {"instruction": ("instruction",), "output": ("output", "response", "completion", "answer")},
    "text": {"text": ("text", "content")},
    "rated": {"prompt": PROMPTS, "completion": ANSWERS, "label": ("label", "kto_tag", "is_correct", "is_safe")},
    "preference": {"chosen": ("chosen", "response_j"), "rejected": ("rejected", "response_k")},
    "ranked": {
        "prompt": (*PROMPTS, "instruction", "context", "history", "info.post", "title"),
        "responses": ("responses", "completions", "answers.text", "answers", "summaries"),
    },
    "prompt": {"prompt": PROMPTS},
    "tool-calls": {"prompt": PROMPTS, "calls": ("calls", "answers", "tool_calls"), "tools": TOOLS},
}
"""Columns each format needs, in the order in which formats are tried: our name → the names it goes by, ours first. A
dot is a step into a column, `[]` a list."""

OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {
    "instruction": {"input": ("input", "context")},
    "preference": {"prompt": (*PROMPTS, "instruction", "trajectory")},
    "ranked": {
        "scores": ("scores", "ratings", "answers.score"),
        "ranks": ("ranks",),
        "preferred": JUDGED,
        "margin": MARGINS,
    },
    "prompt": {
        "answer": (
            "answer", "solution", "ground_truth", "reward_model.ground_truth", "question.ground_truth_answer",
            "expected_answer", "final_answer",
        ),
    },
}  # fmt: skip
"""Columns a format takes where they are there."""

BESIDE: dict[str, tuple[str, ...]] = {"tools": TOOLS, "system": ("system", "system_prompt")}
"""Columns that go with a row of messages, whatever its format: rows of texts have no place for them."""

EARLIER = "history[]"
"""Column of earlier rounds, each a question and its answer, beside a prompt that is a text."""

TALKS = ("messages", "sharegpt", "tool-calls")
"""Formats whose rows are messages, always."""

_WHOLE = ("messages", "conversations", "conversation")

OTHERWISE: dict[str, tuple[dict[str, tuple[str, ...] | list[str]], ...]] = {
    "sharegpt": ({"conversations": ("dialog[]", "data[]")}, {"conversations": ("chat",), "system": ("system",)}),
    "prompt-completion": (
        {"prompt": ["context", "question"], "completion": ("answers.text.0",)},
        {
            "prompt": (*PROMPTS, "inputs", "document", "article", "dialogue"),
            "completion": (
                *ANSWERS, "targets", "target", "generated_solution", "canonical_solution", "best_answer", "long_answer",
                "code", "summary", "highlights",
            ),
        },
    ),
    "text": ({"text": ("raw_content", "whole_func_string", "code", "article", "document")},),
    "ranked": ({"responses": ()},),
    "rated": ({"completion": _WHOLE, "label": NEEDED["rated"]["label"]},),
    "prompt": ({"prompt": _WHOLE, "answer": OPTIONAL["prompt"]["answer"]},),
}  # fmt: skip
"""Columns that make a format where no other has what it needs: a list of columns is joined. Rated conversations, and
responses that the recipe maps, hold their prompt."""

WRITTEN: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("prompt", "completion"),
    "text": ("text",),
    "rated": ("prompt", "completion", "label"),
    "preference": ("prompt", "chosen", "rejected"),
    "ranked": ("prompt", "chosen", "rejected"),
    "prompt": ("prompt", "answer"),
    "tool-calls": ("prompt", "completion"),
}
"""Columns that rows of each format come out with."""

LIKE: dict[str, str] = {
    "text": "text|body|content|document|article|story|passage",
    "prompt": "prompt|quest|^q$|query|ask|instruct|input|problem|user|human|message|convers|dialog",
    "completion": "complet|answer|^a$|respon|output|reply|solution|target|assistant|chosen|generat",
    "instruction": "instruct|prompt|quest|^q$|task",
    "output": "output|respon|answer|^a$|complet|reply",
    "messages": "messag|convers|dialog|chat|turns",
    "conversations": "convers|messag|dialog|chat|turns",
    "chosen": "chosen|prefer|better|best|good|win|accept|positive",
    "rejected": "reject|worse|worst|bad|los|negative",
    "responses": "respon|answer|complet|candidate|generat|summar|output",
    "label": "label|rating|is_|thumb|vote|good|correct",
    "calls": "call",
    "tools": "tool|function",
}
"""What a name that is not known may mean: our name → a pattern in it, for hints."""
ASIDE = r"(id|uuid|lang|language|url|date|time|timestamp|index|idx|source|category|split|score|rank|count|hash|system)$"
"""Names that say something about a row."""
IN_ORDER = ("prompt-completion", "instruction", "text", "messages", "sharegpt", "prompt")
"""Formats whose columns may be guessed by their order: no side of them is worse than another."""
MANY = ("messages", "conversations", "responses", "calls", "tools")
"""Columns of ours that are lists."""

SIDE_BY_SIDE = ("responses", "scores", "ranks")
"""Columns of ours that are lists: several of the source's make one, and are not joined."""

_STEMS = (
    "response", "answer", "completion", "output", "conversation", "human_ref", "summary", "candidate", "generation",
)  # fmt: skip
_ENDINGS = tuple(
    [f"{joint}{mark}" for mark in marks] for joint in ("_", "") for marks in ("12345678", "01234567", "abcdefgh")
)


def find(name: str, present: list[str], any_case: bool = True) -> str | None:
    """Returns the column or path of that name, whatever its case; None where there is none."""
    bare = name.removesuffix("[]")
    if bare in present:
        column = bare
    else:
        column = min((each for each in present if any_case and each.lower() == bare.lower()), default="")
    return column if column and (bare == name or f"{column}.0" in present) else None


def side_by_side(present: list[str], judged: bool = False) -> dict[str, str | list[str]] | None:
    """Returns the columns of answers that stand side by side (`response_1`, `response_2`), and, unless that is known,
    what says which of them is better: scores or ranks of the same endings, or a column for all of them."""
    for stem in _STEMS:
        for endings in _ENDINGS:
            there = []
            for ending in endings:
                if (name := find(f"{stem}{ending}", present)) is None:
                    break
                there.append((ending, name))
            if len(there) < 2:
                continue
            responses: dict[str, str | list[str]] = {"responses": [name for _, name in there]}
            if judged:
                return responses
            for ours, names in (("preferred", JUDGED), ("margin", MARGINS)):
                if judge := next(filter(None, (find(name, present) for name in names)), None):
                    return responses | {ours: judge}
            for ours, forms in (
                ("scores", ("score{0}", "{1}{0}_score", "rating{0}", "winner_model{0}")),
                ("ranks", ("rank{0}", "{1}{0}_rank")),
            ):
                for form in forms:
                    judges = [name for ending, _ in there if (name := find(form.format(ending, stem), present))]
                    if len(judges) == len(there):
                        return responses | {ours: judges}
    return None
