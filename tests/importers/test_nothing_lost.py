"""Every key of a file is carried over or listed, whatever it holds; the recipe's file says what the recipe says."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import UserError
from baton.importers import axolotl, llamafactory
from baton.importers import draft as drafts
from baton.importers.draft import OtherTrainer, RecipeDraft
from baton.recipe import load
from tests.importers.conftest import TRAINERS

HERE = Path(__file__).parent
MODULES = {"axolotl": axolotl, "llamafactory": llamafactory}
LEAST: dict[str, dict[str, Any]] = {
    "llamafactory": {"model_name_or_path": "org/m", "dataset": "x"},
    "axolotl": {"base_model": "org/m", "datasets": [{"path": "org/d", "type": "alpaca"}]},
}
"""The least that a file says."""
EXAMPLES = [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in sorted(HERE.glob("*/*.y*ml"))]

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["auto", "1e-4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def trainer_of(path: Path) -> OtherTrainer:
    """Return the trainer an example is for."""
    return TRAINERS[path.parent.name]


def example(path: Path) -> RecipeDraft:
    """Return what becomes of an example."""
    return drafts.draft_of(trainer_of(path), str(path), str(path.parent))


def settled(draft: RecipeDraft) -> set[str]:
    """Return the keys that the report accounts for."""
    return set(draft.carried) | set(draft.idle) | {remark.key for remark in draft.remarks}


def drafted(trainer: OtherTrainer, path: Path) -> RecipeDraft | str:
    """Return what becomes of a file, or the message that says why nothing does."""
    try:
        return drafts.draft_of(trainer, str(path), str(path.parent))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("path", EXAMPLES)
def test_every_key_of_an_example_is_accounted_for_once(path: Path):
    draft = example(path)
    flat = drafts.flatten(yaml.safe_load(path.read_text()), trainer_of(path).nested)
    noted = {remark.key for remark in draft.remarks}

    assert flat.keys() <= settled(draft)
    assert not set(draft.carried) & noted
    assert not set(draft.idle) & (set(draft.carried) | noted)
    report = "\n".join(drafts.import_report(draft, "recipe.yaml"))
    assert all(f"  {key}:" in report for key in noted)


@pytest.mark.parametrize("path", EXAMPLES)
def test_the_file_says_what_the_recipe_says(path: Path, tmp_path: Path):
    draft = example(path)
    recipe = drafts.recipe_of(draft)
    written = drafts.to_yaml(recipe, draft)
    (tmp_path / "recipe.yaml").write_text(written, encoding="utf-8")

    assert load.load(str(tmp_path / "recipe.yaml")) == recipe
    assert written.startswith(f"# Made from {draft.tool}'s {path.name} by `baton init --from`")
    assert max(map(len, written.splitlines()[2:])) <= 120


@pytest.mark.parametrize("path", EXAMPLES)
def test_no_value_of_the_file_is_a_default(path: Path):
    """What is taken out of the file changes the recipe, or is all that names a section."""
    draft = example(path)
    recipe = drafts.recipe_of(draft)
    document = yaml.safe_load(drafts.to_yaml(recipe, draft))

    for section, values in document.items():
        if not isinstance(values, dict):
            continue
        for key in values:
            fewer = {**document, section: {name: value for name, value in values.items() if name != key}}
            with contextlib.suppress(UserError):  # one that is needed
                assert load.validate(fewer, origin="fewer") != recipe, f"{section}.{key}"


@pytest.mark.parametrize("tool", TRAINERS)
def test_every_known_key_is_accounted_for_alone(tool: str, tmp_path: Path):
    known = (*MODULES[tool].KEYS, *MODULES[tool].TABLES["methods"])
    for key in {key.replace("*", "x") for key in known} - LEAST[tool].keys():
        for value in (True, "text", 2):
            path = tmp_path / "train.yaml"
            path.write_text(yaml.safe_dump({**LEAST[tool], key: value}), encoding="utf-8")
            said: RecipeDraft | str = drafted(TRAINERS[tool], path)
            assert key in (said if isinstance(said, str) else settled(said)), key


OFF = {
    "axolotl": "gradient_checkpointing activation_offloading batch_size eval_steps eval_strategy evaluation_strategy "
    "excess_length_strategy flash_attention reward_model save_steps save_total_limit torch_compile unfrozen_parameters",
    "llamafactory": "gradient_checkpointing disable_gradient_checkpointing adam_beta1 adam_beta2 eval_steps "
    "evaluation_strategy predict_with_generate pure_bf16 push_to_hub save_steps save_total_limit torch_compile_mode",
}
"""Keys that are dealt with together with others where they are on."""


@pytest.mark.parametrize(("tool", "key"), [(tool, key) for tool, keys in OFF.items() for key in keys.split()])
def test_a_key_that_is_off_is_a_known_one(tool: str, key: str, tmp_path: Path):
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump({**LEAST[tool], key: False, "my_own_key": False}), encoding="utf-8")
    made = drafted(TRAINERS[tool], path)

    assert isinstance(made, RecipeDraft)
    assert [remark.key for remark in made.remarks if remark.text.startswith("unknown")] == ["my_own_key"]


@pytest.mark.parametrize("path", EXAMPLES)
@given(data=st.data())
def test_no_value_is_lost_or_breaks_it(path: Path, data: Any):
    """One key of an example with any value: a recipe, or one message."""
    document = yaml.safe_load(path.read_text())
    key = data.draw(st.sampled_from(sorted(document)))
    document[key] = data.draw(junk)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        draft = drafted(trainer_of(path), file)
        if isinstance(draft, str):
            return
        try:
            recipe = drafts.recipe_of(draft)
        except UserError:
            return
        flat = drafts.flatten(drafts.load_file(str(file), draft.tool), trainer_of(path).nested)
        assert flat.keys() <= settled(draft)
        assert load.validate(yaml.safe_load(drafts.to_yaml(recipe, draft)), origin="written") == recipe
        list(drafts.import_report(draft, "recipe.yaml"))
