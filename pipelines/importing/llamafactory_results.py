"""How LLaMA-Factory judges the result, and where it goes."""

from __future__ import annotations

from baton.pipelines.importing import hub
from baton.pipelines.importing.draft import Draft
from baton.pipelines.importing.kinds import flag, number, read, whole

PRIVATE = "hub_private_repo"


def results(draft: Draft, method: str) -> None:
    """Sets what the model writes and what is measured over it, and where it goes."""
    _generation(draft, method)
    _hub(draft)


def _generation(draft: Draft, method: str) -> None:
    """Sets how the model writes, and the metrics that LLaMA-Factory takes then."""
    key = "predict_with_generate"
    if not draft.has(key) or not read(draft, key, flag):
        draft.rest(key)
        return
    if method != "sft":
        draft.needless(key, f"has no effect with {method}")
        return
    draft.put("evaluation.metrics", ["bleu", "rouge"], key)
    draft.changed(
        key,
        "over evaluation.samples held-out rows, with sacreBLEU and rouge-score: LLaMA-Factory cuts texts into words "
        "with jieba, and takes BLEU over the characters of each",
    )
    draws = read(draft, "do_sample", flag, True)
    defaults = {"temperature": 0.95, "top_p": 0.7} if draws else {"temperature": 0.0}
    for name, usual in defaults.items():
        draft.put(f"evaluation.{name}", read(draft, name, number, usual) if draws else usual, name)
    draft.put("evaluation.max_new_tokens", read(draft, "max_new_tokens", whole, 1024), "max_new_tokens")
    draft.carry("evaluation.temperature", "do_sample")
    if not draws:
        for name in ("top_p", "top_k", "temperature"):
            draft.needless(name, "do_sample is off") if draft.has(name) else draft.rest(name)
    elif draft.has("top_k"):
        draft.left("top_k", "samples are drawn by evaluation.temperature and top_p alone")
    else:
        draft.changed(key, "its usual top_k of 50 has no counterpart")
    silent = [name for name in (*(defaults if draws else ()), "max_new_tokens") if draft.get(name) is None]
    draft.assumed += [f"evaluation.{name} {draft.look(f'evaluation.{name}'):g}" for name in silent]


def _hub(draft: Draft) -> None:
    """Sets where the model is pushed: by an export, or by training."""
    pushed = None
    if draft.has("export_hub_model_id") and hub.push(draft, "export_hub_model_id"):
        pushed = "export_hub_model_id"
    asked = draft.has("push_to_hub") and read(draft, "push_to_hub", flag)
    if asked and draft.has("hub_model_id"):
        if pushed:
            draft.left("hub_model_id", "a run pushes to one repository: export_hub_model_id")
        elif hub.push(draft, "hub_model_id"):
            pushed = "hub_model_id"
        draft.carry("export.hub", "push_to_hub")
    elif asked:
        draft.left("push_to_hub", "without hub_model_id; give organisation/name in export.hub.repo")
    if not pushed:
        return
    if draft.get(PRIVATE) is None:
        draft.changed(pushed, "a new repository is private: export.hub.private")
    else:
        draft.put("export.hub.private", read(draft, PRIVATE, flag), PRIVATE)
