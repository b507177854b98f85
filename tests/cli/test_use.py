"""`baton generate`, as a person tries a model out."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.cli.app import app

BATON = str(Path(sys.executable).parent / "baton")
MAX_NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of random weights that has a chat template."""
    path = Path(__file__).parents[1] / "support/tiny.py"
    spec = importlib.util.spec_from_file_location("tiny_of_use", path)
    assert spec
    assert spec.loader
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    return str(tiny.make_base(tmp_path_factory.mktemp("use") / "base"))


@pytest.fixture(scope="module")
def adapted(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an adapter on that model, of which every weight is random."""
    import torch
    from peft import LoraConfig, get_peft_model

    from baton.models import loading

    folder = str(tmp_path_factory.mktemp("use") / "adapter")
    torch.manual_seed(1)
    adapted = get_peft_model(loading.load_model(model), LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder)
    loading.load_tokenizer(model).save_pretrained(folder)
    return folder


def _generate(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [BATON, "generate", *words, "--max-new-tokens", str(MAX_NEW_TOKENS)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)


def _generate_here(*words: str) -> str:
    """Runs the command in this process, which has imported what it needs, and returns what it prints."""
    done = CliRunner().invoke(app, ["generate", *words, "--max-new-tokens", str(MAX_NEW_TOKENS)])
    assert done.exit_code == 0, done.output
    return done.stdout


def _written(model: str, prompts: list[Any]) -> list[str]:
    """What the model writes, by plain `generate` one at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    found = []
    for prompt in prompts:
        if isinstance(prompt, list):
            ids = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            ids = tokenizer(prompt, return_tensors="pt")
        length = ids["input_ids"].shape[1]
        out = loaded.generate(
            input_ids=ids["input_ids"], max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=None
        )
        found.append(tokenizer.decode(out[0, length:], skip_special_tokens=True))
    return found


@pytest.mark.slow
def test_models_side_by_side_over_a_file(model: str, adapted: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Who?"}]
    rows: list[dict[str, Any]] = [{"prompt": "What is 3?"}, {"messages": chat}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = _generate(model, adapted, "--file", str(file), "--output", "json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["What is 3?", "Who?"]
    assert [line["answers"][model] for line in lines] == _written(model, ["What is 3?", chat])
    assert all(line["answers"][model] != line["answers"][adapted] for line in lines)


@pytest.mark.slow
def test_a_chat_keeps_what_was_said_in_mind_until_it_begins_anew(model: str) -> None:
    done = _generate(model, "--chat", "--system", "Be brief.", stdin="Who?\nWhat?\n/new\nWho?\n/quit\n")
    assert done.returncode == 0, done.stderr
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]
    first = _written(model, [start])[0]
    whole = [*start, {"role": "assistant", "content": first}, {"role": "user", "content": "What?"}]
    second = _written(model, [whole])[0]
    said = [text for text in done.stdout.split("> ")[1:] if text.strip()]  # `/new` answers nothing
    assert [" ".join(text.split()) for text in said] == [" ".join(text.split()) for text in (first, second, first)]


@pytest.fixture
def chatty(model: str, tmp_path: Path) -> str:
    """The model as an export of a run that trained it on conversations with a system message."""
    folder = tmp_path / "chatty"
    shutil.copytree(model, folder)
    (folder / "baton.json").write_text(json.dumps({"prompts": "chat", "system": "Be brief."}), encoding="utf-8")
    return str(folder)


def _answer(model: str, *options: str) -> str:
    said = _generate_here(model, "--prompt", "What is 3?", "--output", "json", *options)
    answer: str = json.loads(said)["answers"][model]
    return answer


def test_prompts_are_written_as_in_training(model: str, chatty: str, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "What is 3?"}
    brief, long = ({"role": "system", "content": text} for text in ("Be brief.", "Be long."))
    prompts = {"trained": [brief, asked], "own system": [long, asked], "as it is": "What is 3?"}
    expected = dict(zip(prompts, _written(model, list(prompts.values())), strict=True))
    assert len(set(expected.values())) == 3
    words = {"trained": [], "own system": ["--system", "Be long."], "as it is": ["--no-chat"]}
    for case, options in words.items():
        assert _answer(chatty, *options) == expected[case], case
    file = tmp_path / "prompts.jsonl"
    rows = [{"messages": [asked]}, {"messages": [long, asked]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = _generate_here(chatty, "--file", str(file), "--output", "json").splitlines()
    answers = [json.loads(line)["answers"][chatty] for line in lines]
    assert answers == [expected["trained"], expected["own system"]]

    Path(chatty, "baton.json").write_text(json.dumps({"prompts": "prompt", "separator": " ->"}), encoding="utf-8")
    from baton.models import generate

    loaded, tokenizer = generate.load(model)
    limits = {"max_new_tokens": MAX_NEW_TOKENS, "max_length": 64}
    (followed,) = generate.write_all(loaded, tokenizer, ["What is 3? ->"], **limits)
    assert followed not in expected.values()
    assert _answer(chatty) == followed


WRONG = {
    "nothing to do": ([], "no prompt is given. Give --prompt, --file or --chat."),
    "both": (["--prompt", "a", "--file", "b"], "--prompt and --file exclude each other."),
    "no file": (["--file", "absent.txt"], "--file 'absent.txt' cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_message(case: str, model: str) -> None:
    words, message = WRONG[case]
    done = _generate(model, *words)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_a_row_that_is_no_prompt_is_named(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n\n{"prompt": 3}\n', encoding="utf-8")
    done = _generate(model, "--file", str(file))
    assert done.returncode == 2
    assert "prompts.jsonl line 3 is not a prompt" in done.stderr
