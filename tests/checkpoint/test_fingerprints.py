"""What a fingerprint says of this process, and in what two differ."""

from __future__ import annotations

import builtins
import io
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch

from baton.runs import versions
from baton.runs.versions import LIBRARIES, Fingerprint

NAMES = (
    *("torch", "transformers", "trl", "peft", "accelerate", "numpy"),
    *("datasets", "tokenizers", "safetensors"),
)


def test_it_names_this_machine_and_what_computes_on_it() -> None:
    here = Fingerprint.here()
    assert here.to_json() == {
        "device": "cpu",
        "cpu": versions._cpu_name(),
        "cuda": None,
        "world_size": 1,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": False,
        "python": platform.python_version(),
        **{name: version(name) for name in NAMES},
    }
    assert here.versions == {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def test_of_several_processes_it_says_how_they_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(versions, "version", lambda name: asked.append(name) or f"{name}'s")
    assert Fingerprint.here(2, "fsdp").to_json()["strategy"] == "fsdp"
    assert "strategy" not in Fingerprint.here(1, "fsdp").to_json()
    assert "deepspeed" not in asked
    assert Fingerprint.here(2, "zero3").deepspeed == "deepspeed's"
    assert "deepspeed" not in Fingerprint.here(1, "zero3").to_json()
    assert "virtual_workers" not in Fingerprint.here(2, "ddp").to_json()
    assert Fingerprint.here(2, "ddp", 4).virtual_workers == 4


def test_on_a_cpu_it_names_bitsandbytes_where_a_run_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: f"{name}'s")
    assert Fingerprint.here(uses_bitsandbytes=True).bitsandbytes == "bitsandbytes's"
    assert Fingerprint.here().bitsandbytes is None


class Device:
    """What passes for a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)


@pytest.mark.parametrize("rounds", [True, False])
def test_with_a_gpu_that_counts(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    monkeypatch.setattr(versions, "rounds_products", lambda: rounds)
    here = Fingerprint.here()
    assert (here.device, here.cpu, here.cuda, here.tf32) == ("GPU 0", platform.machine(), "13.0", rounds)


def test_of_a_gpu_it_names_the_kernels_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(name: str) -> str:
        if name in ("triton", "liger-kernel"):
            return f"{name}'s"
        if name in versions.KERNELS:
            raise PackageNotFoundError(name)
        return version(name)

    assert not {"cudnn", "triton", "liger_kernel"} & Fingerprint.here().to_json().keys()
    Device(monkeypatch)
    monkeypatch.setattr(versions, "version", told)
    here = Fingerprint.here()
    assert (here.cudnn, here.triton, here.liger_kernel) == (92000, "triton's", "liger-kernel's")
    assert not {"bitsandbytes", "flash_attn"} & here.to_json().keys()
    without = Fingerprint(**{name: value for name, value in here.to_json().items() if name != "triton"})
    assert here.differences(without) == ["triton: None → triton's"]


@pytest.mark.parametrize("name", NAMES)
def test_another_version_of_any_library_is_a_difference(name: str) -> None:
    here = Fingerprint.here()
    other = here.model_copy(update={name: "0.0.1"})
    assert here.differences(other) == [f"{name}: 0.0.1 → {version(name)}"]


def test_what_was_not_written_down_at_first_is_no_difference() -> None:
    here = Fingerprint.here()
    old = {name: value for name, value in here.to_json().items() if name not in versions.ADDED}
    assert here.differences(Fingerprint.read(old, "here")) == []
    assert Fingerprint.read(old, "here").differences(here) == []
    assert here.differences(Fingerprint.read({**old, "trl": "0.0.1"}, "here")) == [f"trl: 0.0.1 → {here.trl}"]


LATER = ("datasets", "tokenizers", "safetensors", "cudnn", "triton", "bitsandbytes", "liger_kernel", "flash_attn")
KNOWN = ("device", "cpu", "cuda", "python", "torch", "transformers", "trl", "peft", "accelerate", "numpy", "deepspeed")


@pytest.mark.parametrize("name", [*LATER, *KNOWN])
def test_what_an_older_one_did_not_know_is_no_difference_and_what_it_knew_is(name: str) -> None:
    value = 92000 if name == "cudnn" else "other"
    here = Fingerprint.here()
    old = here.model_copy(update=dict.fromkeys(("datasets", "tokenizers", "safetensors"), ""))
    ours = here.model_copy(update={name: value})
    expected = [] if name in LATER else [f"{name}: {old.to_json().get(name)} → other"]
    assert ours.differences(old) == expected
    assert ours.differences(here) == [f"{name}: {here.to_json().get(name)} → {value}"]


def test_every_difference_has_its_line() -> None:
    here = Fingerprint.here(2, "fsdp")
    assert here.differences(here.model_copy()) == []
    assert here.differences(here.model_copy(update={"torch": "1.0", "cpu": "other"})) == [
        f"cpu: other → {here.cpu}",
        f"torch: 1.0 → {here.torch}",
    ]
    assert Fingerprint.here().differences(here) == ["strategy: fsdp → None", "world_size: 2 → 1"]
    assert here.differences(Fingerprint.here()) == ["strategy: None → fsdp", "world_size: 1 → 2"]


def test_with_virtual_workers_the_number_of_processes_is_no_difference() -> None:
    two, one = Fingerprint.here(2, "ddp", 4), Fingerprint.here(1, "ddp", 4)
    assert two.differences(one) == []
    assert two.differences(Fingerprint.here(1, "ddp", 2)) == [
        "strategy: None → ddp",
        "virtual_workers: 2 → 4",
        "world_size: 1 → 2",
    ]
    assert [line.split(":")[0] for line in two.differences(Fingerprint.here(1))] == [
        "strategy",
        "virtual_workers",
        "world_size",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: A CPU: fast @ 2 GHz\nmodel name\t: another\n", "A CPU: fast @ 2 GHz"),
        ("processor\t: 0\n", None),
        (None, None),
    ],
)
def test_the_processors_model_is_told_where_the_kernel_knows_it(
    text: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, **_: Any) -> Any:
        assert path == "/proc/cpuinfo"
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(platform, "processor", lambda: "")
    found = versions._cpu_name()
    monkeypatch.undo()
    assert found == (expected or platform.machine())


def test_what_an_older_one_does_not_say_has_its_meaning() -> None:
    old = Fingerprint.read({"torch": "2"}, "here")
    assert (old.world_size, old.strategy, old.threads, old.deterministic, old.tf32) == (1, "ddp", 0, False, False)
    assert (old.cuda, old.virtual_workers, old.deepspeed) == (None, None, None)
    assert old.to_json() == {"torch": "2"}
    names = ("device", "cpu", "python", *LIBRARIES)
    assert [getattr(Fingerprint(), name) for name in names] == [""] * len(names)


def test_a_build_for_gpus_without_one_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    here = Fingerprint.here()
    assert (here.device, here.cuda, here.tf32) == ("cpu", None, False)
