"""The exported model, loaded once, with its answers to the prompts of the check."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from baton.export import model_card
from baton.export.parity import ParityInputs, Reference, make_reference, shared_tokens
from baton.models import loading, prompts, trained
from baton.recipe.recipe import Recipe
from baton.runs.outcomes import ExportCheck, Likeness
from baton.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_PROMPTS = 3  # held-out rows that the check continues
MAX_PROMPT_TOKENS = 64
PLAIN_PROMPTS = ("The", "1 + 1 =", "What is this about?\n")  # where no held-out row gives a prompt


class ExportSource:
    def __init__(self, run: Run, recipe: Recipe, scratch: str) -> None:
        self.run = run
        self.scratch = scratch
        self.checkpoint = trained.chosen_checkpoint(run)
        self.digest = self.checkpoint.digest
        self.scores = recipe.training.spec.scores
        # Kernels of attention that training may use need a GPU, and change no weight.
        self.recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": None})})

    @cached_property
    def folder(self) -> str:
        return trained.final_folder(self.run, self.scratch, self.checkpoint)

    @cached_property
    def base(self) -> str | None:
        return trained.base_folder(self.recipe)

    @cached_property
    def licence(self) -> str | None:
        return model_card.licence(self.recipe, self.base)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return loading.load_tokenizer(self.folder, trust_remote_code=self.recipe.model.trust_remote_code)

    @cached_property
    def prompting(self) -> prompts.PromptFormat | None:
        return None if self.scores else prompts.format_of_run(self.run, self.recipe, self.tokenizer)

    @cached_property
    def inputs(self) -> ParityInputs:
        given = prompts.held_out_prompts(self.run, self.recipe, self.tokenizer, NUM_PROMPTS)
        texts = [prompt for prompt, *_ in given if prompt] or list(PLAIN_PROMPTS)
        ids = [self.tokenizer(text)["input_ids"][:MAX_PROMPT_TOKENS] for text in texts]
        return ParityInputs(
            prompts=[prompt for prompt in ids if prompt],
            num_tokens=0 if self.scores else self.recipe.export.check_tokens,
            texts=texts,
            auto_class=loading.auto_class(self.recipe).__name__,
            trust_remote_code=self.recipe.model.trust_remote_code,
        )

    @cached_property
    def _trained(self) -> tuple[Any, Reference]:
        """The model as trained, an adapter on its base, with its answers, taken before anything is merged into it."""
        model = trained.trained_model(self.recipe, self.tokenizer, self.folder, whole=True)
        return model, make_reference(model, self.inputs)

    @property
    def trained_reference(self) -> Reference:
        return self._trained[1]

    @cached_property
    def merged(self) -> PreTrainedModel:
        """The model with the adapter folded in, in the type of the export."""
        import torch

        # In place: `_trained` has the answers from before.
        merged: PreTrainedModel = self._trained[0].merge_and_unload() if self.recipe.adapter else self._trained[0]
        dtype = getattr(torch, self.recipe.export.dtype or self.recipe.model.dtype)
        for weight in merged.parameters():  # not `to`, which would round the rotary frequencies too
            weight.data = weight.data.to(dtype)
        return merged

    @cached_property
    def merged_reference(self) -> Reference:
        return make_reference(self.merged, self.inputs)

    def in_float32(self) -> PreTrainedModel:
        copied: PreTrainedModel = copy.deepcopy(self.merged).float()
        return copied

    def compare_with_trained(self, finding: ExportCheck, exported: Reference) -> ExportCheck:
        """Adds to a finding the distance from the answers before merging and rounding."""
        lengths = [len(prompt) for prompt in self.inputs.prompts]
        pairs = list(zip(exported.answers, self.trained_reference.answers, lengths, strict=True))
        furthest = max(float(abs(one.logits[:length] - other.logits[:length]).max()) for one, other, length in pairs)
        shared = shared_tokens([one.tokens for one, _, _ in pairs], [other.tokens for _, other, _ in pairs])
        words = finding.words
        if furthest:
            beside = f"{shared} of {finding.tokens} tokens and " if finding.tokens else ""
            words += f" (as before merging and rounding: {beside}logits within {furthest:.2g})"
        likeness = Likeness(tokens=shared, max_abs_difference=furthest)
        return finding.model_copy(update={"words": words, "from_trained": likeness})
