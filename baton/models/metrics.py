"""Metrics of text against references, with bootstrap intervals (Efron 1979), and the user's own measures."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch

from baton.errors import UserError, in_words
from baton.models import bootstrap, hooks, loading
from baton.models.rewards import final_number
from baton.recipe import extras
from baton.recipe.evaluation import FIGURES, ROUGE, Evaluation
from baton.recipe.methods import AGAINST_BASELINE
from baton.recipe.run import Hook

Array = bootstrap.Array
Interval = list[float]
Pairs = Sequence[tuple[str, str]]  # prompts and the rows' own answers, '' where a row has none
Function = Callable[..., Any]

BERTSCORE_REMEDY = "Name an encoder such as FacebookAI/roberta-large, with weights as safetensors."

Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Figure:
    statistics: Array  # each row's summands, of shape (rows, k); zeros where a row does not count
    compute: Callable[[Array], Array]  # from sums (draws, k) to figures (draws,), nan where no row counted
    each: list[float | None]  # of each row by itself
    better: Better | None = "higher"  # direction of the better model, None where not known

    @property
    def value(self) -> float:
        """The figure over all rows, nan where none counted."""
        return float(self.compute(self.statistics.sum(0, keepdims=True))[0])

    @property
    def not_measured(self) -> str | None:
        if math.isfinite(self.value):
            return None
        return "no row counted" if np.isfinite(self.statistics).all() and math.isnan(self.value) else "not finite"


def mean_figure(values: Sequence[float | None], *, better: Better | None = "higher") -> Figure:
    """Returns the mean of the rows' values; a row without one does not count."""
    numbers = [0.0 if value is None else value for value in values]
    return ratio_figure(numbers, [value is not None for value in values], list(values), better=better)


def ratio_figure(
    above: Sequence[float],
    below: Sequence[float],
    each: list[float | None] | None = None,
    *,
    better: Better | None = "higher",
) -> Figure:
    """Returns a sum over rows, divided by another: a loss per token, for example."""
    statistics = np.array([above, below], dtype=np.float64).T.reshape(-1, 2)
    return Figure(statistics, quotient, each if each is not None else [None] * len(statistics), better)


def constant_figure(value: float, *, better: Better | None = "higher") -> Figure:
    """Returns a number that is no sum over rows, and has no interval."""
    return Figure(np.zeros((0, 0)), lambda sums: np.full(len(sums), value), [], better)


def quotient(sums: Array) -> Array:
    """Returns the first of each pair of sums over the second, nan where that is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[:, 1] != 0, sums[:, 0] / sums[:, 1], np.nan)


def figure_values(figures: Mapping[str, Figure]) -> dict[str, float | None]:
    """Returns the figures as numbers, None where not measured."""
    return {name: None if figure.not_measured else figure.value for name, figure in figures.items()}


def intervals(models: Mapping[str, Mapping[str, Figure]], level: float, seed: int) -> dict[str, dict[str, Interval]]:
    """Returns percentile intervals of each model's figures and of the gains, `level` being the share of draws inside.

    An interval knows the rows alone: a share of 0 of 40 has one without width, and few rows make too narrow ones.
    """
    # Rows are drawn alike for all models: a difference is that of the same rows (paired bootstrap; Koehn 2004).
    drawn = {when: _drawn(figures, seed) for when, figures in models.items()}
    for name, against in (("gain", "before"), ("gain_on_production", "production")):
        theirs = drawn.get(against, {})
        drawn[name] = {
            figure: draws - theirs[figure]
            for figure, draws in drawn["after"].items()
            if figure in theirs and len(models["after"][figure].statistics) == len(models[against][figure].statistics)
        }
    ends = [(1 - level) / 2, (1 + level) / 2]
    return {
        when: {name: np.quantile(draws, ends).tolist() for name, draws in by_name.items() if np.isfinite(draws).all()}
        for when, by_name in drawn.items()
    }


def _drawn(figures: Mapping[str, Figure], seed: int) -> dict[str, Array]:
    """Returns each figure over rows drawn with replacement, of shape (`bootstrap.RESAMPLES`,)."""
    draws: dict[str, Array] = {}
    for rows in {len(figure.statistics) for figure in figures.values()} - {0}:
        same = {name: figure for name, figure in figures.items() if len(figure.statistics) == rows}
        sums = bootstrap.resampled(np.hstack([figure.statistics for figure in same.values()]), seed)
        ends = np.cumsum([figure.statistics.shape[1] for figure in same.values()])[:-1]
        for (name, figure), own in zip(same.items(), np.split(sums, ends, axis=1), strict=True):
            draws[name] = figure.compute(own)
    return {name: draws[name] for name in figures if name in draws}


@dataclass
class MetricResult:
    figures: dict[str, Figure] = field(default_factory=dict)  # over all rows; one without a reference does not count
    signatures: dict[str, str] = field(default_factory=dict)  # by figure, where a reference implementation has one


Metric = Callable[[Sequence[str], Sequence[str]], MetricResult]  # of completions and references


def exact_match(completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Returns the share of texts that are the reference, white space at the ends aside."""
    pairs = zip(completions, references, strict=True)
    same = [float(completion.strip() == truth.strip()) if truth else None for completion, truth in pairs]
    return MetricResult({"exact_match": mean_figure(same)})


