"""The model that is exported, loaded once, with its answers to the questions of the check."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from baton.checkpoint import sharded
from baton.checkpoint.store import CheckpointStore
from baton.export import answers, model_card, parity
from baton.export.answers import Expected, ParityInputs
from baton.models import loading, prompts, trained
from baton.models.prompts import PromptFormat, held_out_prompts
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportCheck, Likeness
from baton.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = 3
"""Held-out rows that the check continues."""
LONGEST = 64
"""Tokens of a prompt in the check, at most."""
PLAIN = ("The", "1 + 1 =", "What is this about?\n")
"""Prompts where no held-out row gives one."""


class ExportSource:
    """The checkpoint, model and tokenizer that a run's exports are made from and compared with.

    Args:
        run: The run.
        recipe: Its recipe.
        scratch: Folder for files.
    """

    def __init__(self, run: Run, recipe: Recipe, scratch: str) -> None:
        self.run = run
        self.scratch = scratch
        self.checkpoint = trained.chosen_checkpoint(run)
        # Kernels of attention that training may use need a GPU, and change no weight.
        self.recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": None})})

    @property
    def scores(self) -> bool:
        """Whether the model scores texts instead of writing them."""
        return self.recipe.training.spec.scores

    @property
    def digest(self) -> str:
        """State digest of the checkpoint."""
        return self.checkpoint.digest

    @cached_property
    def folder(self) -> str:
        """Local files of the checkpoint, every byte checked; of one in shards, the model put together."""
        fetched = CheckpointStore(self.run).fetch(self.checkpoint, f"{self.scratch}/checkpoint")
        return sharded.as_whole(fetched, self.scratch)

    @cached_property
    def base(self) -> str | None:
        """Local files of the base model, None for a model from scratch."""
        return trained.base_folder(self.recipe)

    @cached_property
    def facts(self) -> model_card.Facts:
        """What the model card says of the checkpoint."""
        address = CheckpointStore(self.run).uri(self.checkpoint)
        return model_card.Facts(
            self.checkpoint.step, address, self.checkpoint.meta, model_card.licence(self.recipe, self.base)
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the checkpoint."""
        return loading.load_tokenizer(self.folder, trust_remote_code=self.recipe.model.trust_remote_code)

    @cached_property
    def tokenizer_folder(self) -> str:
        """Local files of the tokenizer as it is now."""
        folder = f"{self.scratch}/tokenizer"
        self.tokenizer.save_pretrained(folder)
        return folder

    @cached_property
    def texts(self) -> list[str]:
        """Texts that the model is asked about."""
        given = held_out_prompts(self.run, self.recipe, self.tokenizer, PROMPTS)
        return [prompt for prompt, *_ in given if prompt] or list(PLAIN)

    @cached_property
    def prompting(self) -> PromptFormat | None:
        """How the model was asked in training; None for one that scores."""
        return None if self.scores else prompts.format_of_run(self.run, self.recipe, self.tokenizer)

    @cached_property
    def context(self) -> parity.Context:
        """What every check needs."""
        spec = self.recipe.export
        ids = [self.tokenizer(text)["input_ids"][:LONGEST] for text in self.texts]
        return parity.Context(
            questions=ParityInputs([prompt for prompt in ids if prompt], 0 if self.scores else spec.check_tokens),
            texts=self.texts,
            kind=loading.auto_class(self.recipe).__name__,
            trust_remote_code=self.recipe.model.trust_remote_code,
        )

    @cached_property
    def _loaded(self) -> tuple[Any, Expected]:
        """The model as trained, an adapter on its base, and what it says; before anything is merged into it."""
        model = trained.trained_model(self.recipe, self.tokenizer, self.folder, whole=True)
        return model, self.ask(model)

    @property
    def said_trained(self) -> Expected:
        """What the model is and says as it was trained."""
        return self._loaded[1]

    @cached_property
    def whole(self) -> PreTrainedModel:
        """The model with the adapter folded in, in the type asked for."""
        import torch

        model = self._loaded[0]
        if self.recipe.adapter:
            model = model.merge_and_unload()
        whole: PreTrainedModel = model
        dtype = getattr(torch, self.recipe.export.dtype or self.recipe.model.dtype)
        for weight in whole.parameters():  # not `to`, which would round the rotary frequencies too
            weight.data = weight.data.to(dtype)
        return whole

    @cached_property
    def said_whole(self) -> Expected:
        """What the whole model is and says, in the type asked for."""
        return self.ask(self.whole)

    def ask(self, model: Any) -> Expected:
        """Returns what a model says to the questions of the check, and its weights' digests."""
        return answers.expected(model, self.context.questions)

    def in_float32(self) -> PreTrainedModel:
        """Returns a copy of the whole model in float32."""
        copied: PreTrainedModel = copy.deepcopy(self.whole).float()
        return copied

    def beside_trained(self, finding: ExportCheck, said: Expected) -> ExportCheck:
        """Returns a finding with how near the exported model's answers are to those of the model as it was trained."""
        lengths = [len(prompt) for prompt in self.context.questions.prompts]
        pairs = list(zip(said.answers, self.said_trained.answers, lengths, strict=True))
        apart = max(float(abs(one.logits[:length] - other.logits[:length]).max()) for one, other, length in pairs)
        shared = parity.agreement([one.tokens for one, _, _ in pairs], [other.tokens for _, other, _ in pairs])
        words = finding.words
        if apart:
            beside = f"{shared} of {finding.tokens} tokens and " if finding.tokens else ""
            words += f" (as before merging and rounding: {beside}logits within {apart:.2g})"
        likeness = Likeness(tokens=shared, max_abs_difference=apart)
        return finding.model_copy(update={"words": words, "from_trained": likeness})
