"""The gallery's recipes are what their headers and the page say, as far as that can be known without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.recipe import load
from baton.source import prepare
from tests.gallery import page, recipes, twins

ROOT = Path(__file__).parents[2]
BATON = str(Path(sys.executable).parent / "baton")
NAMES = [path.stem for path in recipes.PATHS]
GATED = ("meta-llama/", "google/gemma", "mistralai/")
"""What models are called that may ask for a token."""

WEIGHTS = {
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "google/gemma-3-1b-it": 999_885_952,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "openai/gpt-oss-20b": 20_914_757_184,
}
"""Weights of the published models, as their pages on the hub count them, a tied head once."""

METHODS = {
    "sft": "sft", "LoRA": "LoRA", "QLoRA": "QLoRA", "dpo": "dpo", "grpo": "grpo", "reward": "reward", "kto": "kto",
    "orpo": "orpo", "pretrain": "pretrain", "phases": "sft, all weights, then dpo", "sweep": "a sweep",
    "retraining": "retraining", "experts": "router losses",
}  # fmt: skip
"""Ways to train that the gallery shows → what the page calls them."""


@pytest.mark.parametrize("path", recipes.PATHS, ids=NAMES)
def test_a_header_says_what_the_recipe_has(path: Path) -> None:
    recipe, header = load.load(str(path)), recipes.header(path)
    load.require_effects(recipe, origin=path.name)
    assert recipe.name == path.stem
    assert tuple(header.fields) == recipes.FIELDS
    assert len(header.about) <= 120
    assert header.about.endswith(".")
    assert (recipe.model.base or recipe.model.tokenizer.base) in header.fields["model"]  # type: ignore[union-attr]
    named = [uri.removeprefix("hf://datasets/").partition("?")[0] for uri in recipes.sources(recipe)]
    assert [name for name in named if name not in header.fields["data"] and not name.startswith("s3://")] == []
    assert "with the real" in header.fields["not run"]
    if (recipe.model.base or "").startswith(GATED):
        assert recipe.resources.secret_env == {"HF_TOKEN": "huggingface/token"}
        assert re.search("gated|may ask for", header.fields["model"])
    assert recipe.resources.gpu_memory


@pytest.mark.parametrize("path", recipes.PATHS, ids=NAMES)
def test_spot_gpus_are_provided_for(path: Path) -> None:
    recipe = load.load(str(path))
    assert recipe.resources.capacity == "spot"
    assert recipe.resources.tolerations
    for part in recipe.phase_recipes() or [recipe]:
        assert part.num_chunks > 1
        assert part.chunks.checkpoint_every
        assert part.training.precision == "bf16"


def test_the_ways_to_train_are_there() -> None:
    shown = [page.method(load.load(str(path))) for path in recipes.PATHS]
    assert [name for name, words in METHODS.items() if not any(words in each for each in shown)] == []


def test_a_sweep_has_trials() -> None:
    from baton.sweep.search import brackets, check_trials

    recipe = prepare.load(str(recipes.GALLERY / "qwen3-sweep.yaml")).recipe
    assert check_trials(recipe) == 9
    assert [len(bracket.rungs) for bracket in brackets(recipe)] == [3]


@pytest.mark.parametrize("base", WEIGHTS, ids=[base.rpartition("/")[2] for base in WEIGHTS])
def test_a_configuration_comes_to_the_published_number_of_weights(base: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(twins.config_folder(base)))
    model.tie_weights()
    assert sum(value.numel() for value in model.parameters()) == WEIGHTS[base]


def test_every_configuration_is_held_against_a_number() -> None:
    bases = {load.load(str(path)).model.base for path in recipes.PATHS} - {None}
    assert bases == WEIGHTS.keys()
    assert {folder.name for folder in twins.CONFIGS.iterdir() if folder.is_dir()} == {
        base.replace("/", "--") for base in WEIGHTS
    }


def test_the_page_is_current() -> None:
    memory = {path.stem: recipes.header(path).fields["memory"] for path in recipes.PATHS}
    assert (ROOT / "docs/guides/recipes.md").read_text(encoding="utf-8") == page.page(memory), "run `make docs`"


@pytest.mark.parametrize("path", recipes.PATHS, ids=NAMES)
def test_a_header_says_what_is_estimated(path: Path, tmp_path: Path) -> None:
    assert recipes.header(path).fields["memory"] == recipes.estimated(path, tmp_path), "run `make docs`"


@pytest.mark.parametrize(
    "path",
    [pytest.param(x, id=x.stem, marks=[] if x.stem == "qwen3-sft" else [pytest.mark.slow]) for x in recipes.PATHS],
)
def test_validate_takes_it_and_says_what_it_could_not_see(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = subprocess.run([BATON, "validate", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{path} is valid: {path.stem}, " in done.stdout
    assert re.search(r"memory.*: not estimated: .+ cannot be read: ", done.stdout)
    assert "None" not in done.stdout
    assert "Traceback" not in done.stderr
