"""The exactness matrix: methods × weights × features, each a recipe small enough for seconds."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe

LORA = {"type": "lora", "r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
PLUS = {"prompt": "question", "completion": "good"}
PAIRS = {"prompt": "question", "chosen": "good", "rejected": "bad"}
PROMPTS = {"prompt": "question", "answer": "good"}
SCRATCH = {
    "base": None,
    "from_scratch": {
        "architecture": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "config": {"attention_dropout": 0.2},
    },
    "tokenizer": {"train": {"vocab_size": 400}},
}
WIDE = {**SCRATCH, "from_scratch": {**SCRATCH["from_scratch"], "hidden_size": 64}}  # type: ignore[dict-item]
"""A model with weights of 4096 numbers and more, the fewest whose optimizer state bitsandbytes holds in 8 bits."""
EXPERTS = {
    **SCRATCH,
    "from_scratch": {
        **SCRATCH["from_scratch"],  # type: ignore[dict-item]
        "architecture": "mixtral",
        "config": {"num_local_experts": 4, "num_experts_per_tok": 2},
    },
}
TIED = {**SCRATCH, "from_scratch": {**SCRATCH["from_scratch"], "architecture": "gpt2", "config": {}}}  # type: ignore[dict-item]
"""A model whose head is its embedding."""
NEW_TOKENS = {
    "tokenizer": {
        "add_tokens": [" Think.", "the value", "fox"],
        "special_tokens": {"bos_token": "<s>"},
        "end_of_turn": "fox",
    }
}
"""Words of the rows that become tokens, for which the base has no rows."""
WRITES = {
    "rewards": ["length", "tests.resume.own:shortness"],
    "num_generations": 2,
    "max_completion_length": 6,
}
"""Rewards that an untrained model's completions differ in."""

GREEDY = {"lr_scheduler": "greedy", "lr_scheduler_options": {"patience": 2, "factor": 0.5}}
"""What it counts in a run's middle decides the learning rate soon after."""

TEACHER = "-teacher"
"""What the folder of the base is followed by in that of a second model; stands for the whole path in a cell."""

Changes = dict[str, Any]

FEW_BITS: dict[str, Changes] = {
    "nf4": {"bits": 4, "double": False, "compute_dtype": "float32"},
    "nf4, double": {"bits": 4, "double": True, "compute_dtype": "bfloat16"},
    "int8": {"bits": 8},
}
"""Ways to hold the base: feature → `model.quantization`."""
OPTIMIZERS_8_BIT = ("adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit", "ademamix_8bit")

METHODS: dict[str, Changes] = {
    "sft": {"data": {"columns": PLUS}},
    "pretrain": {"data": {"columns": {"text": "story"}, "packing": True, "max_length": 16}},
    "reward": {"data": {"columns": PAIRS}},
    "dpo": {"data": {"columns": PAIRS}},
    "kto": {"data": {"columns": PAIRS}},
    "orpo": {"data": {"columns": PAIRS}},
    "cpo": {"data": {"columns": PAIRS}},
    "grpo": {"data": {"columns": PROMPTS, "max_samples": 16}, "training": {"grpo": WRITES}},
    "rloo": {"data": {"columns": PROMPTS, "max_samples": 16}, "training": {"rloo": WRITES}},
    "distillation": {
        "data": {"columns": PROMPTS},
        "training": {"distillation": {"teacher": TEACHER, "max_completion_length": 6}},
    },
}
READS = tuple(method for method in METHODS if not SPECS[method].generates)
"""The methods whose rows are given."""


@dataclass(frozen=True)
class Cell:
    """One recipe of the matrix.

    Attributes:
        method: As in `training.method`.
        weights: `full`, `lora` or `freeze`.
        feature: What is looked at; its name in the table.
        changes: What the recipe has for it.
        quick: Whether it belongs to `make test`.
        steps: Optimizer steps, two or three epochs of them.
    """

    method: str
    weights: str
    feature: str
    changes: Changes = field(default_factory=dict)
    quick: bool = False
    steps: int = 19

    @property
    def middle(self) -> int:
        """The step from which negative controls resume: inside a pass, and where there are such, a round, an average
        and the patience of early stopping."""
        if "early stopping" in self.feature:
            return 2
        return 11 if self.steps > 12 else 5

    @property
    def name(self) -> str:
        """Name of its runs."""
        return f"{self.method}-{self.weights}-{self.feature}".replace("_", "-").replace(",", "").replace(" ", "-")


