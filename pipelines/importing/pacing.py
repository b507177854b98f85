"""What both trainers say in much the same way: batches, warm-up, and how often something is done."""

from __future__ import annotations

import math

from baton.components.shared.recipe import SPECS
from baton.pipelines.importing import sources
from baton.pipelines.importing.draft import Draft, Fate
from baton.pipelines.importing.kinds import flag, is_on, number, read, steps, times, whole
from baton.pipelines.importing.table import Carried, fill, table

HELD_OUT = 0.05
"""Share of rows held out where the file holds out none: enough that small data has one."""

_BEST = table(
    {
        "metric_for_best_model": Carried(
            "training.early_stopping.metric", lambda name: f"eval_{str(name).removeprefix('eval_')}" if name else None
        ),
        "greater_is_better": Carried("training.early_stopping.greater_is_better", flag),
    }
)


def batch(draft: Draft, micro_key: str, micro: int, product_key: str | None) -> None:
    """Sets the batch sizes from rows per pass and passes per step, or from their product where that is given."""
    passes_key = "gradient_accumulation_steps"
    rows = read(draft, micro_key, whole, micro)
    size = rows * read(draft, passes_key, whole, 1)
    if product_key and draft.has(product_key) and not draft.has(passes_key):
        size = max(read(draft, product_key, whole, rows), rows)
        draft.carry("training.batch_size", product_key)
        if size % rows:
            raise draft.wrong(product_key, f"a multiple of {micro_key} {rows}")
    draft.put("training.batch_size", size, micro_key, passes_key)
    if rows < size:
        draft.put("training.micro_batch_size", rows, micro_key)


def fit_memory(draft: Draft, method: str) -> None:
    """Sets rows per forward pass to what memory takes, where the loss does not depend on them."""
    key = "auto_find_batch_size"
    if is_on(draft, key) and not SPECS[method].micro_batch_decides_loss:
        draft.put("training.micro_batch_size", "auto", key)
        draft.changed(key, "the rows of an optimizer step stay; only those of a forward pass are found")


def fit_kto(draft: Draft, micro_key: str) -> None:
    """Gives a KTO batch the two rows that its divergence is estimated from."""
    size = draft.look("training.batch_size")
    if draft.look("training.micro_batch_size", size) >= 2:
        return
    size = max(size, 2)
    micro = next(n for n in range(2, size + 1) if size % n == 0)
    draft.put("training.batch_size", size)
    draft.put("training.micro_batch_size", micro)
    draft.changed(
        micro_key, f"Baton estimates KTO's divergence within a micro-batch, which needs 2 rows; {micro} taken"
    )


def fit_generations(draft: Draft, generations: int, micro_key: str) -> None:
    """Makes a batch a multiple of the completions per prompt."""
    size = draft.look("training.batch_size")
    if size % generations:
        fitting = math.lcm(size, generations)
        draft.put("training.batch_size", fitting)
        draft.put("training.micro_batch_size", draft.look("training.micro_batch_size", size))
        draft.changed(
            micro_key, f"a step needs a multiple of {generations} completions on one GPU; batch_size is {fitting}"
        )


def length(draft: Draft, epochs_key: str, epochs: float) -> None:
    """Sets epochs or steps; steps win, as they do in `Trainer`."""
    if read(draft, "max_steps", number, -1) > 0:
        draft.put("training.max_steps", read(draft, "max_steps", whole), "max_steps")
        if draft.has(epochs_key):
            draft.needless(epochs_key, "max_steps is given, and decides")
        return
    draft.rest("max_steps")
    if draft.get(epochs_key) is None:
        draft.assume("training.epochs", epochs)
    else:
        draft.put("training.epochs", read(draft, epochs_key, number), epochs_key)


def warmup(draft: Draft) -> None:
    """Sets the warm-up from steps or, without them, from a share of all steps."""
    steps, share = read(draft, "warmup_steps", number, 0), read(draft, "warmup_ratio", number, 0)
    if steps:
        draft.put("training.warmup_steps", steps if steps < 1 else int(steps), "warmup_steps")
        draft.drop("warmup_ratio", "warmup_steps is given, and decides", Fate.needless)
    elif share:
        draft.put("training.warmup_steps", share, "warmup_ratio")
    draft.rest("warmup_steps")
    draft.rest("warmup_ratio")


