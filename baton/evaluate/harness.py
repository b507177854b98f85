"""Tasks of the LM evaluation harness (`lm-eval`), run on a model that is in memory already."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
from collections.abc import Iterator
from typing import Any

from baton.errors import UserError
from baton.models import generate, user_code
from baton.models import user_code as own_tasks
from baton.models.metrics import Better, Figure, constant_figure, mean_figure
from baton.recipe import extras
from baton.recipe.evaluation import Tasks
from baton.recipe.run import Trust

NO_FILTER = "none"
"""What the harness calls answers that are taken as they are."""
BETTER: dict[bool | None, Better | None] = {True: "higher", False: "lower", None: None}
"""By the harness's `higher_is_better`."""


class Harness:
    """The tasks of a recipe, found and loaded before a model is.

    Args:
        tasks: Names and settings.
        scratch: Folder for tasks that come from a store.
        trust: What somebody has consented to, as in the recipe: tasks may call functions.

    Raises:
        UserError: the package is missing, a task is unknown or cannot be loaded, or nobody has consented to it.
    """

    def __init__(self, tasks: Tasks, scratch: str, trust: Trust = None) -> None:
        extras.require_packages(f"evaluation.tasks: {', '.join(tasks.names)}", "lm_eval")
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._tasks = tasks
        self._folder = own_tasks.fetch_tasks(tasks.include_path, scratch) if tasks.include_path else None
        if self._folder:
            user_code.require_trusted(trust, own_tasks.TASKS_SETTING, self._folder, own_tasks.TASK_ENDINGS)
        self._manager: Any = TaskManager(include_path=self._folder, include_defaults=False)
        single = set(self._manager.all_tasks) - {*self._manager.all_groups, *self._manager.all_tags}
        if not single.issuperset(tasks.names):  # reading the harness's own thirteen thousand files takes ten seconds
            self._manager = TaskManager(include_path=self._folder)
        for name in tasks.names:
            if name not in self._manager.all_tasks:
                raise UserError(f"evaluation.tasks: {name!r} is no task of the harness.{self._hint(name)}")
        with self._beside():
            try:
                self._manager.load(list(tasks.names))
            except Exception as error:  # whatever a task's file, its functions or the hub have to say
                raise self._failed("loaded", error) from None

    def run(
        self, model: Any, tokenizer: Any, batch_size: int, *, chat: bool = False, system: str | None = None
    ) -> dict[str, Figure]:
        """Runs the tasks on a model.

        A task that says itself that it has no examples gets none, whatever `few_shot` says.

        Args:
            model: A causal language model.
            tokenizer: Its tokenizer.
            batch_size: Requests at once.
            chat: Whether questions and examples are turns of the tokenizer's chat template.
            system: What conversations begin with.

        Returns:
            Figures named `<task>.<metric>`, with the harness's filter after them where a metric has several. One that
            is no mean over documents is a constant.

        Raises:
            UserError: a task fails, or runs code of the model's and so is refused.
        """
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        with self._beside(), _ending(model, tokenizer):
            try:
                evaluated: Any = simple_evaluate(
                    model=judged,
                    tasks=list(self._tasks.names),
                    num_fewshot=self._tasks.few_shot,
                    limit=self._tasks.limit,
                    task_manager=self._manager,
                    bootstrap_iters=0,
                    apply_chat_template=chat,
                    fewshot_as_multiturn=chat,
                    system_instruction=system if chat else None,
                )
            except (ValueError, KeyError, TypeError, ImportError) as error:  # of a task, or of its own functions
                raise self._failed("run", error) from None
        figures: dict[str, Figure] = {}
        for task, results in evaluated["results"].items():
            higher = evaluated["higher_is_better"].get(task) or {}
            for name, key, value in _measured(task, results):
                better = BETTER[higher.get(key.partition(",")[0])]
                each = _of_documents(evaluated["samples"].get(task, []), key, value)
                figures[name] = mean_figure(each, better=better) if each else constant_figure(value, better=better)
        return figures

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Lets a task name its own folder's files by their relative paths."""
        with contextlib.chdir(self._folder or "."):
            yield

    def _failed(self, what: str, error: Exception) -> UserError:
        return UserError(
            f"evaluation.tasks: {', '.join(self._tasks.names)} cannot be {what}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}",
            remedy="Check the task's file, the packages it asks for, and the network where its data is remote.",
        )

    def _hint(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._manager.all_tasks, n=1)
        return f" Did you mean {close[0]!r}?" if close else " `lm-eval ls tasks` lists them."


@contextlib.contextmanager
def _ending(model: Any, tokenizer: Any) -> Iterator[None]:
    """Lets a model end its answers where the chat template does, too."""
    settings = model.generation_config
    before = settings.eos_token_id
    settings.eos_token_id = generate.stop_ids(model, tokenizer) or None
    try:
        yield
    finally:
        settings.eos_token_id = before


def _measured(task: str, results: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Returns name, the harness's key and the value of each figure of a task."""
    keys = [key for key in results if "," in key and not key.partition(",")[0].endswith("_stderr")]
    keys = [key for key in keys if isinstance(results[key], int | float)]
    metrics = [key.partition(",")[0] for key in keys]
    measured = []
    for key, metric in zip(keys, metrics, strict=True):
        filtered = key.partition(",")[2]
        several = metrics.count(metric) > 1 and filtered != NO_FILTER
        measured.append((f"{task}.{metric}" + (f".{filtered}" if several else ""), key, float(results[key])))
    return measured


def _of_documents(samples: list[dict[str, Any]], key: str, value: float) -> list[float | None] | None:
    """Returns a figure of each of a task's documents, if it is their mean."""
    metric, _, filtered = key.partition(",")
    rows = [row for row in samples if row.get("filter", NO_FILTER) == filtered]
    each = [row.get(metric) for row in sorted(rows, key=lambda row: row["doc_id"])]
    if not each or not all(isinstance(one, int | float) for one in each):
        return None
    numbers: list[float | None] = [float(one) for one in each if one is not None]
    return numbers if math.isclose(mean_figure(numbers).value, value, rel_tol=1e-9, abs_tol=1e-12) else None