def cells() -> Iterator[Cell]:
    """Yields the whole matrix."""
    for method in METHODS:
        yield Cell(method, "full", "plain", quick=method in ("sft", "pretrain", "dpo", "grpo", "distillation"))
        yield Cell(method, "lora", "dropout", dropping(method, 0.3), quick=method in ("sft", "grpo"))
        yield Cell(method, "full", "accumulation", training(micro_batch_size=2))
        yield Cell(method, "full", "gradient checkpointing", training(gradient_checkpointing=True))
        yield Cell(method, "full", "workers", training(workers=2))
        yield Cell(method, "full", "skipped steps", training(guard={"skip": [1, 6, 7, 13], "grad_norm": 1000}))
        if method != "distillation":  # its teacher would need the tokens
            held = training(**{method: {**WRITES, "beta": 0.1}}) if method in ("grpo", "rloo") else {}
            yield Cell(method, "full", "new tokens", {"model": NEW_TOKENS, **held})
            yield Cell(method, "lora", "new tokens", {"model": NEW_TOKENS, **dropping(method, 0.2)})
    for method in ("sft", "dpo"):
        yield Cell(method, "full", "early stopping", _early(), quick=method == "sft")
        yield Cell(method, "full", "group by length", training(group_by_length=True))
        yield Cell(method, "full", "plateau by epoch", _by_epoch())
        yield Cell(method, "full", "plateau", _plateau(), quick=method == "sft")
        yield Cell(method, "freeze", "last layer", training(trainable={"last_layers": 1, "patterns": ["norm"]}))
        yield Cell(method, "full", "groups", _groups())
        yield Cell(method, "full", "compile", training(compile=True, compile_optimizer=True))
        yield Cell(method, "lora", "bf16", dropping(method, 0.1, precision="bf16"))
    yield from _of_text()
    yield from _of_references()
    yield from _of_generation()
    yield from _of_teachers()
    yield from _of_hooks()
    yield from _of_bits()
    from tests.exactness import matrix_parallel  # which is made of what is here

    yield from matrix_parallel.cells()


def _of_text() -> Iterator[Cell]:
    for ramp in ("linear", "exponential", "step"):
        curriculum = {"ramp": ramp, "start": 0.3, "until": 0.8}
        yield Cell("sft", "full", f"curriculum {ramp}", training(curriculum=curriculum))
    by = {"data": {"extra_columns": ["level"]}, **training(curriculum={"by": "level"})}
    yield Cell("sft", "full", "curriculum by column", by)
    yield Cell("sft", "full", "best-fit packing", {"data": {"packing": "best-fit", "max_length": 96}})
    yield Cell("sft", "full", "neftune", training(neftune_alpha=5.0))
    for method in ("sft", "orpo", "cpo"):
        yield Cell(method, "full", "log windows", training(log_every=4))
    for optimizer in ("adafactor", "rmsprop", "adagrad", "sgd", "adamw_torch_fused"):
        yield Cell("sft", "full", optimizer.replace("_", " "), training(optimizer=optimizer))
    for scheduler in ("cosine", "cosine_with_restarts", "inverse_sqrt", "warmup_stable_decay"):
        options = {"num_decay_steps": 3} if scheduler == "warmup_stable_decay" else {}
        settings = {"lr_scheduler": scheduler, "lr_scheduler_options": options, "warmup_steps": 2}
        yield Cell("sft", "full", scheduler.replace("_", " "), training(**settings))
    greedy = {**training(**GREEDY), "evaluation": {"every": 2}}
    yield Cell("sft", "full", "greedy", greedy)
    dropout = {"model": SCRATCH}
    router = {"balance": 0.02, "unevenness": 0.1, "z": 0.001}
    experts = {"model": EXPERTS, **training(router=router, micro_batch_size=2)}
    yield Cell("pretrain", "full", "mixture of experts", experts, quick=True)
    yield Cell("pretrain", "full", "attention dropout", dropout)
    yield Cell("pretrain", "full", "tied embeddings", {"model": TIED})
    yield Cell(
        "pretrain", "full", "dropout, accumulation, workers", {**dropout, **training(micro_batch_size=2, workers=2)}
    )


