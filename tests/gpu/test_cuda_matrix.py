"""The cells of the matrix that need a CUDA GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.cells import cells
from tests.resume import test_matrix
from tests.resume.conftest import base_model, legs  # noqa: F401
from tests.resume.matrix import Cell
from tests.resume.test_matrix import grid  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in cells()])
def test_chunks_end_on_the_bits_of_one_run(cell: Cell, grid: Any, legs: Any) -> None:  # noqa: F811
    if cell.weights == "lora" and "quantization" in cell.changes.get("model", {}):
        pytest.importorskip("bitsandbytes")
    if "bit" in cell.feature or "bnb" in cell.feature:
        pytest.importorskip("bitsandbytes")
    test_matrix.test_chunks_end_on_the_bits_of_one_run(cell, grid, legs)