def held_out(draft: Draft, key: str) -> None:
    """Sets the share or number of rows held out, which in Baton is never nothing."""
    if sources.given_sides(draft):
        draft.drop(key, "the rows that are held out are given, and decide", Fate.needless)
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


def by_epoch(draft: Draft, evaluations_key: str, checkpoints_key: str) -> None:
    """Sets how often in an epoch the model is evaluated and a checkpoint is taken."""
    paths = {evaluations_key: "evaluation.per_epoch", checkpoints_key: "chunks.checkpoints_per_epoch"}
    for key, path in paths.items():
        Carried(path, times)(draft, key)
        if draft.look(path) and draft.look("training.max_steps"):
            draft.changed(key, f"in each pass over the rows; {draft.tool} shares max_steps out among its epochs")


def evaluations(draft: Draft, *, by_default: bool) -> None:
    """Sets how often the model is evaluated, unless so many times in an epoch; `by_default` tells whether `eval_steps`
    alone turns it on."""
    keys, every = ("eval_strategy", "evaluation_strategy"), "eval_steps"
    key = next(filter(draft.has, keys), keys[0])
    strategy = str(draft.get(key, "steps" if by_default else "no")).lower()
    if draft.look("evaluation.per_epoch"):
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
        draft.needless(every, f"it counts only where {key} is steps, and evaluations are not given by epoch")


def checkpoints(draft: Draft) -> None:
    """Sets how often a checkpoint is taken inside a chunk, unless so many times in an epoch, and how many stay."""
    strategy = str(draft.get("save_strategy", "steps")).lower()
    if draft.look("chunks.checkpoints_per_epoch"):
        draft.carry("chunks.checkpoints_per_epoch", "save_strategy")
        draft.drop("save_steps", "the number in an epoch is given, and decides", Fate.needless)
    elif strategy == "epoch":
        draft.put("chunks.checkpoints_per_epoch", 1, "save_strategy")
    elif strategy in ("no", "steps"):
        draft.carry("chunks.checkpoint_every", "save_strategy")
    else:
        draft.left("save_strategy", "every chunk ends on a checkpoint; more: chunks.checkpoint_every in steps or time")
    if draft.has("save_steps") and not draft.is_handled("save_steps"):
        if strategy == "steps":
            Carried("chunks.checkpoint_every", steps)(draft, "save_steps")
        else:
            draft.needless("save_steps", "save_strategy is not steps")
    if draft.has("save_total_limit"):
        draft.put("chunks.keep.last", read(draft, "save_total_limit", whole), "save_total_limit")


def _is_evaluated(draft: Draft) -> bool:
    return bool(draft.look("evaluation.every") or draft.look("evaluation.per_epoch"))


def early_stopping(draft: Draft, key: str) -> None:
    """Sets early stopping, which looks at evaluations."""
    patience = read(draft, key, whole) if draft.has(key) else None
    if not patience or not _is_evaluated(draft):
        why = "it looks at evaluations, and there are none: set evaluation.every or per_epoch and "
        draft.drop(key, f"{why}training.early_stopping: {{patience: {patience}}}")
        return
    draft.put("training.early_stopping.patience", patience, key)
    fill(draft, _BEST)


def order(draft: Draft, method: str) -> None:
    """Notes that rows of like length are not brought together where the method has its own order."""
    key = "group_by_length"
    if is_on(draft, key) and SPECS[method].own_order:
        draft.left(key, f"{method} takes rows in its own order")


def best(draft: Draft) -> None:
    """Sets the export of the best state, which evaluations tell."""
    key = "load_best_model_at_end"
    if not is_on(draft, key):
        draft.rest(key)
    elif not _is_evaluated(draft):
        draft.left(key, "it looks at evaluations: set evaluation.every or per_epoch and export.checkpoint: best")
    else:
        draft.put("export.checkpoint", "best", key)
        metric = str(draft.get("metric_for_best_model", "loss")).removeprefix("eval_")
        if metric == "loss":
            draft.carry("export.checkpoint", "metric_for_best_model", "greater_is_better")


def plateau(draft: Draft, key: str) -> None:
    """Takes back a schedule that looks at evaluations where there are none."""
    if draft.look("training.lr_scheduler") == "reduce_lr_on_plateau" and not _is_evaluated(draft):
        draft.document["training"].pop("lr_scheduler")
        draft.left(
            key, "it looks at evaluations: set evaluation.every or per_epoch and training.lr_scheduler; linear is used"
        )
