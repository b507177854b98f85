"""Learning-rate range test: a few steps of training while the learning rate grows, and the losses' verdict.

After Smith, "Cyclical Learning Rates for Training Neural Networks" (arXiv:1506.01186), section 3.3. The model trained
here is thrown away; the run's first chunk starts from untouched state.
"""

import itertools
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch.optim import Optimizer
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from baton import events
from baton.checkpoint import seals
from baton.errors import BatonError
from baton.pages import html as rendering
from baton.pages import plots
from baton.pages.plots import Curve, Mark, Plot
from baton.recipe.training import LRFind
from baton.runs import objects
from baton.runs.documents import LearningRate, StagePhase
from baton.scratch import scratch_folder
from baton.train import build
from baton.train.context import TrainContext

DIVERGED = 4.0  # loss, in multiples of the lowest smoothed one, at which the test ends


class Finding(NamedTuple):
    learning_rate: float
    html: str


class Ramp(TrainerCallback):
    """Grows the learning rate of all unnamed groups from step to step, and notes the losses."""

    stateless = True

    def __init__(self, spec: LRFind) -> None:
        self.spec = spec
        self.rates: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(
        self, args: object, state: TrainerState, control: object, optimizer: Optimizer, **_: object
    ) -> None:
        rate = rate_at(self.spec, state.global_step)
        for group in optimizer.param_groups:
            if group.get("name") is None:
                group["lr"] = rate

    def on_log(
        self, args: object, state: TrainerState, control: TrainerControl, logs: dict[str, float], **_: object
    ) -> None:
        if "loss" not in logs:
            return
        self.rates.append(rate_at(self.spec, state.global_step - 1))
        self.losses.append(float(logs["loss"]))
        events.emit(events.Step(step=state.global_step, of=self.spec.steps, loss=self.losses[-1]))
        smoothed = smooth(self.losses, self.spec.smoothing)
        if not math.isfinite(smoothed[-1]) or smoothed[-1] > DIVERGED * min(smoothed):
            control.should_training_stop = True


@seals.sealed(objects.LR_FIND)
def find(run_uri: str) -> Finding:
    """Tests learning rates for a run, unless done before, and notes the rate found with the run."""
    started = time.time()
    context = TrainContext.open(run_uri, 1)
    run, spec = context.run, context.recipe.training.lr_find
    assert spec
    test = run.read(LearningRate)
    if test is None:
        ramp = Ramp(spec)
        with scratch_folder("lr-find") as scratch:
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
            trainer = build.prepare_trial(context, spec.steps, scratch, changed)
            trainer.remove_callback(EarlyStoppingCallback)  # nothing is evaluated here, which it insists on
            trainer.add_callback(ramp)
            events.emit(events.Phase(phase=StagePhase.TRAIN, rows=context.plan.rows))
            trainer.train()
        rate = suggest(ramp.rates, ramp.losses, spec)
        test = LearningRate(learning_rate=rate, rates=ramp.rates, losses=ramp.losses)
        run.write_once(test)
        run.record("lr-find", {"seconds": time.time() - started})
    events.emit(events.LrFound(learning_rate=test.learning_rate))
    return Finding(test.learning_rate, page(run.name, test, spec))


def rate_at(spec: LRFind, step: int) -> float:
    """Returns the learning rate of a step, from 0: it grows by the same factor each time."""
    return float(spec.start * (spec.end / spec.start) ** (step / max(spec.steps - 1, 1)))


def smooth(losses: list[float], weight: float) -> list[float]:
    """Returns an exponential moving average without its start's bias (Kingma and Ba, arXiv:1412.6980, section 3)."""
    average, averages = 0.0, []
    for position, loss in enumerate(losses, 1):
        average = weight * average + (1 - weight) * loss
        averages.append(average / (1 - weight**position))
    return averages


def suggest(rates: list[float], losses: list[float], spec: LRFind) -> float:
    """Returns the rate of the smoothed loss's steepest fall before its minimum, or a `tenth` of the minimum's rate."""
    # Up to the first that is not finite: numpy takes NaN for the lowest.
    finite = itertools.takewhile(math.isfinite, losses)
    smoothed = np.array(smooth([*finite], spec.smoothing))
    lowest = int(smoothed.argmin()) if smoothed.size else 0
    if lowest < 2:
        raise BatonError(
            f"training.lr_find: the loss never falls between {spec.start:g} and {spec.end:g}.",
            remedy="Lower training.lr_find.start, take more steps, or set training.learning_rate yourself.",
        )
    if spec.take == "tenth":
        return float(rates[lowest] / 10)
    # Over the logarithm of the rate, in which the steps are even.
    slopes = np.gradient(smoothed[: lowest + 1], np.log(rates[: lowest + 1]))
    return float(rates[int(slopes.argmin())])


def page(run_name: str, test: LearningRate, spec: LRFind) -> str:
    template = rendering.environment(Path(__file__).parent).get_template("lr_find.html.j2")
    return template.render(run=run_name, found=test, spec=spec, plot=_plot(test, spec))


def _plot(test: LearningRate, spec: LRFind) -> Plot | None:
    """Returns losses by rate, up to half above the first: those of a test that diverges hide the others."""
    smoothed = smooth(test.losses, spec.smoothing)
    first = next(filter(math.isfinite, smoothed), 0.0)

    def points(losses: list[float]) -> plots.Points:
        rows = zip(test.rates, losses, smoothed, strict=True)
        return [(rate, loss) for rate, loss, mean in rows if math.isfinite(loss) and mean <= 1.5 * abs(first)]

    return plots.plot(
        "Loss by learning rate",
        "loss",
        [
            Curve(name="loss", points=points(test.losses), color="sky", width=1),
            Curve(name="smoothed", points=points(smoothed), width=2),
        ],
        x="learning rate",
        log_x=10,
        marks=[Mark(at=test.learning_rate, text=f"{test.learning_rate:.2g}", color="orange")],
        height=380,
    )
