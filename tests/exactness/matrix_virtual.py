"""The matrix's cells of virtual workers: whatever processes share them, and however they change, the bits are one's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.exactness.matrix import (
    EXPERTS,
    FEW_BITS,
    GREEDY,
    LORA,
    NEW_TOKENS,
    READS,
    SCRATCH,
    WIDE,
    WRITES,
    Cell,
    Changes,
    dropping,
    few_bits,
    merge,
    training,
)

NAME = "virtual workers"
STEPS = 8
TARGETS = (2, 5, 8)
"""Ends of chunks, of which most are inside a pass over the rows; most passes have three steps."""

WAYS = {"×1": (1,), "×2": (2,), "×4": (4,), "1→4→2": (1, 4, 2), "4→1→2": (4, 1, 2)}
"""Processes of each chunk, by the name of the way."""
FEW = ("×1", "1→4→2")
"""Those that are taken for a feature."""

GPT2: Changes = {
    **SCRATCH,
    "from_scratch": {
        "architecture": "gpt2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "config": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    },
}

STEPS_OF_WRITING = 9
ENDING = {**WRITES, "max_completion_length": 24}
"""So long that some completions end, and workers write more or fewer tokens."""
SPANNING = {**ENDING, "num_generations": 3, "steps_per_generation": 12}
"""Rounds of three passes where a step has two, and an epoch of nine passes: they begin, and chunks end, anywhere."""
DROPOUT: Changes = {"adapter": {**LORA, "dropout": 0.3}}

WRITING: dict[str, tuple[str, Changes]] = {
    "grpo": ("grpo", training(grpo=ENDING)),
    "grpo, two iterations": ("grpo", training(grpo={**ENDING, "num_iterations": 2})),
    "grpo, two rounds a step": ("grpo", training(grpo={**ENDING, "steps_per_generation": 8}, micro_batch_size=2)),
    "grpo, lora": ("grpo", {**DROPOUT, **training(grpo={**ENDING, "beta": 0.1})}),
    "grpo, evaluation": ("grpo", {**training(grpo=ENDING), "evaluation": {"every": 2}}),
    "grpo, means": ("grpo", training(grpo={**SPANNING, "loss": "grpo", "top_entropy": 0.5})),
    "grpo, reference that moves": (
        "grpo",
        training(grpo={**SPANNING, "beta": 0.1, "sync_reference": {"every": 2, "mix": 0.5}}),
    ),
    "grpo, bf16": ("grpo", training(grpo=SPANNING, precision="bf16", gradient_checkpointing=True)),
    "grpo, information gain": ("grpo", training(grpo={**ENDING, "rewards": ["length", "information_gain"]})),
    "rloo": ("rloo", training(rloo=SPANNING)),
    "rloo, lora": ("rloo", {**DROPOUT, **training(rloo=ENDING)}),
    "distillation": ("distillation", {}),
    "distillation, lora": ("distillation", {**DROPOUT, "evaluation": {"every": 2}}),
    **{
        f"{method}, lora, {feature}": (method, few_bits(method, feature, **settings))
        for method, settings in (("grpo", {"grpo": ENDING}), ("rloo", {"rloo": ENDING}), ("distillation", {}))
        for feature in FEW_BITS
    },
}
"""The methods whose model writes what it learns from: name → method and settings."""


def cells() -> Iterator[Cell]:
    """Each method that takes them with the whole model and an adapter, and what else a step's bits may depend on."""
    for method in READS:
        yield _cell(method, NAME)
        yield _cell(method, NAME, dropping(method, 0.3), weights="lora")
        yield _cell(method, f"{NAME}, one pass", training(micro_batch_size=4 if method == "kto" else 2))
        for feature in FEW_BITS:
            yield _cell(method, f"{NAME}, {feature}", few_bits(method, feature), weights="lora")
    optimizer = training(optimizer="adamw_bnb_8bit")
    yield _cell("pretrain", f"{NAME}, adamw bnb 8bit", {"model": WIDE, **optimizer})
    yield from _of_steps()
    yield from _of_text()
    yield from _of_hooks()
    yield from _of_references()


def _of_steps() -> Iterator[Cell]:
    for number in (2, 8):
        yield _cell("sft", f"{NAME}, {number}", training(parallel={"virtual_workers": number}))
    for method in ("sft", "dpo"):
        held = {"early_stopping": {"patience": 3, "threshold": 10.0}}
        yield _cell(method, f"{NAME}, early stopping", {**training(**held), "evaluation": {"every": 1}})
        yield _cell(method, f"{NAME}, group by length", training(group_by_length=True))
        yield _cell(method, f"{NAME}, plateau", {**training(**_plateau()), "evaluation": {"every": 2}})
        groups = [
            {"pattern": "embed", "learning_rate": 1e-3, "name": "embeddings"},
            {"pattern": "mlp", "weight_decay": 0.1, "max_grad_norm": 0.1},
        ]
        yield _cell(method, f"{NAME}, groups", training(groups=groups, weight_decay=0.01))
        yield _cell(method, f"{NAME}, gradient checkpointing", training(gradient_checkpointing=True))
        yield _cell(method, f"{NAME}, loaders", training(workers=2))
        yield _cell(method, f"{NAME}, log windows", training(log_every=3))
        yield _cell(method, f"{NAME}, bf16", dropping(method, 0.1, precision="bf16"), weights="lora")
        yield _cell(method, f"{NAME}, new tokens", {"model": NEW_TOKENS, **dropping(method, 0.2)}, weights="lora")
    last = training(trainable={"last_layers": 1, "patterns": ["norm"]})
    yield _cell("sft", f"{NAME}, last layer", last, weights="freeze")
    for optimizer in ("adafactor", "sgd", "adamw_torch_fused"):
        yield _cell("sft", f"{NAME}, {optimizer.replace('_', ' ')}", training(optimizer=optimizer))


