"""Recipe section `data`: sources of rows, their split, and the checks of their quality."""

import codecs
import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.recipe.base import Fraction, Positive, Section, WrittenAs

# `warn` says what was found, `fix` mends or drops the rows and keeps them with the reason, `fail` ends the run.
Action = Literal["off", "warn", "fix", "fail"]


class QualityChecks(Section):
    """Checks of the rows, each `off`, `warn`, `fix` or `fail`. What `fix` changes or drops is kept with its reason."""

    empty: Action = "warn"
    """Fields with next to nothing in them (rows with an empty one are rejected in any case); `fix` drops the row."""
    duplicates: Action = "warn"
    """Rows with the same content; `fix` keeps one."""
    near_duplicates: Action = "warn"
    """Rows nearly the same as another (MinHash over word shingles); `fix` keeps one."""
    leakage: Action = "warn"
    """Training rows nearly the same as a held-out one; `fix` drops them from training."""
    encoding: Action = "warn"
    """Text that was decoded with the wrong table, and replacement characters; `fix` mends what can be."""
    control_characters: Action = "warn"
    """Control characters but tab and line break; `fix` removes them."""
    turns: Action = "warn"
    """Conversations with unknown roles, or in which user and assistant do not take turns; `fix` drops them."""
    language: Action = "warn"
    """Rows in another language than `languages`; `fix` drops them. The mix is always shown."""
    secrets: Action = "warn"
    """Keys, tokens and passwords that look real; `fix` replaces them by `[SECRET]`."""
    emails: Action = "warn"
    """E-mail addresses that look real; `fix` replaces them by `[EMAIL]`."""
    few_rows: Action = "warn"
    """Fewer training rows than the method needs; there is nothing to fix."""
    same_answers: Action = "fix"
    """Preferences whose chosen and rejected answers are the same; `fix` drops them."""
    truncation: Action = "warn"
    """More than `truncated_share` of the rows longer than `max_length`; `fix` drops the rows that would be cut."""
    near_empty_characters: Positive = 3
    """Fields with fewer visible characters count as near-empty."""
    near_duplicate_threshold: Fraction = 0.85
    """Jaccard similarity of the words from which rows are near duplicates."""
    languages: list[Annotated[str, Field(pattern=r"^[a-z]{2,3}$")]] = []
    """Languages that are expected, as ISO 639 codes; any when left out."""
    truncated_share: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of rows that may be cut before `truncation` speaks up."""
    least_rows: Positive | None = None
    """Training rows below which `few_rows` speaks up; by the method when left out."""


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
    """One place that rows come from, where it differs from the others."""

    uri: str
    """File, folder, glob, a bucket (`s3://…`, `gs://…`, `az://…`), `hf://datasets/…` or a bundled source such as
    `builtin:support`."""
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often each training row is used in one pass: 2 twice, 0.25 a quarter of the rows, chosen by content."""
    format: Format | None = None
    """As `data.format`, for this source."""
    columns: Columns | None = None
    """As `data.columns`, for this source."""
    side: Side | None = None
    """Side on which all its rows lie: a given split. By content when left out."""


