"""The fingerprint tells whether matrix products are rounded, whichever of torch's settings says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOLD = "from baton.runs.versions import rounds_products; print(rounds_products())"


def told(*lines: str) -> str:
    """What a fresh process says after some lines: the settings hold for all of it."""
    code = "; ".join(["import torch", *lines, TOLD])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("line", "rounded"),
    [
        pytest.param("pass", "False", id="as-it-comes"),
        pytest.param("torch.backends.fp32_precision = 'tf32'", "True", id="as-transformers"),
        pytest.param("torch.backends.fp32_precision = 'ieee'", "False", id="as-transformers-off"),
        pytest.param("torch.backends.cuda.matmul.allow_tf32 = True", "True", id="older"),
        pytest.param("torch.set_float32_matmul_precision('high')", "True", id="as-here"),
    ],
)
def test_rounding_is_told(line: str, rounded: str) -> None:
    assert told(line) == rounded


@pytest.mark.slow
def test_torch_still_tells_its_precision_after_transformers_has_set_it() -> None:
    """Compiling with `max-autotune` asks for it, and gets an error where Transformers alone has set it."""
    asked = "print(torch.get_float32_matmul_precision())"
    transformers = "torch.backends.fp32_precision = 'tf32'"
    ours = "from baton.train.build import make_deterministic; make_deterministic(1, True, tf32=True)"
    assert told(ours, transformers, asked).splitlines() == ["high", "True"]
    with pytest.raises(subprocess.CalledProcessError) as error:
        told(transformers, asked)
    assert "mix of the legacy and new APIs" in error.value.stderr