def _of_text() -> Iterator[Cell]:
    yield _cell("sft", f"{NAME}, dropout everywhere", {"model": GPT2})
    yield _cell("sft", f"{NAME}, neftune", training(neftune_alpha=5.0))
    yield _cell("sft", f"{NAME}, best-fit packing", {"data": {"packing": "best-fit", "max_length": 96}})
    for ramp in ("linear", "exponential", "step"):
        curriculum = {"ramp": ramp, "start": 0.3, "until": 0.8}
        yield _cell("sft", f"{NAME}, curriculum {ramp}", training(curriculum=curriculum))
    yield _cell("sft", f"{NAME}, greedy", {**training(**GREEDY), "evaluation": {"every": 2}})
    router = {"balance": 0.02, "unevenness": 0.1, "z": 0.001}
    for method in ("sft", "pretrain"):
        yield _cell(method, f"{NAME}, mixture of experts", {"model": EXPERTS, **training(router=router)})


def _of_hooks() -> Iterator[Cell]:
    own = "tests.resume.own:"
    collator = {"collator": {"use": f"{own}NoisyCollator"}}
    yield _cell("sft", f"{NAME}, random collator", {"hooks": collator})
    cooling = {"callbacks": [{"use": f"{own}Cooling", "options": {"factor": 0.9}}]}
    yield _cell("sft", f"{NAME}, stateful callback", {"hooks": cooling})
    yield _cell("sft", f"{NAME}, own loss", {"hooks": {"loss": f"{own}doubled_loss"}})
    yield _cell("sft", f"{NAME}, own metrics", {"hooks": {"metrics": [{"use": f"{own}hits"}]}})
    yield _cell("sft", f"{NAME}, unused weights", {"hooks": {"callbacks": [{"use": f"{own}Skipping"}]}})


def _of_references() -> Iterator[Cell]:
    sync = {"every": 2, "mix": 0.5}
    for method in ("dpo", "kto"):
        yield _cell(method, f"{NAME}, moving reference", training(**{method: {"sync_reference": sync}}))
    losses = {"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    yield _cell("dpo", f"{NAME}, three losses", training(dpo=losses))
    yield _cell("dpo", f"{NAME}, dropout", {"model": GPT2, **training(dpo={"disable_dropout": False})})
    yield _cell("cpo", f"{NAME}, simpo", training(cpo={"loss": "simpo", "likelihood": 0.0}))
    yield _cell("reward", f"{NAME}, centred", training(reward={"center_coefficient": 0.01}))


def _plateau() -> dict[str, Any]:
    return {
        "lr_scheduler": "reduce_lr_on_plateau",
        "lr_scheduler_options": {"patience": 1, "factor": 0.5, "threshold": 0.9},
    }


def writing() -> Iterator[Cell]:
    """Yields the cells of `WRITING`."""
    for name, (method, changes) in WRITING.items():
        features = [feature for feature in name.split(", ")[1:] if feature != "lora"]
        yield writer(method, changes, feature=", ".join([NAME, *features]))


def writer(method: str, changes: Changes, *, workers: int | None = 4, processes: int = 1, feature: str = NAME) -> Cell:
    """Returns a cell of two passes a step for each worker, whose model writes."""
    parallel = {"virtual_workers": workers, "processes": processes, "hang_after": "2m"}
    whole = training(batch_size=8, micro_batch_size=1, parallel=parallel)
    merge(whole, changes)
    return Cell(method, "lora" if "adapter" in changes else "full", feature, whole, steps=STEPS_OF_WRITING)


def still(method: str) -> Cell:
    """Returns a method's cell without dropout."""
    return _cell(method, f"{NAME}, still", {"model": {}})


def _cell(method: str, feature: str, changes: Changes | None = None, *, weights: str = "full") -> Cell:
    """Returns a cell of four virtual workers with two passes each and a last step of fewer rows than workers, that
    evaluates in between; text has dropout unless an adapter has."""
    rows = {"packing": True, "max_samples": 28, "split": {"eval": 5}} if method == "pretrain" else {}
    whole: Changes = {
        "name": f"virtual-{method}",  # under which the split is pinned that holds out five rows exactly
        "data": {"max_samples": 22, "split": {"eval": 5}, **rows},
        "evaluation": {"every": 3},
        # KTO compares the rows of a pass, and has two rows for each of the others' one.
        **training(
            batch_size=16 if method == "kto" else 8,
            micro_batch_size=2 if method == "kto" else 1,
            parallel={"virtual_workers": 4, "hang_after": "60s"},
        ),
    }
    noisy = {"model": SCRATCH} if weights == "full" and method in ("sft", "pretrain") else {}
    merge(whole, {**noisy, **(changes or {})})
    return Cell(method, weights, feature, whole, steps=STEPS)
