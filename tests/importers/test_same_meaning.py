"""What is carried over means the same here: rows come to the same text, templates write the same."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from baton.data import normalize, schema
from baton.importers import common, llamafactory
from baton.models import chat
from baton.recipe import load
from tests.data.splitting import normalized

MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
TEXTS = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
}
"""What both trainers write with their template of that name, by the slots of one and the Jinja of the other."""


@pytest.mark.parametrize("name", TEXTS)
def test_templates_write_the_same(name: str):
    written, _ = render_jinja_template(
        [MESSAGES],
        chat_template=chat.chat_template(name),
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )

    assert written == [TEXTS[name]]


def test_speakers_are_those_that_rows_are_read_with():
    assert common.SPEAKERS == normalize.ROLES


SAID = [{"from": "human", "value": "Hi"}]
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "instruction and input": (
        "sft",
        {},
        {"instruction": "Add.", "input": "1 and 2", "output": "3"},
        {"prompt": "Add.\n1 and 2", "completion": "3"},
    ),
    "instruction alone": (
        "sft",
        {},
        {"instruction": "Sing.", "input": "", "output": "La"},
        {"prompt": "Sing.", "completion": "La"},
    ),
    "conversation": (
        "sft",
        {"formatting": "sharegpt"},
        {"conversations": [*SAID, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    ),
    "pair of messages": (
        "dpo",
        {"formatting": "sharegpt", "ranking": True, "columns": {"messages": "talk", "chosen": "a", "rejected": "b"}},
        {"talk": SAID, "a": {"from": "gpt", "value": "Hello"}, "b": {"from": "gpt", "value": "What"}},
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "chosen": [{"role": "assistant", "content": "Hello"}],
            "rejected": [{"role": "assistant", "content": "What"}],
        },
    ),
    "rated conversation": (
        "kto",
        {"formatting": "sharegpt", "columns": {"messages": "talk", "kto_tag": "liked"}},
        {"talk": [*SAID, {"from": "gpt", "value": "Hello"}], "liked": False},
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Hello"}],
            "label": False,
        },
    ),
    "answers in a list": (
        "reward",
        {"ranking": True},
        {"instruction": "Sing.", "input": "Softly.", "output": ["La", "No"]},
        {"prompt": "Sing.\nSoftly.", "chosen": "La", "rejected": "No"},
    ),
}


@pytest.mark.parametrize(("method", "entry", "row", "expected"), ROWS.values(), ids=ROWS)
def test_rows_of_llamafactory(method: str, entry: dict[str, Any], row: dict[str, Any], expected: dict[str, Any]):
    shape = llamafactory.row_shape(method, entry, "llama3")
    document = {
        "name": "tiny",
        "model": {"base": "org/model"},
        "data": {
            "source": "rows.jsonl",
            "format": shape.format,
            "columns": shape.columns,
            "join": llamafactory.JOIN,
        },
        "training": {"method": method},
    }
    recipe = load.validate(document, origin="r.yaml")
    layout = schema.infer_mapping(recipe.data.sources[0], recipe, sorted(row))

    assert normalized(row, layout) == expected
