"""Settings of axolotl and LLaMA-Factory in common: weights, batches, intervals, tokens, and the Hub."""

from __future__ import annotations

import math
import re
from typing import Literal

from baton.importers.draft import Document, KeyResult, RecipeDraft
from baton.importers.parse import (
    Carried,
    Table,
    apply_table,
    boolean,
    choice,
    fill,
    is_on,
    number,
    positive_int,
    read,
    steps,
    tables,
    text,
    times,
    words,
)
from baton.recipe.methods import SPECS
from baton.recipe.model import SpecialTokens
from baton.recipe.training import Training

MODE = choice(
    Literal["default", "reduce-overhead", "max-autotune"], "no such mode; training.compile says which is used"
)
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

HELD_OUT = 0.05
"""Default share of held-out rows: large enough for one row of small data."""

TOKENIZER = "model.tokenizer"
SPECIAL = f"{TOKENIZER}.special_tokens"
OTHERS = "additional_special_tokens"

TABLES = tables(
    "shared",
    {
        "metric": lambda name: f"eval_{str(name).removeprefix('eval_')}" if name else None,
        "schedule": choice(
            Training.model_fields["lr_scheduler"].annotation,
            "Baton has no such schedule; linear is used. See training.lr_scheduler in docs/recipe.md for the others",
        ),
        "optimizer": choice(
            Training.model_fields["optimizer"].annotation,
            "Baton has no such optimizer; adamw_torch is used. See training.optimizer in docs/recipe.md for the others",
            {"adamw_8bit": "adamw_bnb_8bit", "adamw": "adamw_torch", "adamw_hf": "adamw_torch"},
        ),
    },
)


def begin(draft: RecipeDraft, method: str, settings: Document, entries: Table) -> str:
    """Sets the training method with its own settings, and returns it."""
    draft.put("training.method", method)
    for name, value in settings.items():
        draft.put(f"training.{method}.{name}", value)
    fill(draft, entries)
    return method


def finish(draft: RecipeDraft, entries: Table, scheduler_key: str, assumed: Document) -> None:
    """Handles the keys that are left, and writes out the other trainer's defaults where Baton's differ."""
    apply_table(draft, entries)
    if draft.peek("training.lr_scheduler") == "reduce_lr_on_plateau" and not _is_evaluated(draft):
        draft.document["training"].pop("lr_scheduler")
        remedy = "set evaluation.every or per_epoch and training.lr_scheduler; linear is used"
        draft.unsupported(scheduler_key, f"it looks at evaluations: {remedy}")
    for path, value in assumed.items():
        draft.assume(path, value)
    draft.put("resources.gpus", 1)


def lora(draft: RecipeDraft, kind_key: str, rank_key: str, *, alpha: int | None, rate: float) -> None:
    """Sets an adapter; LoRA+ as a group of parameters, as its second matrix learns faster.

    `alpha` (None for twice the rank) and `rate` are the other trainer's defaults.
    """
    rank = read(draft, rank_key, positive_int, 8)
    draft.put("adapter.type", "lora", kind_key)
    draft.put("adapter.r", rank, rank_key)
    draft.put("adapter.alpha", read(draft, "lora_alpha", positive_int, alpha or 2 * rank), "lora_alpha")
    ratio = read(draft, "loraplus_lr_ratio", number)
    if ratio:
        faster = float(f"{read(draft, 'learning_rate', number, rate) * ratio:.12g}")
        group = {"name": "loraplus", "pattern": r"\.lora_B\.", "learning_rate": faster}
        draft.put("training.groups", [group], "loraplus_lr_ratio")
    if draft.has("loraplus_lr_embedding"):
        first = "put {pattern: lora_embedding, learning_rate: …} first in training.groups"
        draft.unsupported("loraplus_lr_embedding", f"for adapters on embeddings: {first}")


def precision(draft: RecipeDraft, wanted: str, *keys: str) -> None:
    """Sets the arithmetic, and rounding to TF32 where the file asks for it."""
    if wanted != "fp32":
        draft.put("training.precision", wanted, *keys)
    draft.carry("training.precision", *keys)
    if is_on(draft, "tf32") and wanted == "fp32":
        draft.put("training.precision", "tf32", "tf32")
    elif is_on(draft, "tf32"):
        draft.put("training.tf32", True, "tf32")
    elif draft.given.get("tf32") is False and draft.has("torch_compile"):  # which would turn it on
        draft.put("training.tf32", False, "tf32")
    else:
        draft.carry("training.precision", "tf32")


