"""Keys that axolotl and LLaMA-Factory share: weights, batches, tokens, `Trainer`'s settings and results."""

from __future__ import annotations

import math
import re

from baton.importers import sources
from baton.importers.draft import Draft, Result
from baton.importers.parse import (
    Carried,
    boolean,
    choice,
    fill,
    is_on,
    mapping,
    names_of,
    non_negative_int,
    number,
    positive,
    positive_int,
    read,
    steps,
    switch,
    table,
    text,
    times,
    words,
)
from baton.recipe.methods import SPECS
from baton.recipe.model import SpecialTokens

# --- What both trainers say in much the same way: adapters, precision, quantization and the optimizer's numbers.


MODE = choice(("default", "reduce-overhead", "max-autotune"), {}, "no such mode; training.compile says which is used")
WITHOUT_ADAPTER = "weights in few bits cannot be trained: add adapter, or leave them whole"
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Type by the arithmetic of that name."""


def lora(draft: Draft, kind_key: str, rank_key: str, *, alpha: int | None, rate: float) -> None:
    """Sets an adapter, and LoRA+ as a group of parameters: the second matrix learns faster.

    `alpha`, None for twice the rank, and the learning rate are those of a file that leaves them out.
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
        draft.left("loraplus_lr_embedding", f"for adapters on embeddings: {first}")


def precision(draft: Draft, wanted: str, *keys: str) -> None:
    """Sets the arithmetic to `bf16` or `fp16`, and rounding to TF32 where that is asked for."""
    if wanted != "fp32":
        draft.put("training.precision", wanted, *keys)
    draft.carry("training.precision", *keys)
    if is_on(draft, "tf32"):
        draft.put(*(("training.precision", "tf32") if wanted == "fp32" else ("training.tf32", True)), "tf32")
    elif draft.given.get("tf32") is False and draft.has("torch_compile"):  # which would turn it on
        draft.put("training.tf32", False, "tf32")
    else:
        draft.carry("training.precision", "tf32")


def quantization(draft: Draft, bits: int | None, *keys: str) -> bool:
    """Sets the bits per weight, and tells whether they are 4, for which there are further settings."""
    if bits is None or draft.look("adapter") is None:
        for key in keys:
            draft.drop(key, WITHOUT_ADAPTER) if bits else draft.rest(key)
        return False
    draft.put("model.quantization.bits", bits, *keys)
    if bits == 4:
        computing = DTYPES.get(draft.look("training.precision", "fp32"), "float32")
        draft.put("model.quantization.compute_dtype", computing)
    return bits == 4


def betas(draft: Draft) -> None:
    """Sets Adam's decay rates."""
    usual = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    if any(map(draft.has, usual)):
        draft.put("training.adam_betas", [read(draft, key, number, beta) for key, beta in usual.items()], *usual)


def compilation(draft: Draft) -> None:
    """Sets `training.compile` from whether to and the mode."""
    key, mode = "torch_compile", "torch_compile_mode"
    if draft.has(key) and (draft.get(key) == "auto" or read(draft, key, boolean)):
        draft.put("training.compile", read(draft, mode, MODE, True), key, mode)
    elif draft.has(mode):
        draft.needless(mode, "has no effect without torch_compile")
    draft.rest(key)


# --- What both trainers say in much the same way: batches, warm-up, and how often something is done.


HELD_OUT = 0.05
"""Share of rows held out where the file holds out none: enough that small data has one."""

_BEST = table(
    {
        "metric_for_best_model": Carried(
            "training.early_stopping.metric", lambda name: f"eval_{str(name).removeprefix('eval_')}" if name else None
        ),
        "greater_is_better": Carried("training.early_stopping.greater_is_better", boolean),
    }
)


def batch(draft: Draft, micro_key: str, micro: int, product_key: str | None) -> None:
    """Sets the batch sizes from rows per pass and passes per step, or from their product where that is given."""
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
        draft.put("training.max_steps", read(draft, "max_steps", positive_int), "max_steps")
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
        draft.drop("warmup_ratio", "warmup_steps is given, and decides", Result.needless)
    elif share:
        draft.put("training.warmup_steps", share, "warmup_ratio")
    draft.rest("warmup_steps")
    draft.rest("warmup_ratio")


def held_out(draft: Draft, key: str) -> None:
    """Sets the share or number of rows held out, which in Baton is never nothing."""
    if sources.given_sides(draft):
        draft.drop(key, "the rows that are held out are given, and decide", Result.needless)
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
        draft.drop("save_steps", "the number in an epoch is given, and decides", Result.needless)
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
        draft.put("chunks.keep.last", read(draft, "save_total_limit", positive_int), "save_total_limit")


def _is_evaluated(draft: Draft) -> bool:
    return bool(draft.look("evaluation.every") or draft.look("evaluation.per_epoch"))


def early_stopping(draft: Draft, key: str) -> None:
    """Sets early stopping, which looks at evaluations."""
    patience = read(draft, key, positive_int) if draft.has(key) else None
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


# --- The tokenizer as other trainers change it: tokens that are added, and those with a task.


