"""Which line of the split each row is of, before rows are joined: what tells the rows of a step by file and line."""

from __future__ import annotations

from array import array

from baton.components.tokenize.encoding import Row


class Origins:
    """The lines of a segment's rows, and their lengths, by which `packing` joins them.

    Args:
        first_line: Number of the segment's first line.
    """

    def __init__(self, first_line: int) -> None:
        self._first_line = first_line
        self._lines, self._lengths = array("l"), array("l")

    def add(self, line: int, row: Row) -> None:
        """Notes a row, in the order in which they are written."""
        self._lines.append(line)
        self._lengths.append(len(row.get("input_ids", ())))

    @property
    def are_plain(self) -> bool:
        """Whether each row is of the line that its place says."""
        return all(line == place for place, line in enumerate(self._lines, self._first_line))

    def save(self, path: str) -> str:
        """Writes a line's number and a length for each row, and returns the file."""
        import numpy as np

        np.save(path, np.array([self._lines, self._lengths], dtype=np.int64).T)
        return path
