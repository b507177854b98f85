"""Rules of methods, schedules, groups and hooks: each refuses once, with the path and what to do."""

from __future__ import annotations

import copy
import typing
from typing import Any

import pytest

from baton.errors import UserError
from baton.recipe import load
from baton.recipe.methods import SPECS
from baton.recipe.recipe import Recipe
from baton.recipe.training import Training
from tests.exactness.matrix import METHODS

BASE: dict[str, Any] = {
    "name": "tiny",
    "model": {"base": "org/model"},
    "data": {"source": "rows.jsonl"},
    "training": {},
}
SCRATCH = {"model": {"from_scratch": {}, "tokenizer": {"train": {}}}}
GRPO = {"training.method": "grpo", "training.grpo.rewards": ["numeric"]}
SYNC = {"every": 2}
TAUGHT = {"training.method": "distillation", "training.distillation.teacher": "org/large"}


@pytest.mark.parametrize("name", SPECS)
def test_a_method_has_a_field_for_its_settings_and_a_row_of_the_matrix(name: str) -> None:
    settings = SPECS[name].settings
    assert (name in Training.model_fields) == (settings is not None)
    if settings:
        assert Training.model_fields[name].annotation == settings | None
    assert name in METHODS


def checked(changes: dict[str, Any]) -> Recipe:
    """A recipe with values set by dotted path."""
    document = copy.deepcopy(BASE)
    for path, value in changes.items():
        node = document
        *parents, last = path.split(".")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return load.validate(document, origin="r.yaml")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "evaluations in steps and by epoch": (
        {"evaluation.every": 5, "evaluation.per_epoch": 2},
        "evaluation: every and per_epoch both set the steps of evaluations; remove one",
    ),
    "checkpoints in time and by epoch": (
        {"chunks.checkpoint_every": "5m", "chunks.checkpoints_per_epoch": 2},
        "chunks: checkpoint_every and checkpoints_per_epoch both set the steps of checkpoints; remove one",
    ),
    "a chunk for each epoch of steps": (
        {"chunks.count": "per-epoch", "training.max_steps": 9},
        "chunks.count: per-epoch counts training.epochs, and training.max_steps is set; set chunks.count to a number, "
        "or training.epochs instead of max_steps",
    ),
    "more epochs than a workflow holds": (
        {"chunks.count": "per-epoch", "training.epochs": 99.5, "chunks.spare": 1},
        "chunks.count: per-epoch, 99.5 epoch(s) and 1 spare chunks make 101 chunks, at most 100 fit a workflow; set "
        "chunks.count to a number",
    ),
    "epochs that a sweep draws": (
        {"chunks.count": "per-epoch", "sweep.parameters": {"training.epochs": [1, 2]}},
        "sweep: training.epochs differs between trials, and all have the same chunks; set chunks.count to a number",
    ),
    "settings of another method": (
        {"training.dpo": {"beta": 0.2}},
        "training: dpo has settings, but method is sft; remove them or set method: dpo",
    ),
    "two orders of rows": (
        {"training.curriculum": {}, "training.group_by_length": True},
        "training: curriculum and group_by_length both decide the order of rows; leave one out",
    ),
    "loss scale without fp16": (
        {"training.fp16_initial_scale": 2.0},
        "training: fp16_initial_scale is for precision fp16, not fp32",
    ),
    "fp16 on a CPU": (
        {"training.precision": "fp16"},
        "training.precision: fp16 needs an accelerator; set resources.gpus, or use bf16 or fp32",
    ),
    "kto with nothing to compare": (
        {"training.method": "kto", "training.micro_batch_size": 1},
        "training: kto estimates a divergence within each micro-batch; use micro_batch_size 2 or more",
    ),
    "kto in an order": (
        {"training.method": "kto", "training.group_by_length": True},
        "training: kto takes rows in their order; leave out curriculum and group_by_length",
    ),
    "grpo without a reward": (
        {"training.method": "grpo"},
        "training: grpo needs a reward; give grpo: {rewards: [numeric]}",
    ),
    "distillation without a teacher": (
        {"training.method": "distillation"},
        "training: distillation needs a teacher; give distillation: {teacher: org/model}",
    ),
    "a teacher of other tokens": (
        {**SCRATCH, "training.method": "distillation", "training.distillation.teacher": "org/large"},
        "model.tokenizer.train: has other tokens than the teacher; take its own, tokenizer: {base: org/large}",
    ),
    "a teacher in DeepSpeed's shards": (
        {**TAUGHT, "training.parallel": "zero3", "resources.gpus": 2},
        "training.parallel.strategy: distillation was not tried with zero3; use ddp or fsdp",
    ),
    "a teacher of an adapter on the head": (
        {**TAUGHT, "adapter.target_modules": ["q_proj", "lm_head"]},
        "adapter: distillation computes with lm_head's own weights and would not train an adapter on it. Leave lm_head "
        "out of its targets, or train it in full: modules_to_save: [lm_head]",
    ),
    "an adapter on all that is a head": (
        {"adapter.target_modules": ".*(q_proj|lm_head)"},
        "adapter: sft computes with lm_head's own weights",
    ),
    "a pattern that is none": (
        {"adapter.target_modules": "(q_proj"},
        "adapter.target_modules: is '(q_proj', which is not a regular expression: missing ), unterminated subpattern",
    ),
    "an adapter on the head's weights": (
        {**GRPO, "adapter.target_parameters": ["lm_head.weight"]},
        "adapter: grpo computes with lm_head's own weights",
    ),
    "rloo without a reward": (
        {"training.method": "rloo"},
        "training: rloo needs a reward; give rloo: {rewards: [numeric]}",
    ),
    "no rewards": (
        {"training.method": "grpo", "training.grpo.rewards": []},
        "training.grpo.rewards: List should have at least 1 item after validation",
    ),
    "half a group": (
        {**GRPO, "training.batch_size": 12},
        "training: grpo.num_generations 8 does not divide the 12 completions of a round "
        "(micro-batch size × steps_per_generation); change one of them",
    ),
    "half a group in a short round": (
        {**GRPO, "training.batch_size": 8, "training.micro_batch_size": 4, "training.grpo.steps_per_generation": 1},
        "training: grpo.num_generations 8 does not divide the 4 completions of a round",
    ),
    "grpo in an order": (
        {**GRPO, "training.curriculum": {}},
        "training: grpo repeats prompts in its own order; leave out curriculum and group_by_length",
    ),
    "unknown reward": (
        {**GRPO, "training.grpo.rewards": ["lenght"]},
        "training.grpo.rewards.0.use: is 'lenght'; expected one of numeric, exact, format, length, information_gain, "
        "or module:object",
    ),
    "a weight too few": (
        {"training.method": "dpo", "training.dpo": {"loss": ["sigmoid", "sft"], "loss_weights": [1.0]}},
        "training.dpo: loss_weights has 1 values for 2 losses",
    ),
    "exo without smoothing": (
        {"training.method": "dpo", "training.dpo.loss": "exo_pair"},
        "training.dpo: loss exo_pair needs label_smoothing above 0; 0.001 is usual",
    ),
    "group without a pattern": (
        {"training.groups": [{"pattern": "embed"}, {"pattern": "("}]},
        "training.groups.1.pattern: is '(', which is not a regular expression: missing ), unterminated subpattern",
    ),
    "trainable without a pattern": (
        {"training.trainable": {"patterns": ["norm", "["]}},
        "training.trainable.patterns: is '[', which is not a regular expression: unterminated character set",
    ),
    "a pattern in brackets without end": (
        {"training.trainable": {"patterns": ["(" * 2000]}},
        f"training.trainable.patterns: is '{'(' * 2000}', which is not a regular expression: maximum recursion depth",
    ),
    "a pattern that repeats without end": (
        {"training.trainable": {"patterns": ["a{99999999999}"]}},
        "training.trainable.patterns: is 'a{99999999999}', which is not a regular expression: the repetition number is",
    ),
    "nothing trainable": (
        {"training.trainable": {}},
        "training.trainable: nothing would be trained; give last_layers or patterns, or remove trainable",
    ),
    "trainable beside an adapter": (
        {"training.trainable": {"last_layers": 1}, "adapter": {}},
        "training.trainable: an adapter freezes the weights already; leave one of the two out",
    ),
    "dora on parameters": (
        {"adapter": {"dora": True, "target_parameters": ["experts"]}},
        "adapter: dora does not work with target_parameters; leave one out",
    ),
    "an archive of code": (
        {"hooks.source": "own.zip"},
        "hooks.source: is 'own.zip'; expected a Python file or a folder of them",
    ),
    "a hook without an object": (
        {"hooks.callbacks": ["own.Cooling"]},
        "hooks.callbacks.0.use: String should match pattern",
    ),
    "a loss for pairs": (
        {"training.method": "dpo", "hooks.loss": "own:loss"},
        "hooks.loss: dpo has its own loss; use hooks.trainer to change it",
    ),
    "a format of another method": (
        {"training.method": "kto", "data.format": "messages"},
        "data.format: kto does not learn from messages; expected rated or preference",
    ),
    "packed pairs": (
        {"training.method": "reward", "data.packing": True},
        "data.packing: reward compares whole answers; set it to false",
    ),
    "curriculum by what is lost": (
        {"training.curriculum.by": "level"},
        "training.curriculum.by: column 'level' is not kept; add it to data.extra_columns",
    ),
    "curriculum by what packing loses": (
        {"training.curriculum.by": "level", "data.extra_columns": ["level"], "data.packing": True},
        "training.curriculum.by: packed rows have no 'level'; leave out packing or use length",
    ),
    "few bits without an adapter": (
        {"model.quantization": {}},
        "model.quantization: weights in few bits cannot be trained; add an adapter",
    ),
    "a score in 16 bits": (
        {"training.method": "reward", "model.quantization": {}, "adapter": {}},
        "training.precision: on weights in few bits, TRL holds an adapter's whole layers in bfloat16, and fp32 cannot "
        "compute with them; use bf16",
    ),
    "a whole layer in 16 bits": (
        {"model.quantization": {}, "adapter": {"modules_to_save": ["lm_head"]}},
        "training.precision: on weights in few bits, TRL holds an adapter's whole layers in bfloat16",
    ),
    "an adapter's reference does not move": (
        {"training.method": "dpo", "training.dpo.sync_reference": SYNC, "adapter": {}},
        "training.dpo.sync_reference: an adapter's reference is its base, fixed",
    ),
    "no reference to move": (
        {**GRPO, "training.grpo.sync_reference": SYNC},
        "training.grpo.sync_reference: without beta there is no reference",
    ),
    "no reference from scratch": (
        {**GRPO, **SCRATCH, "training.grpo.beta": 0.1},
        "training.grpo.beta: there is no reference for a model from scratch; set it to 0",
    ),
    "rloo's own beta from scratch": (
        {**SCRATCH, "training.method": "rloo", "training.rloo.rewards": ["length"]},
        "training.rloo.beta: there is no reference for a model from scratch; set it to 0",
    ),
    "a nucleus that CUDA sums as it likes": (
        {**GRPO, "training.grpo.top_p": 0.9, "resources.gpus": 1},
        "training.grpo.top_p: CUDA has no deterministic kernel for the sum it takes; use top_k or min_p, or set "
        "training.deterministic to false",
    ),
    "early stopping blind": (
        {"training.early_stopping": {}},
        "training.early_stopping: needs evaluations, and there are none; set evaluation.every",
    ),
    "best of nothing": (
        {"export.checkpoint": "best"},
        "export.checkpoint: needs evaluations, and there are none; set evaluation.every",
    ),
    "best that is thrown away": (
        {"export.checkpoint": "best", "evaluation.every": 5, "chunks.keep.best": 0},
        "export.checkpoint: the best is not kept; set chunks.keep.best to 1 or more",
    ),
    "a collator where prompts are joined": (
        {**GRPO, "hooks.collator": "own:collate"},
        "hooks.collator: grpo joins its batches itself; leave one of the two out",
    ),
    "a collator where rows are packed": (
        {"data.packing": "best-fit", "hooks.collator": "own:collate"},
        "hooks.collator: best-fit packing joins its batches itself; leave one of the two out",
    ),
    "a loss that depends on memory": (
        {"training.method": "kto", "training.micro_batch_size": "auto"},
        "training: micro_batch_size: the loss of kto depends on it, and auto would let memory decide it",
    ),
    "rounding without a GPU": (
        {"training.tf32": True},
        "training.tf32: only GPUs round so; set resources.gpus, or leave it and precision: tf32 out",
    ),
    "rounding and not": (
        {"training.precision": "tf32", "training.tf32": False, "resources.gpus": 1},
        "training: precision: tf32 and tf32: false contradict each other; use precision: fp32",
    ),
    "a rate looked for in one process of shards": (
        {"training.lr_find": {}, "training.parallel": {"strategy": "fsdp", "processes": 2}},
        "training.lr_find: does not go with training.parallel.strategy fsdp: it tries rates in one process",
    ),
    "a rate from rewards": (
        {**GRPO, "training.lr_find": {}},
        "training: lr_find: the loss of grpo does not reflect the learning rate; remove it",
    ),
    "a range that does not grow": (
        {"training.lr_find": {"start": 0.1, "end": 0.1}},
        "training.lr_find: end 0.1 is not above start 0.1",
    ),
    "phases of one name": ({"phases": ["sft", "sft"]}, "phases: sft, sft are not different names"),
    "a reward model in the middle": (
        {"phases": ["reward", "sft"]},
        "phases: reward trains a reward model, which nothing can start from; put it last",
    ),
    "phases of too many chunks": (
        {"phases": ["sft", "dpo"], "chunks.count": 60},
        "phases: 120 chunks in all, at most 100 fit a workflow; use fewer",
    ),
    "a phase that is wrong": (
        {"phases": ["sft", {"name": "rl", "training": {"method": "grpo"}}]},
        "phase rl: training: grpo needs a reward; give grpo: {rewards: [numeric]}",
    ),
    "plateau blind": (
        {"training.lr_scheduler": "reduce_lr_on_plateau"},
        "training.lr_scheduler: needs evaluations, and there are none; set evaluation.every",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_rule_names_the_path_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        checked(changes)
    first, *problems = str(caught.value).splitlines()
    assert first == "recipe 'r.yaml' has 1 problem(s):"
    assert problems[0].startswith(f"  {message}"), problems


ALLOWED: dict[str, dict[str, Any]] = {
    "kto without a divergence": {
        "training.method": "kto",
        "training.micro_batch_size": 1,
        "training.kto.loss": "apo_zero_unpaired",
    },
    "a group over several micro-batches": {**GRPO, "training.micro_batch_size": 2},
    "ones own reward": {"training.method": "grpo", "training.grpo.rewards": "own.rewards:short"},
    "early stopping": {"training.early_stopping": {}, "evaluation.every": 5},
    "exo with smoothing": {"training.method": "dpo", "training.dpo": {"loss": "exo_pair", "label_smoothing": 0.001}},
    "rounding beside bf16": {"training.precision": "bf16", "training.tf32": True, "resources.gpus": 1},
    "a rate looked for in one process of several": {"training.lr_find": {}, "training.parallel": {"processes": 2}},
    "few bits": {"model.quantization": {}, "adapter": {}},
    "few bits and a score": {
        "training.method": "reward",
        "model.quantization": {},
        "adapter": {},
        "training.precision": "bf16",
    },
    "few bits and a whole layer": {
        "training.method": "orpo",
        "model.quantization": {},
        "adapter": {"modules_to_save": ["lm_head"]},
    },
    "a student from scratch": {
        "model": {"from_scratch": {}, "tokenizer": {"base": "org/large"}},
        **TAUGHT,
    },
    "a teacher's own settings": {
        "training.method": "distillation",
        "training.distillation": {
            "teacher": {"base": "org/large", "revision": "abc", "dtype": "bfloat16"},
            "beta": 0.5,
        },
    },
    "a head beside a teacher": {
        **TAUGHT,
        "adapter": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    },
    "all layers and a teacher": {**TAUGHT, "adapter.target_modules": "all-linear"},
    "no adapter on the head": {"adapter": {"target_modules": ".*", "exclude_modules": ["lm_head"]}},
    "an adapter on the head where logits are whole": {
        "training.method": "orpo",
        "adapter.target_modules": ["lm_head"],
    },
    "a nucleus on the CPU": {**GRPO, "training.grpo.top_p": 0.9},
    "a nucleus whatever it sums to": {
        **GRPO,
        "training.grpo.top_p": 0.9,
        "training.deterministic": False,
        "resources.gpus": 1,
    },
    "rloo from scratch": {
        **SCRATCH,
        "training.method": "rloo",
        "training.rloo": {"rewards": ["length"], "beta": 0.0},
    },
    "packed pretraining": {"training.method": "pretrain", "data.packing": True},
    "a loss for text": {"hooks.loss": "own:loss", "training.method": "pretrain"},
}


@pytest.mark.parametrize("changes", ALLOWED.values(), ids=ALLOWED)
def test_what_is_next_to_a_rule_is_allowed(changes: dict[str, Any]) -> None:
    given = checked(changes)
    assert load.loads(load.dumps(given)) == given


IDLE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "orpo's activations": (
        {"training.method": "orpo", "training.activation_offloading": True},
        "training.activation_offloading: orpo's trainer holds activations where they are; remove it, or set "
        "gradient_checkpointing",
        {"training.method": "dpo"},
    ),
    "grpo's activations": (
        {**GRPO, "training.activation_offloading": True},
        "training.activation_offloading: grpo's trainer holds activations where they are",
        {"training.activation_offloading": False},
    ),
    "more processes than a chunk is worth": (
        {"chunks.retries": 5, "resources.retries": 6},
        "chunks.retries: 5 in each pod that resources.retries, 6, start make up to 42 processes a chunk, at most 36",
        {"chunks.retries": 5, "resources.retries": 5},
    ),
    "a choice of all rows": (
        {"data.shuffle": True},
        "data.shuffle: chooses the rows of data.max_samples, which is not set",
        {"data.max_samples": 10},
    ),
    "a file that is not made": (
        {"export.gguf": {"types": ["f16"]}},
        "export.gguf: there is no such export; add gguf to export.formats, or remove it",
        {"export.formats": ["safetensors", "gguf"]},
    ),
    "a server that is not told": (
        {"export.kserve": {"gpus": 1}},
        "export.kserve: there is no such export; add kserve to export.formats, or remove it",
        {"export.formats": ["safetensors", "kserve"]},
    ),
    "shards of one process": (
        {"training.parallel": {"strategy": "fsdp", "offload": "cpu"}, "resources.gpus": 1},
        "training.parallel.offload: one process holds no shards; set training.parallel.processes or resources.gpus "
        "above 1, or remove it",
        {"resources.gpus": 2},
    ),
    "a weight of rows that are not trained on": (
        {"data.source": [{"uri": "a.jsonl"}, {"uri": "b.jsonl", "side": "eval", "weight": 2}]},
        "data.source: the weight 2 of 'b.jsonl' does nothing on the side eval, whose rows are used once each; "
        "remove it",
        {"data.source": [{"uri": "a.jsonl", "weight": 2}, {"uri": "b.jsonl", "side": "eval"}]},
    ),
    "a phase's": (
        {"phases": ["sft", {"name": "short", "data": {"shuffle": True}}]},
        "data.shuffle: chooses the rows",
        {"data.max_samples": 10},
    ),
}