TOKENIZER = "model.tokenizer"
SPECIAL = f"{TOKENIZER}.special_tokens"
OTHERS = "additional_special_tokens"


def settle_tokens(draft: Draft, key: str) -> None:
    """Sets what a key of either trainer says of tokens."""
    value = draft.get(key)
    if not draft.has(key):
        draft.rest(key)
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


def _token_tasks(draft: Draft, key: str, value: dict[object, object]) -> None:
    """Sets special tokens by their tasks, which axolotl names as Transformers does."""
    for name, token in value.items():
        if name == OTHERS and token:
            _other_tokens(draft, key, token)
        elif name not in SpecialTokens.model_fields:
            draft.left(key, f"{name}: Baton knows {', '.join(SpecialTokens.model_fields)}")
        elif token:
            draft.put(f"{SPECIAL}.{name}", _token_text(draft, key, token), key)
    if not draft.is_handled(key):
        draft.idle.append(key)


def _other_tokens(draft: Draft, key: str, value: object) -> None:
    if not isinstance(value, list):
        raise draft.wrong(key, "a list of tokens")
    known = draft.look(f"{SPECIAL}.{OTHERS}", [])
    draft.put(f"{SPECIAL}.{OTHERS}", [*known, *(_token_text(draft, key, token) for token in value)], key)


def _end_of_turn(draft: Draft, key: str) -> None:
    """Sets the token that ends an assistant's turn: the first one, of which there is one nearly always."""
    ends = read(draft, key, words, [])
    draft.put(f"{TOKENIZER}.end_of_turn", ends[0], key)
    if ends[1:]:
        draft.changed(key, f"{ends[0]} ends a turn for whoever writes; the template says which token does in the rows")


def _token_text(draft: Draft, key: str, token: object) -> str:
    """Returns a token's text, which axolotl's files may hold with how it takes white space."""
    try:
        return text(token.get("content") if isinstance(token, dict) else token)
    except ValueError:
        raise draft.wrong(key, "tokens as text") from None


# --- Keys that axolotl and LLaMA-Factory have in common, most of them from Transformers' `Trainer`.


SCHEDULER = choice(
    names_of("lr_scheduler"),
    {},
    "Baton has no such schedule; linear is used. See training.lr_scheduler in docs/recipe.md for the others",
)
OPTIMIZER = choice(
    names_of("optimizer"),
    {"adamw_8bit": "adamw_bnb_8bit", "adamw": "adamw_torch", "adamw_hf": "adamw_torch"},
    "Baton has no such optimizer; adamw_torch is used. See training.optimizer in docs/recipe.md for the others",
)

SHARED = table(
    {
        "trust_remote_code": Carried("model.trust_remote_code", boolean),
        "lora_dropout": Carried("adapter.dropout", number),
        "lora_modules_to_save additional_target": Carried("adapter.modules_to_save", words),
        "peft_use_dora use_dora": Carried("adapter.dora", boolean),
        "peft_use_rslora use_rslora": Carried("adapter.rslora", boolean),
        "learning_rate": Carried("training.learning_rate", number),
        "lr_scheduler lr_scheduler_type": Carried("training.lr_scheduler", SCHEDULER),
        "lr_scheduler_kwargs": Carried("training.lr_scheduler_options", mapping),
        "optimizer optim": Carried("training.optimizer", OPTIMIZER),
        "optim_args": Carried("training.optimizer_options", mapping),
        "adam_epsilon": Carried("training.adam_epsilon", number),
        "weight_decay": Carried("training.weight_decay", number),
        "max_grad_norm": Carried("training.max_grad_norm", number),
        "group_by_length": Carried("training.group_by_length", boolean),
        "neftune_noise_alpha noisy_embedding_alpha": Carried("training.neftune_alpha", positive),
        "logging_steps": Carried("training.log_every", steps),
        "dataloader_num_workers": Carried("training.workers", non_negative_int),
        "seed": Carried("seed", non_negative_int),
        "gradient_checkpointing torch_compile torch_compile_mode adam_beta1 adam_beta2": switch,
        "eval_steps eval_strategy evaluation_strategy save_strategy save_steps save_total_limit": switch,
    },
    left={
        "write it into the config.json of the base": "rope_scaling model_config overrides_of_model_config",
        "special tokens in the rows' text are read as what they are": "split_special_tokens",
        "name them in model.tokenizer.special_tokens.additional_special_tokens": "new_special_tokens_config",
        "continuing an adapter: merge it into the base, and name the result": "lora_model_dir adapter_name_or_path",
        "give model.attention: eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention": (
            "attn_implementation attention flash_attn"
        ),
        "Baton has no shifted attention; attention is whole": "s2_attention shift_attn",
        "Baton has no training in 8 bits; training.precision says which arithmetic is used": "fp8*",
        "checkpoints are compared by evaluation loss": "metric_for_best_model greater_is_better",
        "how many GPUs is not said here: set resources.gpus and training.parallel (ddp, fsdp, zero2 or zero3); "
        "training.batch_size then counts the rows of all of them together": (
            "deepspeed fsdp* device_map qlora_sharded_model_loading dp_*"
        ),
    },
    elsewhere={
        "checkpoints are always whole, so that training can resume from them": "save_only_model",
        "what a run writes goes to the store; set store, a folder or s3://bucket": "output_dir",
        "Baton resumes by itself: from the newest checkpoint of `baton run --run NAME`": "resume_from_checkpoint",
        "a run is named when it is started: `baton run RECIPE --run NAME`": "run_name mlflow_run_name",
        "Baton logs to MLflow, TensorBoard and Weights & Biases: tracking": (
            "swanlab_* use_swanlab* comet_* use_comet* trackio_* use_trackio* use_otel_metrics otel_metrics_*"
        ),
        "set HF_TOKEN in the environment of `baton run`; for pods, name its Secret in resources.secret_env": (
            "hf_use_auth_token hf_hub_token*"
        ),
        "Kubeflow runs the pods; resources says what they ask for": "ray_* use_ray*",
        "resources says what pods ask for": "resources_per_worker*",
    },
    needless={
        "the processes of a chunk are started and joined by Baton": "ddp*",
        "columns that are not used are never loaded": "remove_unused_columns",
        "changes how activations are recomputed, not the result": "gradient_checkpointing_kwargs use_reentrant_gc",
        "weights are always safetensors": "save_safetensors",
        "the report has the speed": "include_tokens_per_second include_effective_tokens_per_second",
        "Transformers loads that way": "low_cpu_mem_usage",
        "losses are logged by steps: training.log_every": "logging_strategy",
        "embeddings have a row for each token, and are resized where tokens are added": (
            "resize_vocab resize_token_embeddings_to_32x"
        ),
        "tokenizers are the fast ones where there is one": "tokenizer_use_fast use_fast_tokenizer",
        "tokenized data is kept in the store": "dataset_prepared_path tokenized_path",
        "changes how fast rows are tokenized, not the tokens": (
            "dataset_processes dataset_keep_in_memory preprocessing_num_workers preprocessing_batch_size"
        ),
        "rows are tokenized once, into the store": "skip_prepare_dataset streaming buffer_size",
        "is for debugging": "debug print_param_status",
        "is for inference, which is not what a recipe describes": "gradio_* infer_* sglang_* offload_folder*",
        "has no effect without a repository to push to": "hub_*",
    },
)


