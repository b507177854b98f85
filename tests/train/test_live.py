"""Live metrics: which device a name is of."""

from __future__ import annotations

import pytest

from baton.train.live import PEAK_FLOPS, peak_flops

NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA A30": "A30",
    "NVIDIA A40": "A40",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H20": "H20",
    "NVIDIA H800": "H800",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla T4": "T4",
    # Not known: no figure is better than that of another device.
    "NVIDIA T400 4GB": None,
    "NVIDIA T4G": None,
    "NVIDIA A16": None,
    "NVIDIA A100X": None,
    "NVIDIA L400": None,
    "NVIDIA RTX 4000 SFF Ada Generation": None,
    "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    "AMD Instinct MI300X": None,
    "": None,
}


@pytest.mark.parametrize(("device", "part"), NAMES.items(), ids=NAMES)
def test_a_device_is_known_by_whole_words_of_its_name(device: str, part: str | None) -> None:
    assert peak_flops(device) == (PEAK_FLOPS[part] if part else None)


def test_every_part_has_a_device() -> None:
    assert set(PEAK_FLOPS) == set(NAMES.values()) - {None}