@pytest.mark.parametrize(("changes", "message", "remedy"), IDLE.values(), ids=IDLE)
def test_a_setting_that_would_do_nothing_is_refused_where_a_recipe_is_handed_in(
    changes: dict[str, Any], message: str, remedy: dict[str, Any]
) -> None:
    idle = checked(changes)  # a run that was started with it resumes
    with pytest.raises(UserError, match=r"recipe 'r.yaml' has a setting without effect:\n  ") as caught:
        load.require_effects(idle, origin="r.yaml")
    assert str(caught.value).splitlines()[1].startswith(f"  {message}")
    load.require_effects(checked({**changes, **remedy}), origin="r.yaml")


def test_every_method_has_its_spec_and_its_section() -> None:
    names = typing.get_args(Training.model_fields["method"].annotation)
    assert list(SPECS) == list(names)
    assert {name: spec.name for name, spec in SPECS.items()} == {name: name for name in names}
    for name, spec in SPECS.items():
        assert (spec.settings is not None) == (name in Training.model_fields)
        if spec.settings:
            assert set(spec.forkable) <= set(spec.settings.model_fields)
            assert bool(spec.requires) == any(field.is_required() for field in spec.settings.model_fields.values())
            spec.settings.model_validate(dict(spec.example))


@pytest.mark.parametrize("method", ["reward", "dpo", "kto", "orpo", "cpo"])
def test_a_method_has_its_settings_without_being_asked(method: str) -> None:
    training = checked({"training.method": method}).training
    sections = {name: getattr(training, name) for name in ("reward", "dpo", "kto", "orpo", "cpo", "grpo", "rloo")}
    assert [name for name, section in sections.items() if section is not None] == [method]


def test_a_method_that_came_later_changes_nothing_that_is_written_of_others() -> None:
    written = checked({}).model_dump(mode="json")["training"]
    assert "distillation" not in written
    assert written["grpo"] is None
    assert checked(TAUGHT).model_dump(mode="json")["training"]["distillation"]["teacher"]["base"] == "org/large"


def test_short_forms_say_the_same_as_long_ones() -> None:
    short = checked(
        {
            "training.method": "grpo",
            "training.grpo.rewards": "numeric",
            "hooks.callbacks": ["own:Cooling"],
        }
    )
    long = checked(
        {
            "training.method": "grpo",
            "training.grpo.rewards": [{"use": "numeric", "weight": 1.0, "options": {}}],
            "hooks.callbacks": [{"use": "own:Cooling", "options": {}}],
        }
    )
    assert short == long