class SplitRule(Section):
    """Which rows are held out. A row's side depends on its content and `seed` alone, so growth never moves one."""

    eval: Annotated[float, Field(gt=0)] = 0.1
    """Rows held out for evaluation: below 1 a share, from 1 on a number. A number becomes the share it is of the rows
    that this store first sees under the recipe's name, and stays that share as the data grows. Not used where the
    source says which rows these are."""
    test: Size = 0.0
    """Rows that neither training nor evaluation during it sees, like `eval`; with them the result is judged where there
    are some."""
    stratify_by: str | None = None
    """Column of the source: each of its values is held out at the same share."""
    group_by: str | None = None
    """Column of the source: rows with the same value are never on two sides."""
    column: str | None = None
    """Column of the source that names a row's side: `train`, `eval` (also `validation`, `valid`, `val`, `dev`) or
    `test`."""

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
    """How tables of text (`.csv`, `.tsv`) are written, where their first records do not tell."""

    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Sign between fields, such as `";"` or `"\\t"`; found in the first records when left out."""
    encoding: str | None = None
    """Encoding, such as `cp1252`. UTF-8 when left out, and UTF-16 or UTF-32 where the file begins with its mark."""

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
    """Rows to learn from, and how they become tokens."""

    source: Annotated[list[str | DataSource], Field(min_length=1)]
    """File, folder, glob, a bucket (`s3://…`, `gs://…`, `az://…`), `hf://datasets/…` or a bundled source such as
    `builtin:support`; one or a list, whose members may be mappings with their own `weight`, `format`, `columns` or
    `side`."""
    format: Format = "auto"
    """Shape of a row; `auto` looks at the method and the columns of the first rows and says what it found; it knows the
    usual other names, such as `question` and `answer`. A preference has `chosen` and `rejected`, with a `prompt` or as
    whole conversations or texts, whose prompt is what both begin with (of texts to the end of a word, or up to the last
    `Assistant:`; the white space after it stays with the answers, so `separator: ""` keeps the text as it is). A ranked
    row has `responses`, a list or columns side by side (`response_1`, `response_2`), of which the best is paired with
    one below it that the content draws: by `scores`, by `ranks` (1 is best), by `preferred` (the best one's name, or
    its place from 0 in a list), by `margin` (of two; below 0 the first is better), or the best first in a list. A rated
    row has `prompt`, `completion` and `label`, true for a good one; a prompt may have an `answer` and further columns
    for reward functions; `tool-calls` has `prompt`, `calls` and `tools`. A row of messages takes its `tools` (or
    `functions`) and its `system` message (or `system_prompt`) from columns of these names; so does a row of texts
    that becomes turns."""
    columns: Columns = {}
    """Our column name → the source's, for example `{prompt: question, completion: answer}`; what lies within a column
    goes by its path: `reward_model.ground_truth`, `answers.text.0`. A list of columns is joined with `join`; of
    `responses`, `scores` and `ranks` it is the list."""
    join: str = "\n\n"
    """Put between columns that are joined; empty ones are left out."""
    reasoning: Literal["keep", "drop"] = "keep"
    """What the assistant thought before it answered (`reasoning_content`, `thinking` or `reasoning` of a message):
    `keep` leaves what becomes of it to the chat template; `drop` leaves it out of the rows, and with it a
    `<think>…</think>` that an answer begins with. Rows of plain text stay as they are."""
    extra_columns: list[str] = []
    """Further columns of the source to keep, as text: for reward functions and for `training.curriculum`."""
    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What one row of a text file is."""
    csv: Csv | None = None
    """How tables of text are written, where their first records do not tell."""
    separator: str = "\n"
    """Put between prompt and completion where they are rendered as text, and counted as prompt."""
    split: SplitRule = SplitRule()
    """Which rows are held out."""
    quality: QualityChecks = QualityChecks()
    """What is looked for in the rows, and what happens when it is found."""
    render_as: Literal["auto", "chat", "text"] = "auto"
    """How prompts and answers that are texts reach the model: `chat` as user and assistant turns in the chat template,
    without `separator` and without the preamble that instructions are else given; `text` as written. `auto` takes chat
    where `model.base` has a template or `model.chat_template` gives one; not for `pretrain`, and not with a tokenizer
    that Baton trained. Conversations are always rendered, and plain text never."""
    system: Annotated[str, Field(min_length=1)] | None = None
    """System message of conversations that have none of their own."""
    today: Annotated[datetime.date | None, WrittenAs("template_date")] = None
    """Day that chat templates are told which write today's date, such as Llama 3.2's. When left out, the day on which
    the run begins, in all its chunks; give it for runs that begin on other days and are to be the same."""
    max_length: Annotated[int, Field(ge=8)] = 512
    """Longest sequence in tokens; longer ones are cut at the end and counted."""
    packing: bool | Literal["best-fit"] = False
    """Fill sequences of `max_length` with rows: true joins them and cuts, for plain text; `best-fit` puts whole rows
    beside each other that do not see each other (flash attention makes it fast)."""
    train_on: Literal["all", "completions", "assistant", "last"] | None = None
    """What of a row counts in the loss: `all` of it; `completions`, of a prompt and its completion the completion, of
    texts and whole conversations all; `assistant`, in a conversation what the assistant wrote, each turn with its
    reasoning, its tool calls and the token that ends it, and of texts as `completions`; `last`, of a conversation its
    last turn alone. As `completions` when left out. Of a completion that is a list of messages, the assistant's turns
    count. A message's own `train` flag overrules all of these. The older `completion_only_loss` and
    `assistant_only_loss` are read as what they come to."""
    max_samples: Positive | None = None
    """Use at most this many rows: the first, or with `shuffle` those that their content and `seed` choose."""
    shuffle: bool = False
    """Choose the rows of `max_samples` from the whole source; only with that, as each pass has its own order anyway."""
    order: Literal["auto", "uniform", "blocks"] = "auto"
    """Order of a pass, a function of `seed` and its number: `uniform` shuffles all rows, as `Trainer` does; `blocks`
    shuffles the files that tokens lie in and then the rows of a few files together, so that a chunk fetches its own
    files alone. `auto` takes blocks from 1 GiB of tokens on, in one process without virtual workers."""
    workers: Positive | None = None
    """Processes that tokenize; the machine's cores when left out."""
    shards: Annotated[int, Field(json_schema_extra={"minimum": 1, "maximum": MAX_SHARDS})] = 1
    """Pods that tokenize, each with so many `workers`; a further one joins what they made. The tokens are the same for
    any number. Worth it from some GiB of text on: each pod fetches the split, and takes some 20 s to start."""
    max_rejected: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of rows that may be unreadable before the run stops; they are kept with their reasons. A file that breaks
    off hides an unknown number of rows and stops it at any share below 1."""

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
            raise ValueError(f"{' and '.join(given)} and train_on say the same; leave {' and '.join(given)} out")
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
