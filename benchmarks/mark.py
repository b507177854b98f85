"""Events that the benchmark's processes print: one JSON object a line."""

import json
import time
from typing import Any


def mark(kind: str, **fields: Any) -> None:
    """Prints an event, with its time, in one write: threads do it at once."""
    print(json.dumps({"mark": kind, "at": time.time(), **fields}) + "\n", end="", flush=True)