def quantization(draft: RecipeDraft, bits: int | None, *keys: str) -> bool:
    """Sets the bits per weight, and tells whether they are 4, which have further settings."""
    if bits is None or draft.peek("adapter") is None:
        for key in keys:
            if bits:
                draft.drop(key, "weights in few bits cannot be trained: add adapter, or leave them whole")
            else:
                draft.ignore(key)
        return False
    draft.put("model.quantization.bits", bits, *keys)
    if bits == 4:
        computing = DTYPES.get(draft.peek("training.precision", "fp32"), "float32")
        draft.put("model.quantization.compute_dtype", computing)
    return bits == 4


def betas(draft: RecipeDraft) -> None:
    """Sets Adam's decay rates."""
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    if any(map(draft.has, usual)):
        draft.put("training.adam_betas", [read(draft, key, number, beta) for key, beta in usual.items()], *usual)


def compilation(draft: RecipeDraft) -> None:
    """Sets `training.compile` from whether to and the mode."""
    key, mode = "torch_compile", "torch_compile_mode"
    if draft.has(key) and (draft.get(key) == "auto" or read(draft, key, boolean)):
        draft.put("training.compile", read(draft, mode, MODE, True), key, mode)
    elif draft.has(mode):
        draft.not_needed(mode, "has no effect without torch_compile")
    draft.ignore(key)


def batch(draft: RecipeDraft, micro_key: str, micro: int, product_key: str | None) -> None:
    """Sets the batch sizes from rows per pass and passes per step, or from their product."""
    passes_key = "gradient_accumulation_steps"
    rows = read(draft, micro_key, positive_int, micro)
    size = rows * read(draft, passes_key, positive_int, 1)
    if product_key and draft.has(product_key) and not draft.has(passes_key):
        size = max(read(draft, product_key, positive_int, rows), rows)
        draft.carry("training.batch_size", product_key)
        if size % rows:
            raise draft.wrong(product_key, f"a multiple of {micro_key} {rows}")
    draft.put("training.batch_size", size, micro_key, passes_key)
    if rows < size:
        draft.put("training.micro_batch_size", rows, micro_key)


def fit_memory(draft: RecipeDraft, method: str) -> None:
    """Sets rows per forward pass by memory, where the loss does not depend on them."""
    key = "auto_find_batch_size"
    if is_on(draft, key) and not SPECS[method].micro_batch_decides_loss:
        draft.put("training.micro_batch_size", "auto", key)
        draft.changed(key, "the rows of an optimizer step stay; only those of a forward pass are found")


def fit_kto(draft: RecipeDraft, micro_key: str) -> None:
    """Gives a KTO batch two rows, to estimate its divergence from."""
    size = draft.peek("training.batch_size")
    if draft.peek("training.micro_batch_size", size) >= 2:
        return
    size = max(size, 2)
    micro = next(n for n in range(2, size + 1) if size % n == 0)
    draft.put("training.batch_size", size)
    draft.put("training.micro_batch_size", micro)
    draft.changed(
        micro_key, f"Baton estimates KTO's divergence within a micro-batch, which needs 2 rows; {micro} taken"
    )


def fit_generations(draft: RecipeDraft, generations: int, micro_key: str) -> None:
    """Makes a batch a multiple of the completions per prompt."""
    size = draft.peek("training.batch_size")
    if size % generations:
        fitting = math.lcm(size, generations)
        draft.put("training.batch_size", fitting)
        draft.put("training.micro_batch_size", draft.peek("training.micro_batch_size", size))
        draft.changed(
            micro_key, f"a step needs a multiple of {generations} completions on one GPU; batch_size is {fitting}"
        )


def length(draft: RecipeDraft, epochs_key: str, epochs: float) -> None:
    """Sets epochs or steps; steps win, as in `Trainer`."""
    if read(draft, "max_steps", number, -1) > 0:
        draft.put("training.max_steps", read(draft, "max_steps", positive_int), "max_steps")
        if draft.has(epochs_key):
            draft.not_needed(epochs_key, "max_steps is given, and decides")
        return
    draft.ignore("max_steps")
    if draft.get(epochs_key) is None:
        draft.assume("training.epochs", epochs)
    else:
        draft.put("training.epochs", read(draft, epochs_key, number), epochs_key)