def _of_references() -> Iterator[Cell]:
    sync = {"every": 2, "mix": 0.5}
    yield Cell("dpo", "full", "moving reference", training(dpo={"sync_reference": sync}), quick=True)
    yield Cell("kto", "full", "moving reference", training(kto={"sync_reference": sync}))
    for loss in ("hinge", "ipo", "robust", "apo_zero", "discopop", "sigmoid_norm"):
        settings = {"loss": loss, "label_smoothing": 0.1 if loss == "robust" else 0.0}
        if loss == "hinge":  # with more, all margins are reached by the middle, and no row counts any more
            settings["beta"] = 0.02
        yield Cell("dpo", "full", f"loss {loss}", training(dpo=settings))
    yield Cell(
        "dpo",
        "full",
        "three losses",
        training(dpo={"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}),
    )
    yield Cell("cpo", "full", "simpo", training(cpo={"loss": "simpo", "likelihood": 0.0}))
    yield Cell("reward", "full", "centred", training(reward={"center_coefficient": 0.01}))


def _of_generation() -> Iterator[Cell]:
    for method in ("grpo", "rloo"):
        twice = training(**{method: {**WRITES, "num_iterations": 3}})
        yield Cell(method, "full", "three iterations", twice)
        longer = training(micro_batch_size=2, **{method: {**WRITES, "steps_per_generation": 4}})
        yield Cell(method, "full", "long rounds", longer)
        held = training(**{method: {**WRITES, "beta": 0.1}})
        yield Cell(method, "full", "reference", held)
        follows = {**WRITES, "beta": 0.1, "sync_reference": {"every": 2, "mix": 0.5}}
        yield Cell(method, "full", "moving reference", training(**{method: follows}))
        yield Cell(method, "lora", "three iterations", {**adapter(dropout=0.2), **twice})
    gain = {"rewards": [{"use": "information_gain", "weight": 1.0}, "length"]}
    yield Cell("grpo", "full", "information gain", training(grpo={**WRITES, **gain}))


def _of_teachers() -> Iterator[Cell]:
    for name, beta in (("forward", 0.0), ("between", 0.5)):
        yield Cell("distillation", "full", f"divergence {name}", training(distillation={"beta": beta}))


def _of_hooks() -> Iterator[Cell]:
    hooks = {"collator": {"use": "tests.resume.own:NoisyCollator"}}
    yield Cell("sft", "full", "random collator", {"hooks": hooks}, quick=True)
    yield Cell("sft", "full", "random collator in workers", {"hooks": hooks, **training(workers=2)})
    stateful = {"callbacks": [{"use": "tests.resume.own:Cooling", "options": {"factor": 0.9}}]}
    yield Cell("sft", "full", "stateful callback", {"hooks": stateful}, quick=True)
    yield Cell("sft", "full", "own loss", {"hooks": {"loss": "tests.resume.own:doubled_loss"}})
    yield Cell("sft", "full", "own trainer", {"hooks": {"trainer": "tests.resume.own:Clumsy"}})


def _of_bits() -> Iterator[Cell]:
    for method in METHODS:
        for feature in FEW_BITS:
            yield Cell(method, "lora", feature, few_bits(method, feature))
    grown = few_bits("sft", "nf4, double")
    grown["model"] |= NEW_TOKENS
    yield Cell("sft", "lora", "nf4, double, new tokens", grown)
    for optimizer in (*OPTIMIZERS_8_BIT, "paged_adamw_32bit"):
        large = {"model": WIDE, **training(optimizer=optimizer)}
        yield Cell("pretrain", "full", optimizer.replace("_", " "), large)
    both = few_bits("sft", "nf4, double", optimizer="paged_adamw_8bit")
    yield Cell("sft", "lora", "nf4, double, paged adamw 8bit", both)


def few_bits(method: str, feature: str, **settings: Any) -> Changes:
    """Returns an adapter with dropout on a base of `FEW_BITS`, evaluated inside of chunks."""
    quantized = {"model": {"quantization": FEW_BITS[feature]}, "evaluation": {"every": 5}}
    if SPECS[method].scores:
        settings["precision"] = "bf16"
    return {**quantized, **dropping(method, 0.3, **settings)}


def training(**settings: Any) -> Changes:
    return {"training": settings}


def adapter(**settings: Any) -> Changes:
    return {"adapter": {**LORA, **settings}}


def dropping(method: str, share: float, **settings: Any) -> Changes:
    """Returns an adapter with dropout, which preference methods would switch off, and settings of `training`."""
    own = SPECS[method].settings
    if own and "disable_dropout" in own.model_fields and own.model_fields["disable_dropout"].default:
        settings[method] = {**settings.get(method, {}), "disable_dropout": False}
    return {**adapter(dropout=share), **training(**settings)}


def _early() -> Changes:
    stopping = {"early_stopping": {"patience": 3, "threshold": 10.0}}
    return {**training(**stopping), "evaluation": {"every": 1}}


def _plateau() -> Changes:
    settings = {
        "lr_scheduler": "reduce_lr_on_plateau",
        "lr_scheduler_options": {"patience": 1, "factor": 0.5, "threshold": 0.9},
    }
    return {**training(**settings), "evaluation": {"every": 2}}


def _by_epoch() -> Changes:
    """Three times in an epoch of eight steps: what is evaluated when decides the learning rate, so the bits."""
    return {**_plateau(), "evaluation": {"per_epoch": 3}, "chunks": {"checkpoints_per_epoch": 2}}


def _groups() -> Changes:
    groups = [
        {"pattern": "embed", "learning_rate": 1e-3, "name": "embeddings"},
        {"pattern": "mlp", "weight_decay": 0.1, "max_grad_norm": 0.1},
    ]
    return training(groups=groups, weight_decay=0.01)


def recipe(cell: Cell, store: str, base: str, source: str) -> Recipe:
    """Returns a cell's recipe, in one chunk."""
    document: Changes = {
        "name": "matrix",
        "seed": 7,
        "store": store,
        "model": {"base": base},
        "data": {"source": source, "max_length": 48, "split": {"eval": 0.2}},
        "training": {
            "method": cell.method,
            "batch_size": 4,
            "max_steps": cell.steps,
            "learning_rate": 5e-3,
            "threads": 1,
        },
        "chunks": {"wait_for_commit": True, "keep": {"last": 99}},
        "evaluation": {"samples": 0},
        "tracking": {"mlflow": None},
    }
    for changes in (METHODS[cell.method], {"adapter": LORA} if cell.weights == "lora" else {}, cell.changes):
        merge(document, changes)
    settings = document["training"].get(cell.method) or {}
    if settings.get("teacher") == TEACHER:
        document["training"][cell.method] = {**settings, "teacher": f"{base}{TEACHER}"}
    return load.validate(document, origin=cell.name)


def merge(into: Changes, changes: Changes) -> None:
    """Changes settings in place."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict) and key not in ("grpo", "rloo", "columns"):
            merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)  # as a later change is merged into it


def write_rows(folder: Path) -> str:
    """Writes forty rows that every method finds its columns in."""
    drawn = random.Random(0)
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(40):
            a, b = drawn.randrange(10), drawn.randrange(100)
            row = {
                "question": f"What is {a} and {b}?" + " Think." * drawn.randrange(4),
                "good": f"the value of {a + b}",
                "bad": f"the fox {a}" + " jumps" * drawn.randrange(1, 5),
                "story": f"the quick brown fox returns {a + b} of the {b} files and jumps over {a} lazy dogs",
                "level": a,
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def targets(cell: Cell, end: int) -> list[int]:
    """Returns chunk ends drawn at random, by the cell's name: three resumes in a row.

    Args:
        cell: The cell.
        end: Step at which its run ends, before its last one where it is stopped early.
    """
    drawn = random.Random(cell.name).sample(range(1, end), min(3, end - 1))
    return [*sorted(drawn), cell.steps]
