"""Learning-rate range test: training for a few steps while the learning rate grows, and what the losses say.

After Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186), section 3.3. The model that is
trained here is thrown away; the run's first chunk starts from untouched state.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter
from transformers import TrainerCallback

from components.shared import code, events, pages, svg, trained
from components.shared.errors import BatonError
from components.shared.recipe import LRFind
from components.shared.run_documents.training import LearningRate
from components.train_chunk import arguments, methods
from components.train_chunk.chunk import Chunk
from components.train_chunk.slices import Tokens

DIVERGED = 4.0
"""Loss, in multiples of the lowest smoothed one, at which the test ends."""


class Ramp(TrainerCallback):
    """Lets the learning rate of all groups without one of their own grow from step to step, and notes the losses.

    Args:
        spec: From where to where, in how many steps.
    """

    stateless = True

    def __init__(self, spec: LRFind) -> None:
        self.spec = spec
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Sets the step's learning rate."""
        rate = rate_at(self.spec, state.global_step)
        for group in optimizer.param_groups:
            if group.get("name") is None:
                group["lr"] = rate

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Notes the loss, and ends the test where it has gone out of bounds."""
        if not logs or "loss" not in logs:
            return
        self.rates.append(rate_at(self.spec, state.global_step - 1))
        self.losses.append(float(logs["loss"]))
        events.emit("step", step=state.global_step, of=self.spec.steps, loss=self.losses[-1])
        smoothed = smooth(self.losses, self.spec.smoothing)
        if not math.isfinite(smoothed[-1]) or smoothed[-1] > DIVERGED * min(smoothed):
            control.should_training_stop = True


def find(run_uri: str) -> dict[str, Any]:
    """Tests learning rates for a run, unless that was done, and notes the one found with the run.

    Returns:
        `learning_rate`, the `rates` and `losses` of the test, and its page as `html`.

    Raises:
        BatonError: the losses never fall, so that nothing can be concluded.
    """
    started = time.time()
    chunk = Chunk(run_uri, 1)
    spec = chunk.recipe.training.lr_find
    assert spec
    found = chunk.run.read(LearningRate)
    if found is None:
        ramp = Ramp(spec)
        with tempfile.TemporaryDirectory(prefix="baton-lr-find-") as scratch:
            _train(chunk, ramp, scratch)
        rate = suggest(ramp.rates, ramp.losses, spec)
        found = LearningRate(learning_rate=rate, rates=ramp.rates, losses=ramp.losses)
        chunk.run.write_once(found)
        chunk.run.record("lr-find", {"seconds": time.time() - started})
    events.emit("lr_found", learning_rate=found.learning_rate)
    return {**found.to_json(), "html": page(chunk.run.name, found, spec)}


def rate_at(spec: LRFind, step: int) -> float:
    """Returns the learning rate of a step, from 0: it grows by the same factor each time."""
    return float(spec.start * (spec.end / spec.start) ** (step / max(spec.steps - 1, 1)))


def smooth(losses: list[float], weight: float) -> list[float]:
    """Returns an exponential moving average without the bias of its start (Kingma and Ba, arXiv:1412.6980, section 3).

    Args:
        losses: Values in order.
        weight: Share of the average that stays at each value.
    """
    average, found = 0.0, []
    for position, loss in enumerate(losses, 1):
        average = weight * average + (1 - weight) * loss
        found.append(average / (1 - weight**position))
    return found


def suggest(rates: list[float], losses: list[float], spec: LRFind) -> float:
    """Returns the learning rate that a test speaks for.

    `steepest` is where the smoothed loss falls fastest over the logarithm of the rate, before its lowest point;
    `tenth` is a tenth of the rate at that point.

    Raises:
        BatonError: the loss does not fall.
    """
    smoothed = np.array(smooth(losses, spec.smoothing))
    lowest = int(smoothed.argmin())
    if lowest < 2:
        raise BatonError(
            f"training.lr_find: the loss never falls between {spec.start:g} and {spec.end:g}.",
            remedy="Lower training.lr_find.start, take more steps, or set training.learning_rate yourself.",
        )
    if spec.take == "tenth":
        return float(rates[lowest] / 10)
    slopes = np.gradient(smoothed[: lowest + 1], np.log(rates[: lowest + 1]))
    return float(rates[int(slopes.argmin())])


def page(run_name: str, found: LearningRate, spec: LRFind) -> str:
    """Returns the test as an HTML page of its own."""
    plot = svg.draw("lr", "Loss by learning rate", lambda canvas: _plot(found, spec, canvas))
    template = pages.environment(Path(__file__).parent).get_template("lr_find.html.j2")
    return template.render(run=run_name, found=found, spec=spec, plot=plot)


def _plot(found: LearningRate, spec: LRFind, canvas: svg.Canvas) -> Any:
    figure, (ax,) = svg.blank_figure(canvas, 380 if canvas is svg.WIDE else 320)
    rates, losses = np.array(found.rates), np.array(found.losses)
    smoothed = np.array(smooth(found.losses, spec.smoothing))
    ax.plot(rates, losses, color=svg.SKY, lw=0.8, label="loss")
    ax.plot(rates, smoothed, color=svg.BLUE, lw=1.8, label="smoothed")
    ax.axvline(found.learning_rate, color=svg.ORANGE, lw=1.4, label=f"taken: {found.learning_rate:.2g}")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-").replace("e+00", "")))
    finite = smoothed[np.isfinite(smoothed)]
    margin = 0.1 * max(float(np.ptp(finite)), 1e-9)
    ax.set_ylim(float(finite.min()) - margin, min(float(finite.max()), float(finite[0]) * 1.5) + margin)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("loss")
    ax.legend(loc="lower left")
    return figure


def _train(chunk: Chunk, ramp: Ramp, scratch: str) -> None:
    recipe, plan, spec = chunk.recipe, chunk.plan, ramp.spec
    arguments.make_deterministic(recipe.training.threads, recipe.training.deterministic)
    code.install(code.fetch(chunk.run, scratch))
    chunk.tokens = Tokens(chunk.run, recipe, plan, lambda _: scratch, chunk.cache)
    setup = chunk.setup(chunk.tokens.fetch(0, spec.steps), trained.base_folder(recipe), start_weights=True)
    changed = {
        "max_steps": spec.steps,
        "learning_rate": spec.start,
        "lr_scheduler_type": "constant",
        "lr_scheduler_kwargs": None,
        "warmup_steps": 0,
        "eval_strategy": "no",
        "logging_steps": 1,
        "output_dir": scratch,
    }
    trainer = methods.load(recipe.training.method).build(
        dataclasses.replace(setup, arguments={**setup.arguments, **changed}, held_out=None)
    )
    trainer.add_callback(ramp)
    events.emit("phase", phase="train", rows=plan.rows)
    trainer.train()
