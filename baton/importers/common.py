"""Settings of axolotl and LLaMA-Factory in common: data sets, weights, batches, intervals, tokens, and the Hub."""

import math
import re
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlencode

from baton.importers.draft import Document, KeyResult, RecipeDraft, Table, boolean
from baton.importers.parse import Carried, choice, number, positive_int, steps, tables, text, times, words
from baton.models import chat
from baton.recipe.data import Columns, Side
from baton.recipe.methods import SPECS
from baton.recipe.model import SpecialTokens
from baton.recipe.training import Training

SPEAKERS = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""Names of speakers that Baton reads → role."""

UNPACKED = "pairs are not packed; training.group_by_length saves padding"
FORMS = {("role", "content"): "messages", ("from", "value"): "sharegpt"}
"""Keys of a message's speaker and text → format of conversations."""

TRAINED_AS = {"sharegpt": "messages", "instruction": "prompt-completion", "ranked": "preference"}
"""Format → format of its converted rows."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """Shape of a data set's rows; `talks`: they hold messages; `renders`: for prompts and answers that are texts."""

    format: str
    columns: Columns = field(default_factory=dict)
    talks: bool = False
    renders: Literal["chat", "text"] | None = field(default=None, compare=False)

    @property
    def settings(self) -> Document:
        return {"format": self.format, **({"columns": self.columns} if self.columns else {})}

    @property
    def trained_as(self) -> tuple[str, bool]:
        """Key that is equal for rows which can be trained on together."""
        return TRAINED_AS.get(self.format, self.format), self.talks


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set of the file; remarks on it begin with `key`, and `shape` is None where it is unknown."""

    key: str
    uris: list[str]
    shape: RowShape | None = None
    side: Side | None = None
    weight: float = 1.0


def speaks_as(name: object, role: str) -> bool:
    """Tells whether Baton takes a speaker's name for this role."""
    return SPEAKERS.get(str(name).lower()) == role


def put(draft: RecipeDraft, sets: list[DataSet]) -> None:
    """Sets `data.source`, with format and columns: once where all agree, else for each source."""
    known = [(rows, rows.shape) for rows in sets if rows.shape]
    alike = all(shape == known[0][1] for _, shape in known)
    if known and alike:
        for name, value in known[0][1].settings.items():
            draft.put(f"data.{name}", value)
    draft.put("data.source", [_source(rows, uri, alike) for rows in sets for uri in rows.uris])
    for rows, shape in known:
        first, other = known[0][1].trained_as, shape.trained_as
        if other != first and "auto" not in (*first, *other):
            draft.unsupported(
                rows.key,
                f"{_named(*other)} are not trained on together with {_named(*first)} of the first data set: "
                "bring both to one format",
            )


def on_hub(name: object, *, revision: object, config: object, split: object) -> str:
    """Returns a hub data set's address; `train` is its default side."""
    options = {"config": config, "split": None if split == "train" else split}
    query = urlencode({key: value for key, value in options.items() if value})
    return f"hf://datasets/{name}{f'@{revision}' if revision else ''}{'?' if query else ''}{query}"


def side(draft: RecipeDraft, key: str, value: object) -> str:
    """Returns the side of a data set that `split` names, and notes a part of one: Baton reads all of it."""
    name, bracket, _ = str(value).partition("[")
    if bracket:
        draft.unsupported(key, f"{value}: all rows of {name} are read; data.max_samples takes so many from the start")
    return name


def loss(draft: RecipeDraft, key: str, method: str, shape: RowShape | None) -> None:
    """Sets the part of a row that counts: by default the assistant's, not the prompt."""
    whole_row = draft.read(key, boolean, False)
    if method != "sft":
        draft.not_needed(key, f"has no effect with {method}") if whole_row else draft.ignore(key)
    elif whole_row:
        draft.put("data.train_on", "all", key)
    elif shape is None or shape.talks or shape.format == "auto":  # of texts, assistant means the completion
        draft.put("data.train_on", "assistant", key)
    else:
        draft.carry("data.train_on", key)  # of a prompt and its completion, the completion counts anyway


