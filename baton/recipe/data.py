"""Recipe section `data`: sources of rows, their split, and the checks of their quality."""

import codecs
import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from baton.recipe.base import Fraction, Positive, Section, WrittenAs

# `warn` reports, `fix` repairs or drops the rows and keeps them with the reason, `fail` ends the run.
Action = Annotated[
    Literal["off", "warn", "fix", "fail"],
    BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads a bare `off` as false
]


class QualityChecks(Section):
    """Checks of the rows, each `off`, `warn`, `fix` or `fail`. Rows changed or dropped by `fix` are kept with the
    reason."""

    empty: Action = "warn"
    """Near-empty fields; `fix` drops the row. Rows with an empty field are always rejected."""
    duplicates: Action = "warn"
    """Rows with equal content; `fix` keeps one."""
    near_duplicates: Action = "warn"
    """Similar rows (MinHash over word shingles); `fix` keeps one."""
    leakage: Action = "warn"
    """Training rows similar to a held-out one; `fix` drops them from training."""
    encoding: Action = "warn"
    """Wrongly decoded text and replacement characters; `fix` repairs it where possible."""
    control_characters: Action = "warn"
    """Control characters except tab and line break; `fix` removes them."""
    turns: Action = "warn"
    """Conversations with unknown roles, or without alternating user and assistant; `fix` drops them."""
    language: Action = "warn"
    """Rows in a language outside `languages`; `fix` drops them. The mix is always shown."""
    secrets: Action = "warn"
    """Keys, tokens and passwords that look real; `fix` replaces them with `[SECRET]`."""
    emails: Action = "warn"
    """E-mail addresses that look real; `fix` replaces them with `[EMAIL]`."""
    few_rows: Action = "warn"
    """Fewer training rows than the method needs; `fix` has no effect."""
    same_answers: Action = "fix"
    """Preferences with equal chosen and rejected answers; `fix` drops them."""
    truncation: Action = "warn"
    """More than `truncated_share` of rows exceed `max_length`; `fix` drops those rows."""
    near_empty_characters: Positive = 3
    """Visible characters below which a field is near-empty."""
    near_duplicate_threshold: Fraction = 0.85
    """Jaccard similarity of words above which rows are near duplicates."""
    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]] = []
    """Expected languages, as ISO 639 codes; default: any."""
    truncated_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of truncated rows that `truncation` accepts."""
    least_rows: Positive | None = None
    """Training rows that `few_rows` requires; default: by method."""


# Baton's column names, to which `data.columns` maps the source's own.
COLUMNS = (
    "text", "prompt", "completion", "instruction", "input", "output", "messages", "conversations", "chosen", "rejected",
    "responses", "scores", "ranks", "preferred", "margin", "label", "answer", "calls", "tools", "system",
)  # fmt: skip

Format = Literal[
    "auto", "text", "prompt-completion", "instruction", "messages", "sharegpt", "preference", "ranked", "rated",
    "prompt", "tool-calls",
]  # fmt: skip
Side = Literal["train", "eval", "test"]
MAX_SHARDS = 64  # most pods: a file has about 64 segments up to 1 GiB of text, see `baton.data.tokenize`
Columns = dict[str, str | list[str]]

# Former keys, still read, that `data.train_on` has replaced.
OLDER = frozenset({"assistant_only_loss", "completion_only_loss"})

Size = Annotated[float, Field(ge=0)]  # below 1 a share of the rows, from 1 on a number of rows


class DataSource(Section):
    """One source of rows, with settings that differ from the others."""

    uri: str
    """File, folder, glob, bucket (`s3://…`, `gs://…`, `az://…`), `hf://datasets/…` or `builtin:stdlib-docs`."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Uses of each training row per pass: 2 twice, 0.25 a quarter of the rows, chosen by content."""
    format: Format | None = None
    """Same as `data.format`, for this source."""
    columns: Columns | None = None
    """Same as `data.columns`, for this source."""
    side: Side | None = None
    """Side of all its rows, for a given split; default: by content."""