def warmup(draft: RecipeDraft) -> None:
    """Sets the warm-up from steps, else from a share of all steps."""
    steps, share = read(draft, "warmup_steps", number, 0), read(draft, "warmup_ratio", number, 0)
    if steps:
        draft.put("training.warmup_steps", steps if steps < 1 else int(steps), "warmup_steps")
        draft.drop("warmup_ratio", "warmup_steps is given, and decides", KeyResult.not_needed)
    elif share:
        draft.put("training.warmup_steps", share, "warmup_ratio")
    draft.ignore("warmup_steps")
    draft.ignore("warmup_ratio")


def held_out(draft: RecipeDraft, key: str) -> None:
    """Sets the share or number of held-out rows, in Baton never 0."""
    if any(isinstance(source, dict) and "side" in source for source in draft.peek("data.source", [])):
        draft.drop(key, "the rows that are held out are given, and decide", KeyResult.not_needed)
        return
    share = read(draft, key, number, 0.0)
    if share > 0:
        draft.put("data.split.eval", share, key)
        return
    draft.put("data.split.eval", HELD_OUT)
    if key in draft.given:
        draft.changed(key, f"Baton always holds rows out, {HELD_OUT} of them here: change data.split.eval")
    else:
        draft.assumed.append(f"data.split.eval {HELD_OUT}, as Baton always holds rows out")


def by_epoch(draft: RecipeDraft, evaluations_key: str, checkpoints_key: str) -> None:
    """Sets evaluations and checkpoints per epoch."""
    paths = {evaluations_key: "evaluation.per_epoch", checkpoints_key: "chunks.checkpoints_per_epoch"}
    for key, path in paths.items():
        Carried(path, times)(draft, key)
        if draft.peek(path) and draft.peek("training.max_steps"):
            draft.changed(key, f"in each pass over the rows; {draft.tool} shares max_steps out among its epochs")


def evaluations(draft: RecipeDraft, *, by_default: bool) -> None:
    """Sets the steps between evaluations; with `by_default`, `eval_steps` alone turns them on."""
    keys, every = ("eval_strategy", "evaluation_strategy"), "eval_steps"
    key = next(filter(draft.has, keys), keys[0])
    strategy = str(draft.get(key, "steps" if by_default else "no")).lower()
    if draft.peek("evaluation.per_epoch"):
        draft.carry("evaluation.per_epoch", *keys)
    elif strategy == "epoch":
        draft.put("evaluation.per_epoch", 1, *keys)
    elif strategy == "steps" and draft.has(every):
        Carried("evaluation.every", steps)(draft, every)
        draft.carry("evaluation.every", *keys)
    elif strategy == "steps" and draft.has(key):
        steps_between = read(draft, "logging_steps", number, 500)  # what Transformers takes then
        draft.put("evaluation.every", max(int(steps_between), 1), *keys)
    else:
        draft.carry("evaluation.every", key)
    if draft.has(every) and not draft.is_handled(every):
        draft.not_needed(every, f"it counts only where {key} is steps, and evaluations are not given by epoch")


def checkpoints(draft: RecipeDraft) -> None:
    """Sets the checkpoints inside a chunk, and how many are kept."""
    strategy = str(draft.get("save_strategy", "steps")).lower()
    if draft.peek("chunks.checkpoints_per_epoch"):
        draft.carry("chunks.checkpoints_per_epoch", "save_strategy")
        draft.drop("save_steps", "the number in an epoch is given, and decides", KeyResult.not_needed)
    elif strategy == "epoch":
        draft.put("chunks.checkpoints_per_epoch", 1, "save_strategy")
    elif strategy in ("no", "steps"):
        draft.carry("chunks.checkpoint_every", "save_strategy")
    else:
        draft.unsupported(
            "save_strategy", "every chunk ends on a checkpoint; more: chunks.checkpoint_every in steps or time"
        )
    if draft.has("save_steps") and not draft.is_handled("save_steps"):
        if strategy == "steps":
            Carried("chunks.checkpoint_every", steps)(draft, "save_steps")
        else:
            draft.not_needed("save_steps", "save_strategy is not steps")
    if draft.has("save_total_limit"):
        draft.put("chunks.keep.last", read(draft, "save_total_limit", positive_int), "save_total_limit")


def _is_evaluated(draft: RecipeDraft) -> bool:
    return bool(draft.peek("evaluation.every") or draft.peek("evaluation.per_epoch"))


def early_stopping(draft: RecipeDraft, key: str) -> None:
    """Sets early stopping, which needs evaluations."""
    patience = read(draft, key, positive_int) if draft.has(key) else None
    if not patience or not _is_evaluated(draft):
        why = "it looks at evaluations, and there are none: set evaluation.every or per_epoch and "
        draft.drop(key, f"{why}training.early_stopping: {{patience: {patience}}}")
        return
    draft.put("training.early_stopping.patience", patience, key)
    fill(draft, TABLES["best"])


