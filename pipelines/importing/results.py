"""How trainers judge the result, and where it goes."""

from __future__ import annotations

import re

from baton.components.shared.recipe import SPECS
from baton.pipelines.importing.draft import Draft, Fate
from baton.pipelines.importing.kinds import count, flag, is_on, number, read, text, whole, words
from baton.pipelines.importing.table import Carried, fill, table

REPO = re.compile(r"[\w.-]+/[\w.-]+")
"""What `export.hub.repo` takes."""
ONCE = "pushed once, at the end, when a gate held"
DRAWN = "samples are drawn by evaluation.temperature and top_p alone"

METRICS = {"sacrebleu": "bleu", "chrf": "chrf"}
"""Our metric by axolotl's."""
BY_DEFAULT = ["sacrebleu", "comet", "ter", "chrf"]
"""axolotl's metrics where the file names none."""
ALWAYS = "perplexity"
"""Metric that every evaluation has."""

SAMPLES = table(
    {
        "num_generation_samples": Carried("evaluation.samples", count, 3),
        "generation_max_new_tokens": Carried("evaluation.max_new_tokens", whole, 50),
        "generation_temperature": Carried("evaluation.temperature", number, 0.7),
        "generation_top_p": Carried("evaluation.top_p", number, 1.0),
    },
    left={
        DRAWN: "generation_top_k",
        "a prompt ends where the row's does; plain text is cut at a third": "generation_prompt_ratio",
    },
    needless={"generate_samples decides": "eval_max_new_tokens"},
)
"""axolotl's settings of `generate_samples`."""


def of_axolotl(draft: Draft, method: str) -> None:
    """Sets what the model writes, what is measured over it, tasks, and where the model goes."""
    _samples(draft)
    _metrics(draft, method)
    _tasks(draft)
    if draft.has("hub_model_id"):
        _push(draft, "hub_model_id")


def of_llamafactory(draft: Draft, method: str) -> None:
    """Sets what the model writes and what is measured over it, and where it goes."""
    _generation(draft, method)
    _hub(draft)


def _samples(draft: Draft) -> None:
    """Sets for how many rows the model writes, and how: axolotl does it at each evaluation."""
    if is_on(draft, "generate_samples"):
        fill(draft, SAMPLES)
        if not read(draft, "generation_do_sample", flag, True):
            draft.put("evaluation.temperature", 0.0)
        draft.carry("evaluation.temperature", "generation_do_sample")
        _write_every(draft, "generate_samples")
    draft.rest("generate_samples")
    if draft.has("eval_table_size") and not draft.look("evaluation.samples"):
        draft.put("evaluation.samples", read(draft, "eval_table_size", whole), "eval_table_size")
        _write_every(draft, "eval_table_size")
    else:
        draft.drop("eval_table_size", "generate_samples decides", Fate.needless)


def _write_every(draft: Draft, key: str) -> None:
    draft.carry("evaluation.samples", key)
    if every := draft.look("evaluation.every"):
        draft.put("evaluation.write_every", every)
    else:
        draft.changed(key, "written before and after training; in between: evaluation.write_every in steps")


def _metrics(draft: Draft, method: str) -> None:
    key, which = "do_causal_lm_eval", "eval_causal_lm_metrics"
    if not is_on(draft, key) or SPECS[method].rows != "sequences":
        draft.drop(key, f"has no effect with {method}", Fate.needless)
        return
    wanted = read(draft, which, words, []) or BY_DEFAULT
    metrics = [METRICS[name] for name in wanted if name in METRICS]
    if metrics:
        draft.put("evaluation.metrics", list(dict.fromkeys(metrics)))
        draft.changed(key, "over evaluation.samples held-out rows, before and after training, not at each evaluation")
    draft.carry("evaluation.metrics", key, which)
    if others := [name for name in wanted if name not in METRICS and name != ALWAYS]:
        draft.left(
            which if draft.has(which) else key,
            f"{', '.join(others)}: Baton has none; functions of your own go into evaluation.functions",
        )


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


def _generation(draft: Draft, method: str) -> None:
    """Sets how the model writes, and the metrics that LLaMA-Factory takes then."""
    key = "predict_with_generate"
    if not is_on(draft, key):
        draft.rest(key)
        return
    if method != "sft":
        draft.needless(key, f"has no effect with {method}")
        return
    draft.put("evaluation.metrics", ["bleu", "rouge"])
    draft.changed(
        key,
        "over evaluation.samples held-out rows, with sacreBLEU and rouge-score: LLaMA-Factory cuts texts into words "
        "with jieba, and takes BLEU over the characters of each",
    )
    draft.carry("evaluation.temperature", "do_sample")
    usual = {"temperature": 0.95, "top_p": 0.7, "max_new_tokens": 1024}
    if not read(draft, "do_sample", flag, True):
        usual = {"max_new_tokens": 1024}
        draft.put("evaluation.temperature", 0.0, "temperature")
        for name in ("top_p", "top_k", "temperature"):
            draft.drop(name, "do_sample is off", Fate.needless)
    elif draft.has("top_k"):
        draft.left("top_k", DRAWN)
    else:
        draft.changed(key, "its usual top_k of 50 has no counterpart")
    for name, value in usual.items():
        draft.put(f"evaluation.{name}", read(draft, name, whole if name == "max_new_tokens" else number, value), name)
        if draft.get(name) is None:
            draft.assumed.append(f"evaluation.{name} {value:g}")


def _push(draft: Draft, key: str) -> bool:
    """Sets `export.hub`, and tells whether the key's value is a repository that it takes."""
    repo = read(draft, key, text, "")
    if not REPO.fullmatch(repo):
        draft.left(key, "without an organisation; give export.hub.repo as organisation/name")
        return False
    draft.put("export.hub.repo", repo, key)
    if revision := read(draft, "hub_revision", text):
        draft.put("export.hub.revision", revision, "hub_revision")
    if draft.look("adapter") is not None:
        draft.changed(key, "the whole model is pushed, the adapter folded in; alone: export.formats: [adapter]")
    draft.changed(key, f"{ONCE}, with HF_TOKEN in the environment of the export stage")
    if draft.get("hub_strategy", "end") == "end":
        draft.carry("export.hub", "hub_strategy")
    else:
        draft.left("hub_strategy", ONCE)
    return True


def _hub(draft: Draft) -> None:
    """Sets where LLaMA-Factory pushes the model: by an export, or by training."""
    export, model, private = "export_hub_model_id", "hub_model_id", "hub_private_repo"
    pushed = export if draft.has(export) and _push(draft, export) else None
    asked = is_on(draft, "push_to_hub")
    if asked and draft.has(model):
        if pushed:
            draft.left(model, f"a run pushes to one repository: {export}")
        elif _push(draft, model):
            pushed = model
        draft.carry("export.hub", "push_to_hub")
    elif asked:
        draft.left("push_to_hub", "without hub_model_id; give organisation/name in export.hub.repo")
    if pushed and draft.get(private) is None:
        draft.changed(pushed, "a new repository is private: export.hub.private")
    elif pushed:
        draft.put("export.hub.private", read(draft, private, flag), private)
