"""A stage in its process: `python -m baton.kfp.executor ROOM VERSION --function_to_execute NAME …`.

It replaces kfp's own entry, which takes the source of the function from the compiled file.
"""

import sys

from baton.train import readahead

if __name__ == "__main__":  # before anything else is imported
    readahead.start(*sys.argv[1:2])

import argparse
import importlib
import json
import logging
import os
from collections.abc import Mapping

from baton.errors import BatonError, OtherRunError, in_words
from baton.kfp.component import RUNTIME
from baton.pages.card import DISPLAY_NAME
from baton.runs import ref
from baton.runs.outcomes import RunFailure
from baton.runs.run import Run, chosen_name, clear_failure, now, record_failure
from baton.store.storage import Storage

logger = logging.getLogger("baton")
Inputs = Mapping[str, str | float]
NAMES = {"lr_find": "learning-rate finder", "reject": "rejected", "train_chunk_placed": "train chunk"}
"""Stage → its name on Kubeflow's page, where it is not the function's."""
RETRY = "KFP_RETRY_INDEX"  # environment variable of newer Kubeflows: number of the attempt, from 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a stage.")
    parser.add_argument("room", help="folder of the stage in baton.components")
    parser.add_argument("version", help="version of the compiled code; only part of the key of Kubeflow's cache")
    parser.add_argument("--function_to_execute", required=True)
    parser.add_argument("--executor_input", required=True, type=json.loads)
    parser.add_argument("--in-place-of", help="marker for engines; not read")
    arguments = parser.parse_args()
    os.environ[RUNTIME] = "true"  # before kfp is imported
    from kfp.dsl.executor import Executor

    inputs = arguments.executor_input.get("inputs", {}).get("parameterValues", {})
    component = importlib.import_module(f"baton.components.{arguments.room}.component")
    function = getattr(component, arguments.function_to_execute)
    try:
        executor = Executor(executor_input=arguments.executor_input, function_to_execute=function)
        if run_name := _run_name(arguments.function_to_execute, inputs):
            of_chunk = f" of chunk {int(inputs['index'])}" if "index" in inputs else ""
            for name in executor.output_artifacts.keys() & function.__annotations__.keys():
                executor.output_artifacts[name].metadata[DISPLAY_NAME] = f"{run_name} · {name}{of_chunk}"
        executor.execute()
    except (Exception, SystemExit) as error:
        _record_failure(arguments.function_to_execute, inputs, error)
        raise
    stage = arguments.function_to_execute
    if run := _run(stage, inputs):  # its record of an earlier failure goes
        clear_failure(run, None if stage in ("data_split", "report") else _name(stage, inputs))


def _record_failure(function: str, inputs: Inputs, error: BaseException) -> None:
    """Keeps with the run why a stage failed; whatever goes wrong with that, the stage ends on its own error."""
    cause = error.__cause__ if isinstance(error, SystemExit) else error
    run = _run(function, inputs)
    if run is None or cause is None or isinstance(cause, OtherRunError):
        return
    if not isinstance(cause, BatonError):
        cause = BatonError(in_words(cause), remedy="Its log has the traceback.")
    attempt = os.environ.get(RETRY, "")
    failure = RunFailure(
        stage=_name(function, inputs),
        message=cause.message,
        remedy=cause.remedy,
        exit_code=cause.exit_code,
        at=now(),
        attempt=int(attempt) + 1 if attempt.isdigit() else None,
    )
    try:
        page = record_failure(run.uri, failure)
    except Exception as second:
        logger.warning("%s", second)
        return
    if page:
        logger.error("the run's page has the reason: %s", page)


def _run_name(function: str, inputs: Inputs) -> str | None:
    """Returns the name of the run that a stage works on, None where it works on none; the store is not opened."""
    try:
        if function == "data_split":
            given = ref.decode_texts(inputs)
            return chosen_name(*(str(given[name]) for name in ("run_name", "new_name", "job_id", "phase")))
        return ref.RunRef.read(str(inputs["baton"])).run_uri.rpartition("/")[2]
    except (KeyError, BatonError):
        return None


def _run(function: str, inputs: Inputs) -> Run | None:
    try:
        if function == "data_split" and (name := _run_name(function, inputs)):
            return Run(Storage(ref.decode_texts(inputs)["store"]), name)
        return Run.open(ref.RunRef.read(str(inputs["baton"])).run_uri)
    except (KeyError, BatonError):
        return None


def _name(function: str, inputs: Inputs) -> str:
    """Returns the name of a stage as Kubeflow's page has it, without that of its phase."""
    name = NAMES.get(function, function.replace("_", " "))
    return f"{name} {int(inputs['index'])}" if "index" in inputs else name


if __name__ == "__main__":
    main()