class SplitRule(Section):
    """Held-out rows. Content and `seed` alone decide a row's side, so added rows never move others."""

    eval: Annotated[float, Field(gt=0)] = 0.1
    """Rows held out for evaluation: below 1 a share, from 1 a number. A number becomes a fixed share of the rows first
    stored under the recipe's name. Ignored where the source has its own split."""
    test: Size = 0.0
    """Rows held out as for `eval`, unseen until the final evaluation, which then uses them."""
    stratify_by: str | None = None
    """Source column; each value is held out at the same share."""
    group_by: str | None = None
    """Source column; rows with equal values stay on one side."""
    column: str | None = None
    """Source column with a row's side: `train`, `eval` (or `validation`, `valid`, `val`, `dev`) or `test`."""

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        rules = [name for name in ("stratify_by", "group_by", "column") if getattr(self, name)]
        if len(rules) > 1:
            raise ValueError(f"{' and '.join(rules)} each decide a row's side; leave {len(rules) - 1} of them out")
        shares = [size for size in (self.eval, self.test) if size < 1]
        if sum(shares) >= 1:
            raise ValueError(f"eval {self.eval:g} and test {self.test:g} leave no rows to train on; hold out fewer")
        return self


class Csv(Section):
    """Format of text tables (`.csv`, `.tsv`), where detection fails."""

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Separator of fields, such as `";"` or `"\\t"`; default: detected in the first records."""
    encoding: str | None = None
    """Encoding, such as `cp1252`. Default: UTF-8, or UTF-16 and UTF-32 by byte order mark."""

    @field_validator("delimiter")
    @classmethod
    def _no_quote(cls, value: str | None) -> str | None:
        if value is not None and (value in '"\r\n ' or not (value.isprintable() or value == "\t")):
            raise ValueError(f"is {value!r}, which cannot separate fields; write ',', ';', '|' or \"\\t\"")
        return value

    @field_validator("encoding")
    @classmethod
    def _known_encoding(cls, value: str | None) -> str | None:
        try:
            "a".encode(value or "utf-8")
            codecs.getincrementaldecoder(value or "utf-8")
        except (LookupError, ValueError):
            raise ValueError(f"is {value!r}, which Python does not know; write utf-8, utf-16 or cp1252") from None
        return value


class Data(Section):
    """Training rows and their tokenization."""

    source: Annotated[list[str | DataSource], Field(min_length=1)]
    """File, folder, glob, bucket (`s3://…`, `gs://…`, `az://…`), `hf://datasets/…` or `builtin:stdlib-docs`; one or a
    list. A mapping sets `weight`, `format`, `columns` or `side` of its source."""
    format: Format = "auto"
    """Shape of a row; docs/guides/data.md has the columns of each. `auto` detects it from the method and the first
    rows' columns, and prints it."""
    columns: Columns = {}
    """Baton's column name → the source's: `{prompt: question, completion: answer}`. Paths reach inside a column:
    `reward_model.ground_truth`, `answers.text.0`. Lists of columns are joined with `join`, except for `responses`,
    `scores` and `ranks`."""
    join: str = "\n\n"
    """Text between joined columns; empty columns are skipped."""
    reasoning: Literal["keep", "drop"] = "keep"
    """Reasoning of the assistant (`reasoning_content`, `thinking`, `reasoning`). `keep` passes it to the chat template;
    `drop` removes it, and a `<think>…</think>` at the start of an answer. Plain text is unchanged."""
    extra_columns: list[str] = []
    """Further source columns to keep, as text, for reward functions and `training.curriculum`."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """Unit of one row in a text file."""
    csv: Csv | None = None
    """Format of text tables, where detection fails."""
    separator: str = "\n"
    """Text between prompt and completion when rendered as text; part of the prompt."""
    split: SplitRule = SplitRule()
    """Held-out rows."""
    quality: QualityChecks = QualityChecks()
    """Checks of the rows, and the action for each."""
    render_as: Literal["auto", "chat", "text"] = "auto"
    """Rendering of text prompts and answers. `chat`: user and assistant turns in the chat template, without `separator`
    and instruction preamble; `text`: unchanged. `auto`: chat where `model.base` or `model.chat_template` has a
    template, except with `pretrain` or a tokenizer trained by Baton. Conversations are always rendered."""
    system: Annotated[str, Field(min_length=1)] | None = None
    """System message for conversations without one."""
    today: Annotated[datetime.date | None, WrittenAs("template_date")] = None
    """Date for chat templates that print today's, such as Llama 3.2's; default: the day the run begins. Set it to make
    runs of different days identical."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens; longer ones are truncated and counted."""
    packing: bool | Literal["best-fit"] = False
    """Fill sequences of `max_length` with rows. True joins and cuts plain text. `best-fit` packs whole rows, isolated
    from each other; fast with flash attention."""
    train_on: Literal["all", "completions", "assistant", "last"] | None = None
    """Tokens in the loss; docs/guides/data.md has a table. `all`: the whole row; `completions`, the default: the
    completion of a prompt; `assistant`: the assistant's turns; `last`: a conversation's last turn. A message's own
    `train` flag takes precedence. The former `completion_only_loss` and `assistant_only_loss` are still read."""
    max_samples: Positive | None = None
    """Most rows to use: the first, or with `shuffle` a choice by content and `seed`."""
    shuffle: bool = False
    """Choose the rows of `max_samples` from the whole source. Each pass is shuffled in any case."""
    order: Literal["auto", "uniform", "blocks"] = "auto"
    """Order of a pass, by `seed` and its number. `uniform` shuffles all rows, as `Trainer` does. `blocks` shuffles
    token files, then rows of a few files together, so a chunk fetches only its own. `auto`: blocks from 1 GiB of
    tokens, in one process without virtual workers."""
    workers: Positive | None = None
    """Processes that tokenize; default: the machine's cores."""
    shards: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_SHARDS})] = 1
    """Pods that tokenize, each with `workers` processes, with the same tokens for any number. Use it from a few GiB of
    text: each pod fetches the split, and takes 20 s to start."""
    max_rejected: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of unreadable rows that ends the run; they are kept with reasons. A truncated file ends it at any share
    below 1."""

    @property
    def sources(self) -> list[DataSource]:
        return [DataSource(uri=source) if isinstance(source, str) else source for source in self.source]

    @property
    def older_train_on(self) -> dict[str, bool | str]:
        """Former keys of `train_on` in digests: digests stay where tokens do."""
        older: dict[str, bool | str] = {
            "completion_only_loss": self.train_on != "all",
            "assistant_only_loss": self.train_on in ("assistant", "last"),
        }
        return older | ({"train_on": self.train_on} if self.train_on in ("assistant", "last") else {})

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, value: Any) -> Any:
        given = {key: value[key] for key in sorted(OLDER) if key in value} if isinstance(value, dict) else {}
        if not given:
            return value
        if value.get("train_on") is not None:
            raise ValueError(f"{' and '.join(given)} and train_on set the same; remove {' and '.join(given)}")
        if not all(isinstance(setting, bool) for setting in given.values()):
            raise ValueError(f"{' and '.join(given)} are true or false; better write train_on")
        read_as = "assistant" if given.get("assistant_only_loss") else None
        read_as = "all" if read_as is None and not given.get("completion_only_loss", True) else read_as
        return {key: item for key, item in value.items() if key not in OLDER} | {"train_on": read_as}

    @field_validator("source", mode="before", json_schema_input_type=str | list[str | DataSource])
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value

    @model_validator(mode="after")
    def _groups_stay_together(self) -> Self:
        assigned = next((source.uri for source in self.sources if source.side), None)
        if self.split.group_by and assigned:
            raise ValueError(
                f"split.group_by keeps rows of one value on one side, and the side of {assigned} is given; "
                "leave one out"
            )
        return self

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: Columns) -> Columns:
        for name in value:
            if name not in COLUMNS:
                raise ValueError(f"maps {name!r}, which is none of {', '.join(COLUMNS)} (ours on the left side)")
        return value
