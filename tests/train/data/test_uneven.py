"""What ranks gather of which they have different numbers of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.train.samplers import uneven


def accelerator(others: list[torch.Tensor]) -> Any:
    """Returns what passes for Accelerate's in the first rank; the others hold some rows."""

    class Accelerator:
        def gather(self, rows: Any) -> Any:
            if not isinstance(rows, torch.Tensor):
                return ["as it is", rows]
            if rows.dtype == torch.int64:  # how many rows each has
                return torch.cat([rows, *[torch.tensor([len(other)]) for other in others]])
            if rows.dim() == 0:
                return torch.stack([rows, *[other.sum() for other in others]])
            pad = [torch.zeros(len(rows) - len(other), *other.shape[1:]) for other in others]
            filled = [torch.cat(pair) for pair in zip(others, pad, strict=True)]
            assert all(each.shape == rows.shape for each in filled), "torch gathers even ones alone"
            return torch.cat([rows, *filled])

    return Accelerator()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_all_rows_come_and_no_filling(shape: tuple[int, ...], ours: int, theirs: int) -> None:
    mine, other = torch.rand(ours, *shape), torch.rand(theirs, *shape)
    found = accelerator([other])
    with uneven(found):
        assert torch.equal(found.gather(mine), torch.cat([mine, other]))


def test_what_has_no_rows_is_gathered_as_ever_and_the_accelerator_is_left_as_it_was() -> None:
    found = accelerator([torch.ones(2)])
    with uneven(found):
        assert found.gather(torch.tensor(1.5)).tolist() == [1.5, 2.0]
        assert found.gather("text") == ["as it is", "text"]
    assert "gather" not in vars(found)
    with pytest.raises(KeyError), uneven(found):
        raise KeyError
    assert "gather" not in vars(found)
