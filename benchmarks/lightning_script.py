"""The same training by PyTorch Lightning: `python -m benchmarks.lightning_script SETTINGS_JSON`.

Model, tokens, batch and optimizer are those of `benchmarks.script`. `AsyncCheckpointIO` writes each checkpoint from a
thread, straight to the store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import datasets
import pytorch_lightning as lightning
import s3fs
import torch
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.mark import mark


class Module(lightning.LightningModule):
    def __init__(self, inputs: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(inputs), dtype=torch.float32)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


class Store(TorchCheckpointIO):
    """Writes a checkpoint to the store, then the object that names it, and removes the one that it replaces."""

    def __init__(self, uri: str) -> None:
        self.fs, self.uri = s3fs.S3FileSystem(), uri.removeprefix("s3://")
        self.stored = 0

    def newest(self) -> str | None:
        return self.fs.cat_file(f"{self.uri}/newest").decode() if self.fs.exists(f"{self.uri}/newest") else None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        before, name = self.newest(), os.path.basename(path)
        super().save_checkpoint(checkpoint, path, storage_options)
        self.fs.pipe_file(f"{self.uri}/newest", name.encode())
        if before and before != name:
            self.fs.rm(f"{self.uri}/{before}")
        self.stored = int(name.rpartition("-")[2])
        mark("put", step=self.stored)


class Saver(lightning.Callback):
    """Saves every so many steps or seconds and at the target."""

    def __init__(self, settings: dict[str, Any], store: Store) -> None:
        self.settings, self.store, self.saved = settings, store, 0
        self.first, self.saved_at = True, time.monotonic()

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.first:
            self.first = False
            mark("restored", step=trainer.global_step)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        step = trainer.global_step
        mark("step", step=step)
        steps, seconds = self.settings["every_steps"], self.settings["every_seconds"]
        trainer.should_stop = step >= self.settings["target"]
        is_due = seconds and time.monotonic() - self.saved_at >= seconds and self.store.stored == self.saved
        if (steps and step % steps == 0) or is_due or trainer.should_stop:
            trainer.save_checkpoint(f"{self.settings['uri']}/checkpoint-{step}")
            self.saved, self.saved_at = step, time.monotonic()
            mark("saved", step=step)


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns a batch of rows, of which packing leaves some shorter."""
    fills = {"input_ids": 0, "labels": -100}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill)
        for name, fill in fills.items()
    }


def main(settings: dict[str, Any]) -> None:
    mark("imported")
    torch.set_num_threads(settings["threads"])
    lightning.seed_everything(settings["seed"])
    store, inputs = Store(settings["uri"]), f"{settings['scratch']}/inputs"
    store.fs.get(f"{settings['inputs'].removeprefix('s3://')}/", f"{inputs}/", recursive=True)
    newest = store.newest()
    local = newest and f"{settings['folder']}/{newest}"
    if local:
        store.fs.get_file(f"{store.uri}/{newest}", local)
    mark("got", found=local)
    tokens: Any = datasets.load_from_disk(f"{inputs}/tokens").with_format("torch", columns=["input_ids", "labels"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=settings["steps"],
        max_epochs=-1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=settings["folder"],
        plugins=[AsyncCheckpointIO(store)],
        callbacks=[Saver(settings, store)],
    )
    module = Module(inputs)
    mark("built", rows=len(tokens))
    batches = DataLoader(tokens, settings["batch"], shuffle=True, collate_fn=padded)
    trainer.fit(module, batches, ckpt_path=local, weights_only=False)
    os._exit(0)  # as the other script


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as settings_file:
        main(json.load(settings_file))