def order(draft: RecipeDraft, method: str) -> None:
    """Refuses `group_by_length` where the method has its own order."""
    key = "group_by_length"
    if is_on(draft, key) and SPECS[method].own_order:
        draft.unsupported(key, f"{method} takes rows in its own order")


def best(draft: RecipeDraft) -> None:
    """Sets the export of the best state, which needs evaluations."""
    key = "load_best_model_at_end"
    if not is_on(draft, key):
        draft.ignore(key)
    elif not _is_evaluated(draft):
        draft.unsupported(key, "it looks at evaluations: set evaluation.every or per_epoch and export.checkpoint: best")
    else:
        draft.put("export.checkpoint", "best", key)
        metric = str(draft.get("metric_for_best_model", "loss")).removeprefix("eval_")
        if metric == "loss":
            draft.carry("export.checkpoint", "metric_for_best_model", "greater_is_better")


def settle_tokens(draft: RecipeDraft, key: str) -> None:
    """Handles the keys of either trainer for tokens."""
    value = draft.get(key)
    if not draft.has(key):
        draft.ignore(key)
    elif key in ("special_tokens", "tokens") and isinstance(value, dict):
        _token_tasks(draft, key, value)
    elif key == "special_tokens":
        raise draft.wrong(key, "tokens by their tasks, such as pad_token")
    elif key in ("tokens", "add_tokens"):
        draft.put(f"{TOKENIZER}.add_tokens", read(draft, key, words), key)
    elif key == "eot_tokens":
        _end_of_turn(draft, key)
    elif key == "added_tokens_overrides":
        _other_tokens(draft, key, list(value.values()) if isinstance(value, dict) else value)
        draft.changed(key, "new tokens at the end of the vocabulary; those in reserve stay as they are")
    else:
        _other_tokens(draft, key, read(draft, key, words))


def _token_tasks(draft: RecipeDraft, key: str, value: dict[object, object]) -> None:
    """Sets special tokens by their tasks, in Transformers' names."""
    for name, token in value.items():
        if name == OTHERS and token:
            _other_tokens(draft, key, token)
        elif name not in SpecialTokens.model_fields:
            draft.unsupported(key, f"{name}: Baton knows {', '.join(SpecialTokens.model_fields)}")
        elif token:
            draft.put(f"{SPECIAL}.{name}", _token_text(draft, key, token), key)
    if not draft.is_handled(key):
        draft.idle.append(key)


def _other_tokens(draft: RecipeDraft, key: str, value: object) -> None:
    if not isinstance(value, list):
        raise draft.wrong(key, "a list of tokens")
    known = draft.peek(f"{SPECIAL}.{OTHERS}", [])
    draft.put(f"{SPECIAL}.{OTHERS}", [*known, *(_token_text(draft, key, token) for token in value)], key)


def _end_of_turn(draft: RecipeDraft, key: str) -> None:
    """Sets the token that ends an assistant's turn: the first one, nearly always the only one."""
    ends = read(draft, key, words, [])
    draft.put(f"{TOKENIZER}.end_of_turn", ends[0], key)
    if ends[1:]:
        draft.changed(key, f"{ends[0]} ends a turn for whoever writes; the template says which token does in the rows")


def _token_text(draft: RecipeDraft, key: str, token: object) -> str:
    """Returns a token's text; axolotl may hold a mapping with options for white space."""
    try:
        return text(token.get("content") if isinstance(token, dict) else token)
    except ValueError:
        raise draft.wrong(key, "tokens as text") from None


ONCE = "pushed once, at the end, when a gate held"


def push(draft: RecipeDraft, key: str) -> bool:
    """Sets `export.hub`, and tells whether the key's value is a repository."""
    repo = read(draft, key, text, "")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        draft.unsupported(key, "without an organisation; give export.hub.repo as organisation/name")
        return False
    draft.put("export.hub.repo", repo, key)
    if revision := read(draft, "hub_revision", text):
        draft.put("export.hub.revision", revision, "hub_revision")
    if draft.peek("adapter") is not None:
        draft.changed(key, "the whole model is pushed, the adapter folded in; alone: export.formats: [adapter]")
    draft.changed(key, f"{ONCE}, with HF_TOKEN in the environment of the export stage")
    if draft.get("hub_strategy", "end") == "end":
        draft.carry("export.hub", "hub_strategy")
    else:
        draft.unsupported("hub_strategy", ONCE)
    return True
