"""Templates by name, as their makers write conversations."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from baton.errors import UserError
from baton.models import loading
from baton.models.chat import TEMPLATES, chat_template

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n",
        "b<|im_end|>\n",
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "b<|eot_id|>",
    ),
    "zephyr": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\na<|end|>\n"
        "<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n",
        "b<|end|>\n",
    ),
    "alpaca": (
        "Be brief.\n\n### Instruction:\na\n\n### Response:\nb<|end|>\n\n### Instruction:\nc\n\n### Response:\n",
        "b<|end|>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_written_and_what_the_assistant_says_is_marked(name: str, tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = chat_template(name)
    written, said = EXPECTED[name]
    assert tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == written
    marked = tokenizer.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids = [token for token, mark in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(ids) == said
    tokenizer.bos_token = "<|im_start|>"
    begins_with_bos = tokenizer.apply_chat_template(TALK, tokenize=False).startswith("<|im_start|><|start_header_id|>")
    assert begins_with_bos == (name == "llama3")


def test_a_file_and_a_template_itself(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0]['content'] }}é", encoding="utf-8")
    assert chat_template(str(path)) == "{{ messages[0]['content'] }}é"
    assert chat_template("{{ messages }}") == "{{ messages }}"


PROBLEMS = {
    "a name": ("chatmel", "'chatmel' is none of chatml, llama3, zephyr, alpaca, no .jinja file and no template."),
    "a file": ("there/is/none.jinja", "'there/is/none.jinja' does not exist."),
    "brackets": ("{{ " + "(" * 5000, "is not valid Jinja: maximum recursion depth exceeded"),
    "digits": ("{{ " + "9" * 5000 + " }}", "is not valid Jinja: Exceeds the limit"),
    "name": ("x" * 300 + ".jinja", f"'{'x' * 300}.jinja' cannot be read: File name too long"),
    "Jinja": ("{% for x %}", "is not valid Jinja: expected token 'in'"),
    "filter": ("{{ messages | tojsn }}", "is not valid Jinja: No filter named 'tojsn'. (line 1)"),
    "break": ("{% break %}", "is not valid Jinja: 'break' outside loop"),
}


@pytest.mark.parametrize(("given", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_no_template(given: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        chat_template(given)
    assert caught.value.message.startswith(f"model.chat_template {message}")


@pytest.mark.parametrize("template", ["{{ 'a' * 2 ** 26 }}", "{{ 'a' | center(2 ** 26) }}", "{{ 'a'.ljust(2 ** 26) }}"])
def test_what_a_template_computes_is_not_computed_where_it_is_checked(template: str) -> None:
    def peak(work: Callable[[str], object]) -> int:
        tracemalloc.start()
        work(template)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(lambda text: _compile_jinja_template(text).render()) > 2**26
    assert peak(chat_template) < 2**24
