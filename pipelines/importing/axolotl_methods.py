"""axolotl's training methods and each one's own settings."""

from __future__ import annotations

import os

from baton.components.shared.core.errors import UserError
from baton.pipelines.importing import axolotl_keys
from baton.pipelines.importing.draft import Document, Draft
from baton.pipelines.importing.kinds import number, numbers, read, whole, words
from baton.pipelines.importing.table import fill

METHODS: dict[str, tuple[str, Document]] = {
    "dpo": ("dpo", {}),
    "ipo": ("dpo", {"loss": ["ipo"]}),
    "kto": ("kto", {}),
    "orpo": ("orpo", {}),
    "simpo": ("cpo", {"loss": "simpo"}),
    "grpo": ("grpo", {}),
}
"""Method and settings by `rl`."""


def method(draft: Draft) -> str:
    """Sets the training method and its settings.

    Raises:
        UserError: Baton has nothing like the method.
    """
    rl = str(draft.get("rl") or "")
    if draft.has("process_reward_model"):
        raise draft.wrong("process_reward_model", "no reward per step, which Baton does not train", "Remove it.")
    if rl and rl not in METHODS:
        raise draft.wrong("rl", f"one of {', '.join(METHODS)}", "See training.method in docs/recipe.md for others.")
    if rl:
        method, settings = METHODS[rl]
    elif draft.has("reward_model"):
        method, settings = "reward", {}
    else:
        method, settings = "pretrain" if draft.keys("pretraining_dataset") else "sft", {}
    draft.put("training.method", method, "rl", "reward_model")
    for name, value in settings.items():
        draft.put(f"training.{method}.{name}", value)
    fill(draft, axolotl_keys.METHODS)
    if method == "dpo":
        _dpo(draft)
    return method


def _dpo(draft: Draft) -> None:
    """Sets what is added to the loss, and smoothing where the loss takes it."""
    losses = draft.look("training.dpo.loss", ["sigmoid"])
    share = read(draft, "rpo_alpha", number, 0.0)
    if share:
        shares = draft.look("training.dpo.loss_weights", [1.0] * len(losses))
        losses = [*losses, "sft"]
        draft.put("training.dpo.loss", losses, "rpo_alpha")
        draft.put("training.dpo.loss_weights", [*shares, share])
    key = "dpo_label_smoothing"
    if not draft.has(key):
        return
    if "robust" in losses or "exo_pair" in losses:
        draft.put("training.dpo.label_smoothing", read(draft, key, number), key)
    else:
        draft.left(key, f"has an effect only with training.dpo.loss robust or exo_pair, not {', '.join(losses)}")


def grpo(draft: Draft) -> None:
    """Sets what judges completions: axolotl finds functions by `module.function`, in the folder it runs in.

    Raises:
        UserError: there is no reward function.
    """
    key = "trl.reward_funcs"
    names = read(draft, key, words, [])
    if not names or not all("." in name.strip(".") for name in names):
        raise UserError(
            f"{draft.origin}: {key} is {draft.get(key)!r}, expected functions as module.function.",
            remedy="Name what judges completions; Baton needs it too.",
        )
    shares = read(draft, "trl.reward_weights", numbers, [1.0] * len(names))
    if len(shares) != len(names):
        raise draft.wrong("trl.reward_weights", f"a number for each of the {len(names)} functions")
    rewards = [
        {"use": ":".join(name.rsplit(".", 1)), "weight": share} for name, share in zip(names, shares, strict=True)
    ]
    draft.put("training.grpo.rewards", rewards, key, "trl.reward_weights")
    _reward_code(draft, {name.rsplit(".", 1)[0].split(".")[0] for name in names})
    _sync(draft)


def _reward_code(draft: Draft, modules: set[str]) -> None:
    beside = os.path.dirname(os.path.abspath(draft.origin))
    paths = {name: draft.reach(f"{name}.py", os.getcwd(), beside) for name in sorted(modules)}
    files = [path for path in paths.values() if os.path.exists(os.path.join(draft.target, path))]
    if len(files) == len(modules) == 1:
        draft.put("hooks.source", files[0])
        return
    draft.changed(
        "trl.reward_funcs",
        f"the code of {', '.join(sorted(modules))} must be in the image, or in the file or folder of hooks.source",
    )


def _sync(draft: Draft) -> None:
    keys = ("trl.sync_ref_model", "trl.ref_model_sync_steps", "trl.ref_model_mixup_alpha")
    if not draft.has(keys[0]):
        return
    if draft.has("adapter") or not draft.look("training.grpo.beta"):
        draft.left(keys[0], "the reference follows only full weights, with beta above 0")
        return
    every, mix = read(draft, keys[1], whole, 64), read(draft, keys[2], number, 0.9)
    draft.put("training.grpo.sync_reference", {"every": every, "mix": mix}, *keys)
