"""Stages as processes: forked from the server of `baton.local.forkserver`."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from baton import events
from baton.checkpoint import seals
from baton.checkpoint.store import Checkpoint, CheckpointStore
from baton.errors import UnavailableError, UserError
from baton.kfp import processes
from baton.local import forkserver
from baton.machine import PROMISED_GPUS
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.run import Run
from baton.store.clouds import ENVIRONMENT
from baton.store.storage import Storage
from tests.support import without

_context = multiprocessing.get_context("forkserver")


def leg(function: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """Runs a function in a process of its own and returns its exit code and what it printed."""
    forkserver.start()
    reader, writer = os.pipe()
    process = _context.Process(target=_redirected, args=(_DupFd(writer), _credentials(), function, arguments))
    process.start()
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as output:
        printed = output.read()
    process.join()
    processes.clear_staging(process.pid)  # what a killed one left; the machine's memory outlives it here
    return int(process.exitcode or 0), printed


def _DupFd(descriptor: int) -> Any:  # noqa: N802
    from multiprocessing.reduction import DupFd

    return DupFd(descriptor)


def _credentials() -> dict[str, str]:
    """The forked processes have the environment of the server they are forked from, which is older."""
    return {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}


def _redirected(
    output: Any, environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    descriptor = output.detach()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    try:
        with events.stage(function.__name__):
            function(*arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def at(folder: str, function: Callable[..., None], *arguments: Any) -> None:
    """Runs a leg in a folder, where the relative addresses that it is given lead somewhere."""
    os.chdir(folder)
    function(*arguments)


def split_and_tokenize(recipe_json: str, name: str) -> None:
    from baton.data.split import split_data
    from baton.data.tokenize import tokenize_run
    from baton.recipe import load

    tokenize_run(split_data(load.loads(recipe_json), name)["run_uri"])


def chunk(run_uri: str, index: int, leave_out: tuple[str, ...] = (), kill_at: str | None = None) -> None:
    from baton.train.chunk import run_chunk

    if kill_at:
        _kill_at(kill_at)
    if leave_out:
        without.install()
    run_chunk(run_uri, index, leave_out)


def begin_sweep(recipe_json: str, name: str) -> None:
    """Makes the data and runs of a sweep's only bracket."""
    from baton.data.split import split_data
    from baton.data.tokenize import tokenize_run
    from baton.sweep import trials

    sweep, preparations = trials.start_bracket(load.loads(recipe_json), name, 1)
    for preparation in preparations:
        tokenize_run(split_data(load.loads(preparation["recipe"]), preparation["run"])["run_uri"])
    trials.create_trials(sweep, 1)


def turns(
    runs: list[str],
    first: int,
    last: int,
    leave_out: tuple[str, ...] = (),
    kill_at: str | None = None,
    device: tuple[int, str] | None = None,
) -> None:
    """Trains chunks of a sweep's trials in turns inside this process; `device` is a rung's number and a name."""
    from baton.train.turns import Device, take_turns

    if kill_at:
        _kill_at(kill_at)
    take_turns(runs, first, last, leave_out, Device(*device) if device else None)


def share(sweep_uri: str, trials: str, spare: int, ends: int, times: int, step: int) -> None:
    """Trains a device's trials in the first rung as a pod does, whose processes get a signal, so many, at a step."""
    from baton.kfp.rung import train_share
    from baton.runs.run import Sweep

    told, left = events.emit, [times]

    def emit(event: events.Event) -> None:
        told(event)
        if isinstance(event, events.Step) and event.step == step and left[0]:
            left[0] -= 1
            for child in psutil.Process().children():
                if "take_turns" in child.cmdline():
                    child.send_signal(ends)

    events.emit = emit
    print(f"left: {train_share(Sweep.open(sweep_uri), 1, trials, spare)!r}")


def reporting_chunk(run_uri: str, index: int, settings: dict[str, str]) -> None:
    """Trains a chunk as a node of a TrainJob does whose progress Kubeflow Trainer tracks."""
    os.environ.update(settings)
    chunk(run_uri, index)


def scaling_chunk(run_uri: str, index: int, leave_out: tuple[str, ...] = (), kill_at: str | None = None) -> None:
    """Runs a chunk in fp16 whose gradients are scaled as on a GPU: by itself Accelerate scales none on a CPU."""
    import torch
    from accelerate import Accelerator

    begin = Accelerator.__init__

    def with_scaler(self: Any, *arguments: Any, **settings: Any) -> None:
        begin(self, *arguments, **settings)
        assert (self.mixed_precision, self.scaler) == ("fp16", None)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

    Accelerator.__init__ = with_scaler
    chunk(run_uri, index, leave_out, kill_at)


