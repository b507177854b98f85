"""Data split as a process: `python -m baton.data.split_process RECIPE_JSON_FILE RUN_NAME`."""

import sys
from pathlib import Path

from baton import events

if __name__ == "__main__":
    with events.stage("data split"):
        from baton.data.split import split_data
        from baton.recipe import load

        split_data(load.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2])
