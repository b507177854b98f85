"""A model small enough to be trained in a test, and the trainer that a recipe makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from baton.data import encoding
from baton.errors import RowError
from baton.models import loading, pinned
from baton.models.trainable import freeze
from baton.recipe import load
from baton.recipe.model import TrainTokenizer
from baton.recipe.recipe import Recipe
from baton.runs.plan import make_plan
from baton.train import build, methods
from baton.train.build import Setup
from baton.train.trainer import exact_class

Row = dict[str, Any]

PAIRS: list[Row] = [
    {
        "prompt": f"What is {n} and {n % 7}?" + " Think." * (n % 4),
        "chosen": f"the value of {n + n % 7}" + " is here" * (n % 3),
        "rejected": f"the fox {n}" + " jumps" * (n % 5 + 1),
    }
    for n in range(24)
]
"""Rows of all lengths."""


def encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[Row], list[Row]]:
    """Returns what encodes one row at a time, of rows that can be rendered."""
    encode_batch = encoding.BatchEncoder(recipe, tokenizer)

    def encode_one(row: Row) -> list[Row]:
        (made,) = encode_batch([row])
        assert not isinstance(made, RowError), made
        return made

    return encode_one


def make_base(folder: Path, *, spare: int = 0, tied: bool = False) -> str:
    """Saves a Llama of two blocks with random weights and its tokenizer.

    Args:
        folder: Where to.
        spare: Rows of the embedding without a token.
        tied: Whether the output shares the embedding's weight.
    """
    text = folder / "text.jsonl"
    folder.mkdir(parents=True)
    text.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), encoding="utf-8")
    tokenizer = encoding.train_bpe(str(text), TrainTokenizer(vocab_size=300), 64)
    text.unlink()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + spare,
        tie_word_embeddings=tied,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def with_code(folder: Path, line: str) -> str:
    """Gives a saved model classes of its own, in a file that begins with a line of Python."""
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnModel"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "own.py").write_text(
        f"{line}\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n",
        encoding="utf-8",
    )
    return str(folder)


CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""A template that begins the text itself and ends a turn with a token that is not the end of a text."""


def make_chat_base(folder: Path, template: str | None = CHAT) -> str:
    """Saves a Llama of two blocks with random weights and a tokenizer that Baton did not train, which begins texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<|eot|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [row["prompt"] for row in PAIRS],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return str(folder)


def recipe(base: str, **sections: Any) -> Recipe:
    """Returns a recipe for the base; sections are merged one deep."""
    document: dict[str, Any] = {
        "name": "tiny",
        "seed": 7,
        "model": {"base": base},
        "data": {"source": "rows.jsonl", "max_length": 64},
        "training": {"batch_size": 8, "max_steps": 3, "optimizer": "sgd", "learning_rate": 0.1},
        "tracking": {"mlflow": None},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    return load.validate(document, origin="tiny")


def tokens(given: Recipe, rows: list[Row]) -> datasets.Dataset:
    """Returns normalised rows as the tokens that the recipe's method learns from."""
    assert given.model.base
    encode = encoder(given, loading.build_tokenizer(given, given.model.base))
    return datasets.Dataset.from_list([encoded for row in rows for encoded in encode(row)])


def trainer(
    given: Recipe, train: datasets.Dataset, folder: Path, held_out: datasets.Dataset | None = None, *features: type
) -> Any:
    """Builds a recipe's trainer as a chunk does; the features of other recipes are put before its own."""
    base = given.model.base
    assert base
    tokenizer = loading.build_tokenizer(given, base)
    model = loading.start_model(given, tokenizer, base)
    if given.training.trainable:
        freeze(model, given.training.trainable)
    setup = Setup(
        recipe=given,
        arguments=build.training_arguments(given, make_plan(given, len(train)), str(folder)),
        model=model,
        tokenizer=tokenizer,
        train=train,
        held_out=held_out,
        reference=lambda: loading.start_model(given, tokenizer, base),
        second_model=lambda: loading.second_model(given, pinned.fetch(given)["teacher"]),
    )
    made = methods.load(given.training.method).build(setup)
    if features:
        made.__class__ = exact_class(type(made), features)
    return made


def losses(trained: Any) -> list[float]:
    """Returns the loss of each step."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def weights(trained: Any) -> dict[str, torch.Tensor]:
    """Returns a copy of the weights by name."""
    return {name: value.detach().clone() for name, value in trained.model.named_parameters()}
