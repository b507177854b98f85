"""Data split as a process: `python -m baton.components.data_split RECIPE_JSON_FILE RUN_NAME`."""

import sys
from pathlib import Path

from baton.components.shared.core import events

if __name__ == "__main__":
    with events.stage("data split"):
        from baton.components.data_split.split import split_data
        from baton.components.shared.recipe import recipe_file

        split_data(recipe_file.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2])
