"""A stage in its process: `python -m baton.components.executor ROOM VERSION --function_to_execute NAME …`.

It stands in the place of kfp's own entry, which takes the source of the function from the compiled file.
"""

import argparse
import importlib
import json
import os

from baton.components.declaring import RUNTIME


def main() -> None:
    """Runs the function of a room's `component.py` with the inputs that the engine gives."""
    parser = argparse.ArgumentParser(description="Run a stage.")
    parser.add_argument("room", help="folder of the stage in baton.components")
    parser.add_argument("version", help="what was compiled; a part of the key of Kubeflow's cache alone")
    parser.add_argument("--function_to_execute", required=True)
    parser.add_argument("--executor_input", required=True, type=json.loads)
    parser.add_argument("--in-place-of", help="what engines know that they run a function by; not read")
    arguments = parser.parse_args()
    os.environ[RUNTIME] = "true"  # before kfp is imported
    from kfp.dsl.executor import Executor

    component = importlib.import_module(f"baton.components.{arguments.room}.component")
    function = getattr(component, arguments.function_to_execute)
    Executor(executor_input=arguments.executor_input, function_to_execute=function).execute()


if __name__ == "__main__":
    main()