# --- How trainers judge the result, and where it goes.


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
        "num_generation_samples": Carried("evaluation.samples", non_negative_int, 3),
        "generation_max_new_tokens": Carried("evaluation.max_new_tokens", positive_int, 50),
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


def axolotl_results(draft: Draft, method: str) -> None:
    """Sets what the model writes, what is measured over it, tasks, and where the model goes."""
    _samples(draft)
    _metrics(draft, method)
    _evaluation_tasks(draft)
    if draft.has("hub_model_id"):
        _push(draft, "hub_model_id")


def llamafactory_results(draft: Draft, method: str) -> None:
    """Sets what the model writes and what is measured over it, and where it goes."""
    _generation(draft, method)
    _hub(draft)


def _samples(draft: Draft) -> None:
    """Sets for how many rows the model writes, and how: axolotl does it at each evaluation."""
    if is_on(draft, "generate_samples"):
        fill(draft, SAMPLES)
        if not read(draft, "generation_do_sample", boolean, True):
            draft.put("evaluation.temperature", 0.0)
        draft.carry("evaluation.temperature", "generation_do_sample")
        _write_every(draft, "generate_samples")
    draft.rest("generate_samples")
    if draft.has("eval_table_size") and not draft.look("evaluation.samples"):
        draft.put("evaluation.samples", read(draft, "eval_table_size", positive_int), "eval_table_size")
        _write_every(draft, "eval_table_size")
    else:
        draft.drop("eval_table_size", "generate_samples decides", Result.needless)


def _write_every(draft: Draft, key: str) -> None:
    draft.carry("evaluation.samples", key)
    if every := draft.look("evaluation.every"):
        draft.put("evaluation.write_every", every)
    else:
        draft.changed(key, "written before and after training; in between: evaluation.write_every in steps")


def _metrics(draft: Draft, method: str) -> None:
    key, which = "do_causal_lm_eval", "eval_causal_lm_metrics"
    if not is_on(draft, key) or SPECS[method].rows != "sequences":
        draft.drop(key, f"has no effect with {method}", Result.needless)
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


def _evaluation_tasks(draft: Draft) -> None:
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
    if not read(draft, "do_sample", boolean, True):
        usual = {"max_new_tokens": 1024}
        draft.put("evaluation.temperature", 0.0, "temperature")
        for name in ("top_p", "top_k", "temperature"):
            draft.drop(name, "do_sample is off", Result.needless)
    elif draft.has("top_k"):
        draft.left("top_k", DRAWN)
    else:
        draft.changed(key, "its usual top_k of 50 has no counterpart")
    for name, value in usual.items():
        draft.put(
            f"evaluation.{name}", read(draft, name, positive_int if name == "max_new_tokens" else number, value), name
        )
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
        draft.put("export.hub.private", read(draft, private, boolean), private)
