"""What the methods whose model generates do with prompts that are conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.components.shared.models import conversing, rewards
from baton.components.train_chunk.trainer.chunked import Chunked

Row = dict[str, Any]


class InTurns(Chunked):
    """Mixin for trainers whose model generates: a prompt is rendered with the tools that its row declares, an
    answer ends with its turn, and is judged in the row's own shape.

    TRL's trainers take tools as Python functions, the same for all rows, and run them; a row's are declarations alone.
    """

    eos_token_ids: list[int]
    generation_config: Any
    generation_kwargs: Row
    chat_template_kwargs: Row
    _declared: Sequence[Any] = ()

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        end = conversing.end_of_turn(self.processing_class)
        if end is None or end in self.eos_token_ids or not isinstance(self.train_dataset[0]["prompt"], list):
            return
        # TRL takes those of the tokenizer and the model, and neither need name the one that the template writes.
        self.eos_token_ids = [*self.eos_token_ids, end]
        self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Any:
        """Judges a row whose prompt is a text as texts, though the model saw a conversation."""
        if conversing.PROMPT_TEXT in inputs[0]:
            prompts = [row[conversing.PROMPT_TEXT] for row in inputs]
            completions = self.processing_class.batch_decode(completion_ids_list, skip_special_tokens=True)
            inputs = [rewards.columns(row) for row in inputs]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: list[Row]) -> Any:
        self._declared = [row.get("tools") for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if not any(self._declared):
            return super()._tokenize_prompts(prompts)
        ids = [
            self.processing_class.apply_chat_template(
                prompt,
                tools=tools,
                chat_template=getattr(self, "chat_template", None),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **self.chat_template_kwargs,
            )["input_ids"]
            for prompt, tools in zip(prompts, self._declared, strict=True)
        ]
        return ids, None, {}
