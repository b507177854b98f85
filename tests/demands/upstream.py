"""What plain Transformers does, in processes of their own: a training of seconds, and what becomes of it.

Each tells what it has found as one line of JSON, which `read` takes out of what was printed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 8
BATCH = 4


def tell(**facts: Any) -> None:
    """Prints what was found."""
    print(json.dumps(facts), flush=True)


def read(printed: str) -> dict[str, Any]:
    """Returns what a process has told."""
    found: dict[str, Any] = json.loads(next(line for line in printed.splitlines() if line.startswith('{"')))
    return found


def rows() -> dict[str, list[list[int]]]:
    """Sixteen rows of twelve tokens: two epochs of four steps."""
    drawn = random.Random(0)
    ids = [[drawn.randrange(5, 60) for _ in range(12)] for _ in range(16)]
    return {"input_ids": ids, "labels": ids}


def model() -> Any:
    """A tiny Llama, the same each time, with dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, attention_dropout=0.2, **sizes))


def trainer(output: str, *, train: Any = None, trained: Any = None, collator: Any = None, **settings: Any) -> Any:
    """Transformers' own trainer of the model."""
    import datasets
    import torch
    from transformers import Trainer, TrainingArguments

    torch.set_num_threads(1)
    given = {"max_steps": STEPS, "save_steps": 2, "report_to": "none", **settings}
    arguments = TrainingArguments(
        output,
        per_device_train_batch_size=BATCH,
        learning_rate=5e-3,
        logging_steps=1,
        seed=7,
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    data = datasets.Dataset.from_dict(rows()) if train is None else train
    return Trainer(trained or model(), arguments, data_collator=collator, train_dataset=data)


def losses(trained: Any, after: int = 0) -> list[float]:
    """The logged losses of the steps after one."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry and entry["step"] > after]


def killed_while_saving(output: str) -> None:
    """Trains, and dies with half of a file of the second checkpoint written."""
    import torch

    save = torch.save

    def half(value: Any, path: Any, *given: Any, **named: Any) -> None:
        save(value, path, *given, **named)
        if "checkpoint-4" in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    trainer(output).train()


def resumed(output: str, checkpoint: str) -> None:
    """Goes on from a checkpoint."""
    again = trainer(output)
    again.train(resume_from_checkpoint=checkpoint)
    tell(step=again.state.global_step)


def noisy(batch_of: Callable[..., Any]) -> Callable[..., Any]:
    """A collator that replaces tokens at random, as masking does."""

    def collate(given: Any) -> Any:
        import torch

        batch = batch_of(given)
        hit = torch.rand(batch["input_ids"].shape) < 0.2
        batch["input_ids"] = torch.where(hit, torch.randint_like(batch["input_ids"], 60), batch["input_ids"])
        return batch

    return collate


def stopped_and_not(output: str) -> None:
    """Trains once through and once again from the checkpoint of step 5, with both kinds of collators."""
    from transformers import default_data_collator

    found = {}
    for name, collator in (("plain", default_data_collator), ("drawing", noisy(default_data_collator))):
        whole = trainer(f"{output}/{name}", collator=collator, save_steps=5)
        whole.train()
        again = trainer(f"{output}/{name}-again", collator=collator)
        again.train(resume_from_checkpoint=f"{output}/{name}/checkpoint-5")
        found[name] = [losses(whole, 5), losses(again, 5)]
    tell(**found)


def preempted_on_a_mount(output: str) -> None:
    """Trains in a folder whose files reach the bucket later, the large ones last, and goes on from the bucket's."""
    whole = trainer(output, save_steps=5)
    whole.train()
    uploaded = ("config.json", "trainer_state.json", "model.safetensors")
    mount = Path(output, "mount")
    for folder in sorted(Path(output).glob("checkpoint-*")):
        names = [path.name for path in folder.iterdir() if path.name in uploaded or folder.name != "checkpoint-5"]
        (mount / folder.name).mkdir(parents=True)
        for name in names:
            shutil.copy(folder / name, mount / folder.name / name)
    shutil.rmtree(mount / "checkpoint-8")  # the machine is taken before the run's end
    newest = max(mount.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    again = trainer(f"{output}-again")
    again.train(resume_from_checkpoint=str(newest))
    tell(newest=newest.name, files=sorted(os.listdir(newest)), whole=losses(whole, 5), again=losses(again, 5))


def pulled_when_resumed(output: str) -> None:
    """Counts the rows that a live source of prompts is asked for, in a run and in what resumes it at step 5."""
    import torch

    class Prompts(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        pulled = 0

        def __iter__(self) -> Any:
            ids = rows()["input_ids"]
            while True:
                for row in ids:
                    self.pulled += 1
                    yield {"input_ids": row, "labels": row}

    counts = []
    for resume in (None, f"{output}/checkpoint-5"):
        prompts = Prompts()
        trainer(output, train=prompts, save_steps=5).train(resume_from_checkpoint=resume)
        counts.append(prompts.pulled)
    tell(whole=counts[0], resumed=counts[1])


def saved_with_an_injected_adapter(output: str) -> None:
    """Trains LoRA weights that PEFT has put into the model, which is then no `PeftModel`; looks at what is saved."""
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors import safe_open

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    trained = inject_adapter_in_model(config, model())
    count = sum(value.numel() for value in trained.parameters() if value.requires_grad)
    trainer(output, trained=trained, max_steps=4).train()
    saved = {}
    for step in (2, 4):
        with safe_open(f"{output}/checkpoint-{step}/model.safetensors", "pt") as file:
            saved[step] = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    frozen = [sum(size for name, size in each.items() if "lora_" not in name) for each in saved.values()]
    tell(trained=count, frozen=frozen)


def ranks_that_wait(folder: str) -> None:
    """Two processes of which the first tokenizes for longer than the other one waits, as their collectives allow."""
    import datetime
    import time
    from multiprocessing import get_context

    import torch
    from transformers import TrainingArguments

    context, port = get_context("fork"), _free_port()
    told = context.SimpleQueue()

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        # `ddp_timeout` does not reach gloo.
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
        arguments = TrainingArguments(f"{folder}/{number}", use_cpu=True, ddp_backend="gloo")
        try:
            with arguments.main_process_first(desc="tokenizing"):
                time.sleep(10 if number == 0 else 0)
            told.put([number, ""])
        except Exception as error:
            told.put([number, " ".join(str(error).split())[:300]])
        finally:
            os._exit(0)

    processes = [context.Process(target=rank, args=(number,)) for number in (0, 1)]
    for process in processes:
        process.start()
    processes[1].join(60)
    first = [None, "nothing"] if told.empty() else told.get()
    for process in processes:
        process.kill()
    tell(rank=first[0], error=first[1])


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def tracked(output: str, uri: str, run_id: str, kill_after: int, resume: str | None) -> None:
    """Trains with MLflow's callback into one tracking run, and dies after a step."""
    import mlflow
    from transformers import TrainerCallback

    class Dying(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == kill_after:
                mlflow.flush_async_logging()  # a step of a larger model takes longer than what it logs
                os.kill(os.getpid(), signal.SIGKILL)

    os.environ |= {"MLFLOW_TRACKING_URI": uri, "MLFLOW_RUN_ID": run_id, "HF_MLFLOW_LOG_ARTIFACTS": "0"}
    training = trainer(output, report_to="mlflow", save_steps=3)
    training.add_callback(Dying())
    training.train(resume_from_checkpoint=resume)
