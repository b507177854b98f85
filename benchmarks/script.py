"""Training without Baton, as a good engineer writes it: `python -m benchmarks.script SETTINGS_JSON`.

A TRL script in a fresh process. It fetches its tokens, packed once and kept in the store, and the newest complete
checkpoint. It trains on, saves to memory, and uploads in a thread while training continues. The setting `checkpoints`
is one of:

- `upload`: the Trainer's checkpoint, uploaded by a thread.
- `dcp`: model and optimizer by `torch.distributed.checkpoint.async_save`, uploaded by the same thread.
- `mount`: the Trainer's checkpoint in a mounted bucket, which uploads by itself.

`jit` adds `TrainingArguments(enable_jit_checkpoint=True)`: a checkpoint after SIGTERM.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

sys.modules["wandb"] = None  # type: ignore[assignment]  # an image without it: TRL imports whatever is installed

import datasets
import s3fs
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from benchmarks.mark import mark


class Uploads:
    """Checkpoints below a prefix, one upload at a time; an object names the newest complete one."""

    def __init__(self, uri: str) -> None:
        self.fs = s3fs.S3FileSystem()
        self.uri = uri.removeprefix("s3://")
        self._pool = ThreadPoolExecutor(1, "upload")
        self._upload: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        return self._upload is None or self._upload.done()

    def get_inputs(self, uri: str, folder: str) -> str:
        self.fs.get(f"{uri.removeprefix('s3://')}/", f"{folder}/inputs/", recursive=True)
        return f"{folder}/inputs"

    def newest(self) -> str | None:
        return self.fs.cat_file(f"{self.uri}/newest").decode() if self.fs.exists(f"{self.uri}/newest") else None

    def get_newest(self, folder: str) -> str | None:
        name = self.newest()
        if name:
            self.fs.get(f"{self.uri}/{name}/", f"{folder}/{name}/", recursive=True)
        return name and f"{folder}/{name}"

    def put(self, local: str, written: Future[Any] | None = None) -> None:
        """Starts the upload of a folder, after whoever writes it there has ended."""
        self.wait()
        self._upload = self._pool.submit(self._put, local, written)

    def wait(self) -> None:
        if self._upload:
            self._upload.result()

    def _put(self, local: str, written: Future[Any] | None) -> None:
        if written:
            written.result()
        name, before = os.path.basename(local), self.newest()
        self.fs.put(f"{local}/", f"{self.uri}/{name}/", recursive=True)
        self.fs.pipe_file(f"{self.uri}/newest", name.encode())
        if before and before != name:
            self.fs.rm(f"{self.uri}/{before}", recursive=True)
        shutil.rmtree(local)
        mark("put", step=int(name.rpartition("-")[2]))


class Mounted(Uploads):
    """Checkpoints in a mounted bucket: the mount uploads files in the order in which they were closed."""

    def get_newest(self, folder: str) -> str | None:
        complete = [entry for entry in os.scandir(folder) if os.path.exists(f"{entry.path}/trainer_state.json")]
        return max(complete, key=lambda entry: int(entry.name.rpartition("-")[2])).path if complete else None

    def put(self, local: str, written: Future[Any] | None = None) -> None: ...


class Saver(TrainerCallback):
    """Saves every so many steps or seconds and at the target."""

    def __init__(self, settings: dict[str, Any], uploads: Uploads, written: Callable[[], Future[Any] | None]) -> None:
        self.settings, self.uploads, self.written = settings, uploads, written
        self.first, self.saved_at = True, time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first:
            self.first = False
            mark("restored", step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        mark("step", step=state.global_step)
        steps, seconds = self.settings["every_steps"], self.settings["every_seconds"]
        by_steps = steps and state.global_step % steps == 0
        by_time = seconds and time.monotonic() - self.saved_at >= seconds and self.uploads.is_idle
        is_last = state.global_step >= self.settings["target"]
        control.should_training_stop = control.should_training_stop or is_last  # SIGTERM may have asked for it
        control.should_save = bool(by_steps or by_time or is_last)
        if control.should_save:
            self.uploads.wait()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.uploads.put(f"{args.output_dir}/checkpoint-{state.global_step}", self.written())
        self.saved_at = time.monotonic()
        mark("saved", step=state.global_step)


class AsyncTrainer(SFTTrainer):
    """Saves model and optimizer by `async_save`, and all else as the Trainer does."""

    written: Any = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        os.makedirs(str(output_dir), exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        from torch.distributed.checkpoint import async_save

        self.written = async_save(self._state(), checkpoint_id=f"{output_dir}/dcp", no_dist=True)
        torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Waits for the optimizer: both are loaded at once."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        from torch.distributed.checkpoint import load
        from torch.distributed.checkpoint.state_dict import set_state_dict

        if checkpoint:
            state = self._state()
            load(state, checkpoint_id=f"{checkpoint}/dcp", no_dist=True)
            set_state_dict(
                self.model,
                self.optimizer.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            self.lr_scheduler.load_state_dict(torch.load(f"{checkpoint}/scheduler.pt", weights_only=True))

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        return {"model": model, "optimizer": optimizer}


def main(settings: dict[str, Any]) -> None:
    mark("imported")
    torch.set_num_threads(settings["threads"])
    transformers.set_seed(settings["seed"])
    datasets.disable_progress_bars()
    kind, folder = settings["checkpoints"], settings["folder"]
    uploads = (Mounted if kind == "mount" else Uploads)(settings["uri"])
    inputs = uploads.get_inputs(settings["inputs"], settings["scratch"])
    mark("inputs")
    local = uploads.get_newest(folder)
    mark("got", found=local)
    tokenizer = AutoTokenizer.from_pretrained(inputs)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(inputs), dtype=torch.float32)
    trainer = (AsyncTrainer if kind == "dcp" else SFTTrainer)(
        model=model,
        args=arguments(
            settings,
            dataset_kwargs={"skip_prepare_dataset": True},
            enable_jit_checkpoint=settings["jit"],
            save_total_limit=2 if kind == "mount" else None,
        ),
        train_dataset=datasets.load_from_disk(f"{inputs}/tokens"),
        processing_class=tokenizer,
        callbacks=[Saver(settings, uploads, lambda: getattr(trainer, "written", None))],
    )
    mark("built", rows=len(trainer.train_dataset))
    trainer.train(resume_from_checkpoint=local)
    if settings["jit"] and (left := get_last_checkpoint(folder)) and uploads.is_idle:
        mark("saved", step=trainer.state.global_step)  # after SIGTERM, which calls no `on_save`
        uploads.put(left)
    uploads.wait()
    os._exit(0)  # the interpreter's end takes a second or two, and everything is in the store


def arguments(settings: dict[str, Any], learning_rate: float = 1e-3, **more: Any) -> SFTConfig:
    """Returns the benchmark's recipe in TRL's words."""
    return SFTConfig(
        output_dir=settings["folder"],
        seed=settings["seed"],
        data_seed=settings["seed"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch"],
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        dataloader_pin_memory=False,
        report_to="none",
        disable_tqdm=True,
        max_length=settings["length"],
        packing=True,
        packing_strategy="wrapped",
        **more,
    )


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as settings_file:
        main(json.load(settings_file))