def rendering(draft: RecipeDraft, sets: list[DataSet]) -> None:
    """Sets how texts of prompts and answers reach the model, the same way for all."""
    known = [(rows, rows.shape.renders) for rows in sets if rows.shape and rows.shape.renders]
    if not known:
        return
    chosen = known[0][1]
    draft.put("data.render_as", chosen)
    for rows, renders in known:
        if renders != chosen:
            draft.changed(rows.key, f"as {chosen} like the first data set, not as {renders}: data.render_as is for all")


def _source(rows: DataSet, uri: str, alike: bool) -> str | Document:
    source: Document = {} if rows.weight == 1 else {"weight": rows.weight}
    if rows.shape and not alike:
        source.update(rows.shape.settings)
    if rows.side:
        source["side"] = rows.side
    return {"uri": uri, **source} if source else uri


def _named(trained_as: str, talks: bool) -> str:
    if trained_as == "messages":
        return "conversations"
    return f"rows of {trained_as}{' as messages' if talks else ''}"


TEMPLATE_KEY = "model.chat_template"
WRITTEN_OUT_TEMPLATES = {
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{{ '<start_of_turn>' + ('model' if "
        "message['role'] == 'assistant' else message['role']) + '\\n' + message['content'] | trim + '<end_of_turn>\\n' "
        "}}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "phi_3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + "
        "'<|end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "falcon_h1": (
        "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
        "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "deepseek_v2": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<｜User｜>' + message['content'] }}{% elif message['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + message['content'] + eos_token }}{% else %}{{ message['content'] + '\\n\\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
    "llama2": (
        "{% set said = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' if messages[0]['role'] == 'system' "
        "else '' %}{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
        "(said if loop.index0 < 2 else '') + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' "
        "%}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
    "default": (
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ 'Human: ' + message['content'] + eos_token "
        "+ '\\n' }}{% elif message['role'] == 'assistant' %}{{ 'Assistant:' + message['content'] + eos_token + '\\n' }}"
        "{% else %}{{ 'System: ' + message['content'] + eos_token + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
"""Templates for bases without one, as both trainers write conversations without tools."""

NAMED_TEMPLATES = (
    "chatml",
    "llama3",
    "alpaca",
    *(name for name in WRITTEN_OUT_TEMPLATES if name not in ("default", "llama2")),
)
"""axolotl's names of templates that write the same text here."""

TEMPLATE_NOTES = {"alpaca": "Baton's has no beginning of text in front, and an empty line after the last answer too"}
"""Template → its difference from Baton's of the same name."""

TEMPLATE_ALIASES = {
    "cohere": "command",
    "deepseek3": "deepseek-v3",
    "gemma4_unified": "gemma4",
    "llama3_2_vision": "llama-3.2",
    "nemotron_h": "nemotron",
    "phi_35": "phi-3.5",
}
"""Template → the part of a model's name that it goes with, where the words differ."""

OWN_TEMPLATE = (
    "left to the tokenizer, which has it, judging by the model's name; a tokenizer without one needs it as a "
    ".jinja file"
)
OTHER_TEMPLATE = "the tokenizer's own chat template is used; check that it is this one, or give it as a .jinja file"


def is_own_template(template: str, model: str) -> bool:
    """Tells whether a template is, by its name, the model's own."""
    wanted, name = (
        re.sub(r"[^a-z0-9]", "", text.lower()) for text in (TEMPLATE_ALIASES.get(template, template), model)
    )
    return bool(wanted) and wanted in name


def named_template(draft: RecipeDraft, key: str, template: str, model: str) -> None:
    """Sets a template by name: Baton's, its written-out text, or the tokenizer's."""
    if template in chat.TEMPLATES and template in NAMED_TEMPLATES:
        draft.put(TEMPLATE_KEY, template, key)
        if template in TEMPLATE_NOTES:
            draft.changed(key, TEMPLATE_NOTES[template])
    elif template in WRITTEN_OUT_TEMPLATES and template in NAMED_TEMPLATES:
        draft.put(TEMPLATE_KEY, WRITTEN_OUT_TEMPLATES[template], key)
    elif is_own_template(template, model):
        draft.changed(key, OWN_TEMPLATE)
    else:
        draft.unsupported(key, OTHER_TEMPLATE)


MODE = choice(Literal["default", "reduce-overhead", "max-autotune"], "no such mode; training.compile has others")
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
            "Baton has no such schedule; linear is used. See training.lr_scheduler in docs/reference/recipe",
        ),
        "optimizer": choice(
            Training.model_fields["optimizer"].annotation,
            "Baton has no such optimizer; adamw_torch is used. See training.optimizer in docs/reference/recipe",
            {"adamw_8bit": "adamw_bnb_8bit", "adamw": "adamw_torch", "adamw_hf": "adamw_torch"},
        ),
    },
)


def begin(draft: RecipeDraft, method: str, settings: Document, entries: Table) -> str:
    """Sets the training method with its own settings, and returns it."""
    draft.put("training.method", method)
    for name, value in settings.items():
        draft.put(f"training.{method}.{name}", value)
    draft.fill(entries)
    return method


def finish(draft: RecipeDraft, entries: Table, scheduler_key: str, assumed: Document) -> None:
    """Handles the keys that are left, and writes out the other trainer's defaults where Baton's differ."""
    draft.apply(entries)
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
    rank = draft.read(rank_key, positive_int, 8)
    draft.put("adapter.type", "lora", kind_key)
    draft.put("adapter.r", rank, rank_key)
    draft.put("adapter.alpha", draft.read("lora_alpha", positive_int, alpha or 2 * rank), "lora_alpha")
    ratio = draft.read("loraplus_lr_ratio", number)
    if ratio:
        faster = float(f"{draft.read('learning_rate', number, rate) * ratio:.12g}")
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
    if draft.is_on("tf32") and wanted == "fp32":
        draft.put("training.precision", "tf32", "tf32")
    elif draft.is_on("tf32"):
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
        draft.put("training.adam_betas", [draft.read(key, number, beta) for key, beta in usual.items()], *usual)


def compilation(draft: RecipeDraft) -> None:
    """Sets `training.compile` from whether to and the mode."""
    key, mode = "torch_compile", "torch_compile_mode"
    if draft.has(key) and (draft.get(key) == "auto" or draft.read(key, boolean)):
        draft.put("training.compile", draft.read(mode, MODE, True), key, mode)
    elif draft.has(mode):
        draft.not_needed(mode, "has no effect without torch_compile")
    draft.ignore(key)


def batch(draft: RecipeDraft, micro_key: str, micro: int, product_key: str | None) -> None:
    """Sets the batch sizes from rows per pass and passes per step, or from their product."""
    passes_key = "gradient_accumulation_steps"
    rows = draft.read(micro_key, positive_int, micro)
    size = rows * draft.read(passes_key, positive_int, 1)
    if product_key and draft.has(product_key) and not draft.has(passes_key):
        size = max(draft.read(product_key, positive_int, rows), rows)
        draft.carry("training.batch_size", product_key)
        if size % rows:
            raise draft.wrong(product_key, f"a multiple of {micro_key} {rows}")
    draft.put("training.batch_size", size, micro_key, passes_key)
    if rows < size:
        draft.put("training.micro_batch_size", rows, micro_key)


def fit_memory(draft: RecipeDraft, method: str) -> None:
    """Sets rows per forward pass by memory, where the loss does not depend on them."""
    key = "auto_find_batch_size"
    if draft.is_on(key) and not SPECS[method].micro_batch_decides_loss:
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
    if draft.read("max_steps", number, -1) > 0:
        draft.put("training.max_steps", draft.read("max_steps", positive_int), "max_steps")
        if draft.has(epochs_key):
            draft.not_needed(epochs_key, "max_steps is given, and decides")
        return
    draft.ignore("max_steps")
    if draft.get(epochs_key) is None:
        draft.assume("training.epochs", epochs)
    else:
        draft.put("training.epochs", draft.read(epochs_key, number), epochs_key)


def warmup(draft: RecipeDraft) -> None:
    """Sets the warm-up from steps, else from a share of all steps."""
    steps, share = draft.read("warmup_steps", number, 0), draft.read("warmup_ratio", number, 0)
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
    share = draft.read(key, number, 0.0)
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
        steps_between = draft.read("logging_steps", number, 500)  # what Transformers takes then
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
        draft.put("chunks.keep.last", draft.read("save_total_limit", positive_int), "save_total_limit")


def _is_evaluated(draft: RecipeDraft) -> bool:
    return bool(draft.peek("evaluation.every") or draft.peek("evaluation.per_epoch"))


def early_stopping(draft: RecipeDraft, key: str) -> None:
    """Sets early stopping, which needs evaluations."""
    patience = draft.read(key, positive_int) if draft.has(key) else None
    if not patience or not _is_evaluated(draft):
        why = "it needs evaluations, and there are none: set evaluation.every or per_epoch and "
        draft.drop(key, f"{why}training.early_stopping: {{patience: {patience}}}")
        return
    draft.put("training.early_stopping.patience", patience, key)
    draft.fill(TABLES["best"])


def order(draft: RecipeDraft, method: str) -> None:
    """Refuses `group_by_length` where the method has its own order."""
    key = "group_by_length"
    if draft.is_on(key) and SPECS[method].own_order:
        draft.unsupported(key, f"{method} takes rows in its own order")


def best(draft: RecipeDraft) -> None:
    """Sets the export of the best state, which needs evaluations."""
    key = "load_best_model_at_end"
    if not draft.is_on(key):
        draft.ignore(key)
    elif not _is_evaluated(draft):
        draft.unsupported(key, "it needs evaluations: set evaluation.every or per_epoch and export.checkpoint: best")
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
        draft.put(f"{TOKENIZER}.add_tokens", draft.read(key, words), key)
    elif key == "eot_tokens":
        _end_of_turn(draft, key)
    elif key == "added_tokens_overrides":
        _other_tokens(draft, key, list(value.values()) if isinstance(value, dict) else value)
        draft.changed(key, "new tokens at the end of the vocabulary; those in reserve stay as they are")
    else:
        _other_tokens(draft, key, draft.read(key, words))


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
    ends = draft.read(key, words, [])
    draft.put(f"{TOKENIZER}.end_of_turn", ends[0], key)
    if ends[1:]:
        draft.changed(key, f"{ends[0]} ends a generated turn; in the rows the template's own token does")


def _token_text(draft: RecipeDraft, key: str, token: object) -> str:
    """Returns a token's text; axolotl may hold a mapping with options for white space."""
    try:
        return text(token.get("content") if isinstance(token, dict) else token)
    except ValueError:
        raise draft.wrong(key, "tokens as text") from None


ONCE = "pushed once, at the end, when a gate held"


def push(draft: RecipeDraft, key: str) -> bool:
    """Sets `export.hub`, and tells whether the key's value is a repository."""
    repo = draft.read(key, text, "")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        draft.unsupported(key, "without an organisation; give export.hub.repo as organisation/name")
        return False
    draft.put("export.hub.repo", repo, key)
    if revision := draft.read("hub_revision", text):
        draft.put("export.hub.revision", revision, "hub_revision")
    if draft.peek("adapter") is not None:
        draft.changed(key, "the whole model is pushed, the adapter folded in; alone: export.formats: [adapter]")
    draft.changed(key, f"{ONCE}, with HF_TOKEN in the environment of the export stage")
    if draft.get("hub_strategy", "end") == "end":
        draft.carry("export.hub", "hub_strategy")
    else:
        draft.unsupported("hub_strategy", ONCE)
    return True