def disturbed_chunk(run_uri: str, index: int) -> None:
    """Runs a chunk in which what is drawn beside training is drawn from training's own generators."""
    import contextlib

    from baton.models import rng
    from baton.train.chunk import run_chunk

    rng.undisturbed = contextlib.nullcontext
    run_chunk(run_uri, index)


def chunk_in_a_pod(run_uri: str, index: int, step: int, ends: str, times: int, folder: str) -> None:
    """Runs a chunk as its component does, whose processes end at a step so many times.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk.
        step: After which step they end.
        ends: How: see `ENDS`.
        times: How many of them; the next one does not.
        folder: Where they leave a file each.
    """
    from baton.train import supervisor

    told = events.emit

    def emit(event: events.Event) -> None:
        told(event)
        ended = len(os.listdir(folder))
        wanted = step + 2 * ended if ends.endswith("later") else step
        if isinstance(event, events.Step) and event.step == wanted and ended < times:
            Path(folder, str(os.getpid())).touch()
            ENDS[ends]()

    events.emit = emit
    supervisor.PAUSE_S = 0.0
    supervisor.run(run_uri, index)


def out_of_memory(run_uri: str, index: int, step: int, counts: str, folder: str) -> None:
    """Runs a chunk as its component does, whose process the kernel kills for want of memory, as its counts say."""
    from baton import machine

    oom_kills = machine.oom_kills
    machine.oom_kills = lambda: oom_kills(Path(counts).parent)
    ENDS["out of memory"] = lambda: (
        Path(counts).write_text("oom 2\noom_kill 1\n"),
        os.kill(os.getpid(), signal.SIGKILL),
    )[1]
    chunk_in_a_pod(run_uri, index, step, "out of memory", 9, folder)


def _fail_with(error: Exception) -> None:
    raise error


def _preempt_the_stage() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1)  # steps of a tiny model are over before the signal has come back


def _spare() -> psutil.Process:
    """Returns the process that waits beside this one, once there is one."""
    while not (others := [child for child in psutil.Process().parent().children() if child.pid != os.getpid()]):
        time.sleep(0.05)
    return others[0]


def _orphan_the_spare() -> None:
    """Ends the stage, and prints the number of the process that waits."""
    print(f"spare {_spare().pid}", flush=True)
    ENDS["orphaned"]()


def _leave_it_to_the_spare() -> None:
    """Ends this process once the one that waits has imported, and does nothing any more."""
    spare, before = _spare(), -1.0
    while (now := sum(spare.cpu_times()[:2])) != before or spare.memory_info().rss < 200e6:
        before = now
        time.sleep(2)
    ENDS["killed"]()


ENDS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "device": lambda: _fail_with(RuntimeError("CUDA error: an illegal memory access was encountered")),
    "device, then later": lambda: ENDS["device"](),
    "store": lambda: _fail_with(UnavailableError("store 's3://baton' does not answer.")),
    "preempted": _preempt_the_stage,
    "orphaned": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "orphaned, with a spare": _orphan_the_spare,
    "killed, with a spare": _leave_it_to_the_spare,
    "user": lambda: _fail_with(UserError("hooks.loss returns text; expected a tensor.")),
    "fault": lambda: _fail_with(KeyError("labels")),
    "memory": lambda: _fail_with(RuntimeError("CUDA error: out of memory")),
}