def numeric_match(completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Returns the share of texts with the reference's number: that after `####`, else the last one."""
    pairs = zip(map(final_number, completions), map(final_number, references), strict=True)
    same = [None if truth is None else float(completion == truth) for completion, truth in pairs]
    return MetricResult({"numeric_match": mean_figure(same)})


def bleu(completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Returns sacreBLEU's corpus BLEU (Papineni et al. 2002, Post 2018), 0 to 100."""
    from sacrebleu.metrics import BLEU

    # A single row often has no four words in common, hence the effective order.
    return _corpus("bleu", BLEU(), BLEU(effective_order=True), completions, references)


def chrf(completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Returns sacreBLEU's corpus chrF2 (Popović 2015), 0 to 100."""
    from sacrebleu.metrics import CHRF

    return _corpus("chrf", CHRF(), CHRF(), completions, references)


def rouge(completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    """Returns the mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004), 0 to 1, without stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE))  # knows words of ASCII letters and digits alone
    rows = [
        scorer.score(truth, completion) if truth else None
        for completion, truth in zip(completions, references, strict=True)
    ]
    figures = {kind: mean_figure([row and row[kind].fmeasure for row in rows]) for kind in ROUGE}
    return MetricResult(figures, dict.fromkeys(ROUGE, f"rouge-score {version('rouge-score')}, F-measure, no stemming"))


# The function of each name in the recipe's `METRICS`; `bertscore` needs a model, and is `BertScore`.
METRICS: dict[str, Metric] = {name: globals()[name] for name in FIGURES if name != "bertscore"}


def _corpus(name: str, metric: Any, single: Any, completions: Sequence[str], references: Sequence[str]) -> MetricResult:
    rows = [at for at, truth in enumerate(references) if truth]
    if not rows:
        return MetricResult({name: mean_figure([None] * len(references))})
    counts = metric._extract_corpus_statistics([completions[at] for at in rows], [[references[at] for at in rows]])
    statistics = np.zeros((len(references), 1 + len(counts[0])))
    statistics[rows] = [[1, *row] for row in counts]
    each: list[float | None] = [None] * len(references)
    for at, row in zip(rows, counts, strict=True):
        each[at] = float(single._compute_score_from_stats(row).score)

    def compute(sums: Array) -> Array:
        return np.array(
            [metric._compute_score_from_stats(row[1:].astype(int).tolist()).score if row[0] else np.nan for row in sums]
        )

    return MetricResult({name: Figure(statistics, compute, each)}, {name: str(metric.get_signature())})


class BertScore:
    """The F1 of greedily matched tokens, without idf weights and rescaling, computed by `bert-score`."""

    def __init__(self, encoder: str, batch_size: int) -> None:
        from bert_score import utils

        self._utils, self._batch_size = utils, batch_size
        folder = loading.local_model(encoder)
        self._model, self.layers = self._load(encoder, folder)
        self._tokenizer = self._load_tokenizer(encoder, folder)
        self.signature = utils.get_hash(encoder.rstrip("/").rpartition("/")[2], self.layers, False, False, False, False)

    def __call__(self, completions: Sequence[str], references: Sequence[str]) -> MetricResult:
        """Returns the mean F1; 0 for a row where nothing was written."""
        rows = [at for at, (completion, truth) in enumerate(zip(completions, references, strict=True)) if truth.strip()]
        each: list[float | None] = [0.0 if truth.strip() else None for truth in references]
        written = [at for at in rows if completions[at].strip()]
        if written:
            scores = self._scores([references[at] for at in written], [completions[at] for at in written])
            for at, value in zip(written, scores, strict=True):
                each[at] = value
        return MetricResult({"bertscore": mean_figure(each)}, {"bertscore": self.signature})

    def _scores(self, references: list[str], completions: list[str]) -> list[float]:
        weights: dict[int | None, float] = collections.defaultdict(lambda: 1.0)
        weights |= {self._tokenizer.sep_token_id: 0.0, self._tokenizer.cls_token_id: 0.0}  # as in `bert_score.score`
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scored = self._utils.bert_cos_score_idf(
            self._model.to(device),
            references,
            completions,
            self._tokenizer,
            weights,
            batch_size=self._batch_size,
            device=device,
        )
        f1: list[float] = scored[:, 2].tolist()
        return f1

    def _load(self, encoder: str, folder: str) -> tuple[Any, int]:
        from transformers import AutoConfig, AutoModel

        known = {name.rpartition("/")[2]: layers for name, layers in self._utils.model2layers.items()}
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            # `bert-score`'s choice for the encoder, else the last layer.
            layers = known.get(os.path.basename(encoder.rstrip("/")), config.num_hidden_layers)
            model = AutoModel.from_pretrained(
                folder, use_safetensors=True, trust_remote_code=False, num_hidden_layers=layers, dtype=torch.float32
            )
        except (OSError, ValueError, AttributeError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"evaluation.bertscore_model {encoder!r} cannot be used: {type(error).__name__}: {reason}",
                remedy=BERTSCORE_REMEDY,
            ) from None
        whole = hasattr(model, "encoder") and hasattr(model, "decoder")
        return (model.encoder if whole else model).eval(), layers

    def _load_tokenizer(self, encoder: str, folder: str) -> Any:
        tokenizer: Any = loading.load_tokenizer(folder)
        positions = getattr(self._model.config, "max_position_embeddings", None) or tokenizer.model_max_length
        reserved = 2 if getattr(self._model.config, "model_type", "") in ("roberta", "xlm-roberta", "camembert") else 0
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions - reserved)
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"evaluation.bertscore_model {encoder!r} has a tokenizer without padding.", remedy=BERTSCORE_REMEDY
            )
        return tokenizer


TAKEN_NAMES = {
    *FIGURES,
    *itertools.chain(*FIGURES.values()),
    *AGAINST_BASELINE,
    "loss",
    "perplexity",
    "tokens",
    "accuracy",
    "margin",
}


def load_functions(configured: Sequence[Hook]) -> dict[str, Function]:
    """Returns the functions by the names of their figures, the part after the colon."""
    loaded: dict[str, Function] = {}
    for hook in configured:
        name = hook.use.rpartition(":")[2]
        if name in loaded or name in TAKEN_NAMES or name.partition("_")[0] == "reward":
            raise UserError(
                f"evaluation.functions: {hook.use!r} has the name of another figure, {name!r}.", remedy="Rename it."
            )
        loaded[name] = functools.partial(hooks.find(hook.use), **hook.options)
    return loaded


def function_score(
    name: str, function: Function, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]
) -> Figure:
    """Returns the mean of a function's values; None and NaN do not count."""
    try:
        values = function(prompts=list(prompts), completions=list(completions), references=list(references))
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"evaluation.functions: {name} failed: {in_words(error)}.") from None
    return mean_figure(function_values(f"evaluation.functions: {name}", values, len(completions)), better=None)


def function_values(function: str, values: Any, rows: int) -> list[float | None]:
    """Returns a user's function's numbers for rows, None for a row without one; `function` is its name in messages."""
    try:
        given = [None if value is None or math.isnan(float(value)) else float(value) for value in values]
    except (TypeError, ValueError):
        raise UserError(f"{function} returned {values!r:.200}, expected a list of numbers.") from None
    if len(given) != rows:
        raise UserError(f"{function} returned {len(given)} numbers for {rows} rows, expected one for each.")
    return given


class Judge:
    """The metrics and functions of a recipe, found and checked before anything is written."""

    def __init__(self, evaluation: Evaluation, pairs: Pairs, batch_size: int) -> None:
        self._pairs = pairs
        extras.require_metric_packages(evaluation)
        self._functions = load_functions(evaluation.functions)
        for name, function in self._functions.items() if pairs else ():  # fails now, not when models are judged
            self._own(name, function, [pairs[0][1]])
        self._metrics: list[Metric] = [METRICS[name] for name in evaluation.metrics if name != "bertscore"]
        if "bertscore" in evaluation.metrics and pairs:
            self._metrics.append(BertScore(evaluation.bertscore_model or "", batch_size))

    def judge(self, writes: Sequence[str]) -> MetricResult:
        judged = MetricResult()
        if not self._pairs:
            return judged
        references = [reference for _, reference in self._pairs]
        for metric in self._metrics:
            scored = metric(writes, references)
            judged.figures |= scored.figures
            judged.signatures |= scored.signatures
        for name, function in self._functions.items():
            judged.figures[name] = self._own(name, function, writes)
        return judged

    def _own(self, name: str, function: Function, writes: Sequence[str]) -> Figure:
        asked, references = zip(*self._pairs[: len(writes)], strict=True)
        return function_score(name, function, asked, writes, references)
