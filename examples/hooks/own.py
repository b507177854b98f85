"""A callback, a collator, a loss and a reward, for the recipe beside this file."""

import torch
from transformers import DataCollatorForSeq2Seq, TrainerCallback


class SlowStart(TrainerCallback):
    """Scales gradients up step by step. What it counts decides the bits, so it has a `state_dict`."""

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps
        self.done = 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        """Runs before each step of the optimizer."""
        self.done += 1
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(min(1.0, self.done / self.steps))

    def state_dict(self):
        """Returns what a checkpoint keeps."""
        return {"done": self.done}

    def load_state_dict(self, saved):
        """Puts it back, in the next chunk's process."""
        self.done = saved["done"]


def masked(tokenizer, share: float = 0.1):
    """Replaces some of the tokens that the model reads; Baton seeds the draws for each batch."""
    pad = DataCollatorForSeq2Seq(tokenizer)

    def collate(rows):
        batch = pad(rows)
        hidden = torch.rand(batch["input_ids"].shape) < share
        batch["input_ids"][hidden] = tokenizer.pad_token_id
        return batch

    return collate


def focal_loss(outputs, labels, num_items_in_batch=None, gamma: float = 2.0):
    """Counts tokens that the model is sure of for less (Lin et al., arXiv:1708.02002)."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="none")
    weighted = (1 - torch.exp(-losses)) ** gamma * losses
    return weighted.sum() / (num_items_in_batch if num_items_in_batch is not None else (wanted != -100).sum())


def polite(completions, **_):
    """A reward: for `training.grpo.rewards: ["own:polite"]`."""
    return [1.0 if "please" in str(said).lower() else 0.0 for said in completions]