def trying_chunk(run_uri: str, index: int, most: int) -> None:
    """Runs a chunk on what passes for a GPU, whose memory takes so many rows."""
    import torch
    from transformers import Trainer

    from baton import machine
    from baton.train.chunk import run_chunk

    step = Trainer.training_step

    def training_step(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        if len(inputs["input_ids"]) > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")
        return step(self, model, inputs, *rest)

    Trainer.training_step = training_step
    machine.gpu = lambda: machine.GPU("a small one", 2**30)
    run_chunk(run_uri, index)


def promised_a_gpu(function: Callable[..., None], *arguments: Any) -> None:
    """Runs a leg as in a pod that has asked for a GPU."""
    os.environ[PROMISED_GPUS] = "1"
    function(*arguments)


def find_lr(run_uri: str) -> None:
    from baton.train.lr_find import find

    find(run_uri)


def evaluate(run_uri: str) -> None:
    from baton.evaluate.evaluate import evaluate_run

    evaluate_run(run_uri)


def export(run_uri: str) -> None:
    from baton.export.export import export_run

    export_run(run_uri)


def verify_chunk(run_uri: str, index: int) -> None:
    from baton.checkpoint.proof import promote
    from baton.runs.run import Run

    promote(Run.open(run_uri), index)


def _kill_at(moment: str) -> None:
    """Kills this process, as a node's end would.

    Args:
        moment: `writing:2` and `sending:2` stand for the second file that is written to staging or sent
            to the store, with half of it there; `phase:save` or `step:3` for what the chunk tells.
    """
    kind, _, value = moment.partition(":")
    if kind == "writing":
        torch = importlib.import_module("torch")
        torch.save = _dying(torch.save, int(value))
    elif kind == "sending":
        Storage.upload = _dying(Storage.upload, int(value))
    told = events.emit

    def emit(event: events.Event) -> None:
        told(event)
        if event.kind == kind and value in (str(getattr(event, "phase", None)), str(getattr(event, "step", None))):
            os.kill(os.getpid(), signal.SIGKILL)

    events.emit = emit


def _dying(function: Callable[..., Any], nth: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        if next(calls) == nth:
            target = next(x for x in arguments[::-1] if isinstance(x, str))
            target = arguments[0].key(target) if isinstance(arguments[0], Storage) else target
            os.truncate(target, os.path.getsize(target) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


def make_base(folder: str) -> None:
    """Saves a tiny Llama with random weights and a tokenizer as a base model to adapt, and a wider one beside it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from baton.data import encoding
    from baton.recipe.model import TrainTokenizer
    from tests.exactness import matrix

    text = Path(folder) / "text.jsonl"
    text.parent.mkdir(parents=True)
    text.write_text('{"text": "the quick brown fox jumps over the lazy dog and returns the value of the file"}\n' * 3)
    tokenizer = encoding.train_bpe(str(text), TrainTokenizer(vocab_size=320), 64)
    text.unlink()
    torch.manual_seed(0)
    for beside, hidden_size in (("", 32), (matrix.TEACHER, 48)):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.2 if beside else 0.02,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        LlamaForCausalLM(config).save_pretrained(f"{folder}{beside}")
        tokenizer.save_pretrained(f"{folder}{beside}")


def prepare(recipe: Recipe, name: str) -> Run:
    """Runs split and tokenize of a run."""
    code, printed = leg(split_and_tokenize, load.dumps(recipe), name)
    assert code == 0, printed
    return Run(Storage(recipe.store.uri), name)


def train(run: Run, *, leave_out: tuple[str, ...] = ()) -> None:
    """Runs all chunks of a run, each in a process of its own."""
    for index in range(1, len(run.plan().targets) + 1):
        code, printed = leg(chunk, run.uri, index, leave_out)
        assert code == 0, printed


def adopt(run: Run, recipe: Recipe) -> None:
    """Gives a run other settings that change no bits."""
    with seals.stage(run, objects.ADOPT):  # else the next chunk writes the recipe again from its seal
        run.create(recipe)


def cut(run: Run, targets: Sequence[int]) -> None:
    """Gives a run that has not begun chunks with these ends."""
    with seals.stage(run, objects.ADOPT):  # else the next chunk writes the plan again from its seal
        run.put("plan.json", {**run.plan().to_json(), "targets": list(targets)})


def steps(run: Run) -> list[int]:
    """Returns the steps that are committed."""
    return [checkpoint.step for checkpoint in CheckpointStore(run).committed()]


def final(run: Run, step: int | None = None) -> Checkpoint:
    """Returns the checkpoint of the run's last step, or of a given one."""
    checkpoint = CheckpointStore(run).read(step or run.plan().num_steps)
    assert checkpoint is not None
    return checkpoint


def history(run: Run) -> list[dict[str, Any]]:
    """Returns everything that a run logged."""
    return CheckpointStore(run).history(final(run))


def losses(run: Run, step: int | None = None) -> list[tuple[int, float]]:
    """Returns the logged losses of a run, by step."""
    history = CheckpointStore(run).history(final(run, step))
    return [(int(entry["step"]), entry["loss"]) for entry in history if "loss" in entry]


def changed(recipe: Recipe, **values: Any) -> Recipe:
    """Returns a recipe with values changed by dotted path, `__` for the dot."""
    document = recipe.model_dump(mode="json")
    for path, value in values.items():
        *sections, key = path.split("__")
        node = document
        for section in sections:
            node = node[section]
        node[key] = value
    return load.validate(document, origin="test")
