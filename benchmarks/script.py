"""What one would write without Baton: a TRL script that keeps its checkpoints in S3 by s3fs, synchronously.

`python -m benchmarks.script SETTINGS_JSON`. A fresh process gets the newest checkpoint that was put completely, builds
tokenizer, model and `SFTTrainer` on text rows, trains on from there, saves and puts, and prints what it did when.
"""

import glob
import json
import os
import shutil
import sys
import time
from typing import Any

import datasets
import psutil
import s3fs
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


def mark(kind: str, at: float | None = None, **fields: Any) -> None:
    print(json.dumps({"mark": kind, "at": at or time.time(), **fields}), flush=True)


class Checkpoints:
    """Checkpoint folders below a prefix, and an object that names the newest one that is complete."""

    def __init__(self, uri: str) -> None:
        self.fs = s3fs.S3FileSystem()
        self.uri = uri.removeprefix("s3://")

    def get_newest(self, folder: str) -> str | None:
        if not self.fs.exists(f"{self.uri}/newest"):
            return None
        name = self.fs.cat_file(f"{self.uri}/newest").decode()
        local = f"{folder}/{name}"
        self.fs.get(f"{self.uri}/{name}/", f"{local}/", recursive=True)
        return local

    def put(self, local: str) -> None:
        name = os.path.basename(local)
        before = self.fs.cat_file(f"{self.uri}/newest").decode() if self.fs.exists(f"{self.uri}/newest") else name
        self.fs.put(f"{local}/", f"{self.uri}/{name}/", recursive=True)
        self.fs.pipe_file(f"{self.uri}/newest", name.encode())
        if before != name:
            self.fs.rm(f"{self.uri}/{before}", recursive=True)


class Saver(TrainerCallback):
    """Saves every so many steps or seconds and at the target, and puts each checkpoint before training continues."""

    def __init__(self, settings: dict[str, Any], checkpoints: Checkpoints) -> None:
        self.settings, self.checkpoints = settings, checkpoints
        self.first, self.saved_at = True, time.monotonic()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first:
            self.first = False
            mark("restored", step=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        mark("step", step=state.global_step)
        steps, seconds = self.settings["every_steps"], self.settings["every_seconds"]
        by_steps = steps and state.global_step % steps == 0
        by_time = seconds and time.monotonic() - self.saved_at >= seconds
        control.should_training_stop = state.global_step >= self.settings["target"]
        control.should_save = bool(by_steps or by_time or control.should_training_stop)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        mark("saved", step=state.global_step)
        newest = f"{args.output_dir}/checkpoint-{state.global_step}"
        self.checkpoints.put(newest)
        for folder in glob.glob(f"{args.output_dir}/checkpoint-*"):
            if folder != newest:
                shutil.rmtree(folder)
        self.saved_at = time.monotonic()
        mark("put", step=state.global_step)


def main(settings: dict[str, Any]) -> None:
    mark("started", at=psutil.Process().create_time())
    mark("imported")
    torch.set_num_threads(settings["threads"])
    transformers.set_seed(settings["seed"])
    datasets.disable_progress_bars()
    checkpoints = Checkpoints(settings["uri"])
    local = checkpoints.get_newest(settings["folder"])
    mark("got", found=local)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"]), dtype=torch.float32)
    mark("model")
    rows = datasets.load_dataset("json", data_files=settings["rows"], split="train")
    trainer = SFTTrainer(
        model=model,
        args=arguments(settings),
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[Saver(settings, checkpoints)],
    )
    mark("built", rows=len(trainer.train_dataset))
    trainer.train(resume_from_checkpoint=local)


def arguments(settings: dict[str, Any]) -> SFTConfig:
    """Returns what the recipe of the benchmark says, in TRL's words."""
    return SFTConfig(
        output_dir=settings["folder"],
        seed=settings["seed"],
        data_seed=settings["seed"],
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch"],
        learning_rate=1e-3,
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
    )


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as settings_file:
        main(json.load(settings_file))
