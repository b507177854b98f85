"""Checks of the rows before a GPU is paid for; see `components/shared/recipe/quality.py` for the settings.

Rows pass through `Inspection.look` one by one; those that have a side are told to `Inspection.place`; and when all have
one, `Inspection.resolve` looks at them together. What a check mends or drops, and where it found what it leaves, goes
to `quality.jsonl`.
"""

from baton.components.data_split.quality.inspection import Inspection

__all__ = ["Inspection"]
