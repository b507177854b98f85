"""How axolotl judges the result, and where it goes."""

from __future__ import annotations

from baton.pipelines.importing import hub
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import count, flag, number, read, whole, words

METRICS = {"sacrebleu": "bleu", "chrf": "chrf"}
"""Ours by theirs."""

BY_DEFAULT = ["sacrebleu", "comet", "ter", "chrf"]
ALWAYS = "perplexity"
"""Metric that every evaluation has."""


def results(draft: Draft, method: str) -> None:
    """Sets what the model writes, what is measured over it, tasks, and where the model goes."""
    _samples(draft)
    _metrics(draft, method)
    _tasks(draft)
    if draft.has("hub_model_id"):
        hub.push(draft, "hub_model_id")


def _samples(draft: Draft) -> None:
    """Sets for how many rows the model writes, and how: axolotl does it at each evaluation."""
    if draft.has("generate_samples") and read(draft, "generate_samples", flag):
        draft.put("evaluation.samples", read(draft, "num_generation_samples", count, 3), "num_generation_samples")
        most = read(draft, "generation_max_new_tokens", whole, 50)
        draft.put("evaluation.max_new_tokens", most, "generation_max_new_tokens")
        draws = read(draft, "generation_do_sample", flag, True)
        heat = read(draft, "generation_temperature", number, 0.7) if draws else 0.0
        draft.put("evaluation.temperature", heat, "generation_do_sample", "generation_temperature")
        draft.put("evaluation.top_p", read(draft, "generation_top_p", number, 1.0), "generation_top_p")
        if draft.has("generation_top_k"):
            draft.left("generation_top_k", "samples are drawn by evaluation.temperature and top_p alone")
        if draft.has("generation_prompt_ratio"):
            draft.left("generation_prompt_ratio", "a prompt ends where the row's does; plain text is cut at a third")
        if draft.has("eval_max_new_tokens"):
            draft.needless("eval_max_new_tokens", "generate_samples decides")
        _write_every(draft, "generate_samples")
    if draft.has("eval_table_size") and not draft.look("evaluation.samples"):
        draft.put("evaluation.samples", read(draft, "eval_table_size", whole), "eval_table_size")
        _write_every(draft, "eval_table_size")
    elif draft.has("eval_table_size"):
        draft.needless("eval_table_size", "generate_samples decides")
    draft.rest("generate_samples")
    draft.rest("eval_table_size")


def _write_every(draft: Draft, key: str) -> None:
    every = draft.look("evaluation.every")
    draft.carry("evaluation.samples", key)
    if every:
        draft.put("evaluation.write_every", every)
    else:
        draft.changed(key, "written before and after training; in between: evaluation.write_every in steps")


def _metrics(draft: Draft, method: str) -> None:
    key, which = "do_causal_lm_eval", "eval_causal_lm_metrics"
    if not draft.has(key) or not read(draft, key, flag) or method not in ("sft", "pretrain"):
        draft.needless(key, f"has no effect with {method}") if draft.has(key) else draft.rest(key)
        return
    named = which if draft.has(which) else key
    wanted = read(draft, which, words, []) or BY_DEFAULT
    metrics = [METRICS[name] for name in wanted if name in METRICS]
    if metrics:
        draft.put("evaluation.metrics", list(dict.fromkeys(metrics)), key, which)
        draft.changed(key, "over evaluation.samples held-out rows, before and after training, not at each evaluation")
    draft.carry("evaluation.metrics", key, which)
    if others := [name for name in wanted if name not in METRICS and name != ALWAYS]:
        draft.left(named, f"{', '.join(others)}: Baton has none; functions of your own go into evaluation.functions")


def _tasks(draft: Draft) -> None:
    """Sets tasks of the LM evaluation harness, which axolotl takes as `name` or `name:examples`."""
    key = "lm_eval_tasks"
    tasks = [task.partition(":") for task in read(draft, key, words, [])]
    if not tasks:
        draft.rest(key)
        return
    draft.put("evaluation.tasks.names", list(dict.fromkeys(name for name, _, _ in tasks)), key)
    shots = {examples for _, _, examples in tasks}
    if len(shots) > 1 or not all(examples.isdecimal() for examples in shots - {""}):
        draft.changed(key, "one number of examples is for all tasks: evaluation.tasks.few_shot; their own are used")
    elif examples := "".join(shots):
        draft.put("evaluation.tasks.few_shot", int(examples))
