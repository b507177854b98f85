"""A model's weights under the names and in the layout of GGUF, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.components.export import gguf_settings
from baton.components.shared.core.errors import UserError
from baton.components.shared.models.exportable import GGUF_NAMES

if TYPE_CHECKING:
    import numpy as np

Array = Any
Turn = Callable[[Array], Array]

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Weight:
    """One tensor of the file.

    Attributes:
        name: In the file.
        source: In the model; None for one that is computed.
        read: Returns its values in float32, in the file's layout.
        back: Turns such values into the model's layout.
    """

    name: str
    source: str | None
    read: Callable[[], np.ndarray[Any, Any]]
    back: Turn


def weights(model: Any) -> Iterator[Weight]:
    """Yields the tensors of a model, none of them twice where the output shares the embedding's.

    Args:
        model: A causal language model of Transformers.

    Raises:
        UserError: GGUF has no name for one of them.
    """
    import gguf

    config = model.config
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[GGUF_NAMES[config.model_type]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    factors = gguf_settings.rope_factors(config)
    if factors is not None:
        yield Weight(ROPE_FACTORS, None, lambda: factors, lambda values: values)
    for source, tensor in model.state_dict().items():
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise UserError(f"export.formats: gguf has no name for the weights {source!r} of {config.model_type}.")
        there, back = _turns(config, source)
        yield Weight(name, source, functools.partial(_values, tensor, there), back)


def _values(tensor: Any, there: Turn) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = there(tensor.float().numpy())
    return values


def _turns(config: Any, source: str) -> tuple[Turn, Turn]:
    """Returns how a tensor's layout changes, there and back."""
    kind = GGUF_NAMES[config.model_type]
    if kind == "llama" and ".q_proj." in source:
        return _rotary(config.num_attention_heads)
    if kind == "llama" and ".k_proj." in source:
        return _rotary(config.num_key_value_heads)
    if kind == "gpt2" and source.endswith(("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        return _transposed, _transposed  # GPT-2's layers hold (in, out)
    if kind in gguf_settings.GEMMA and source.endswith("norm.weight"):
        return lambda values: values + 1, lambda values: values - 1  # Transformers multiplies by 1 + weight
    return lambda values: values, lambda values: values


def _transposed(values: Array) -> Array:
    import numpy as np

    return np.ascontiguousarray(values.T)


def _rotary(num_heads: int) -> tuple[Turn, Turn]:
    """Returns how the rows of a projection are put in order, there and back.

    Transformers rotates row i of a head with row i + d/2, llama.cpp row 2i with 2i + 1.
    """

    def there(values: Array) -> Array:
        halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
        return halves.swapaxes(1, 2).reshape(values.shape)

    def back(values: Array) -> Array:
        pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    return there, back
