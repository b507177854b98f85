"""Writing in batches: what is written one at a time, drawn row by row, and up to the end of a turn."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedTokenizerBase

from baton.models import generate, loading
from baton.models.rng import GumbelNoise
from tests.support import tiny

LIMITS = {"max_new_tokens": 12, "max_length": 64}
PROMPTS = [pair["prompt"] for pair in tiny.PAIRS] + ["", "a " * 100]


@pytest.fixture(scope="module")
def tokenizer(tiny_base: str) -> PreTrainedTokenizerBase:
    """The tiny base's tokenizer."""
    return loading.load_tokenizer(tiny_base)


@pytest.fixture(scope="module")
def llama(tiny_base: str) -> Any:
    """The tiny base."""
    return loading.load_model(tiny_base).eval()


def alone(model: Any, tokenizer: Any, prompt: str) -> str:
    """Writes with Transformers alone, without padding."""
    ids = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt", truncation=True, max_length=64)
    out = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_batch_writes_what_each_prompt_gets_alone(
    architecture: str, llama: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """With rotary positions, and with those that a model has learned for each place."""
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "initializer_range": 0.2}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **ends)).eval()
    model = llama if architecture == "llama" else gpt2
    expected = [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    assert len(set(expected)) > len(PROMPTS) // 2, "prompts that all get the same show nothing"
    for batch_size in (1, 5, 64):
        assert generate.write_all(model, tokenizer, PROMPTS, batch_size=batch_size, **LIMITS) == expected
    assert generate.write_all(model, tokenizer, [PROMPTS[3]], **LIMITS)[0] == expected[3]


def test_progress_is_told_after_each_batch(llama: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    heard: list[tuple[int, int]] = []
    generate.write_all(llama, tokenizer, PROMPTS[:5], batch_size=2, progress=lambda *said: heard.append(said), **LIMITS)
    assert heard == [(2, 5), (4, 5), (5, 5)]


def test_no_prompts_no_texts(llama: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    assert generate.write_all(llama, tokenizer, [], **LIMITS) == []


def test_what_is_drawn_does_not_depend_on_the_batch(llama: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": 3, **LIMITS}
    one_by_one = generate.write_all(llama, tokenizer, PROMPTS, batch_size=1, **drawn)
    torch.manual_seed(99)  # the global generator has no say
    assert generate.write_all(llama, tokenizer, PROMPTS, batch_size=7, **drawn) == one_by_one
    assert generate.write_all(llama, tokenizer, PROMPTS[:4], batch_size=3, **drawn) == one_by_one[:4]
    assert generate.write_all(llama, tokenizer, PROMPTS, batch_size=7, **(drawn | {"seed": 4})) != one_by_one
    assert one_by_one != generate.write_all(llama, tokenizer, PROMPTS, batch_size=7, **LIMITS)


def test_one_prompt_given_twice_is_drawn_for_twice(llama: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = generate.write_all(llama, tokenizer, [PROMPTS[0]] * 8, temperature=1.0, batch_size=8, **LIMITS)
    assert len(set(texts)) > 1


def test_drawing_leaves_the_random_state_alone(llama: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    before = torch.get_rng_state()
    generate.write_all(llama, tokenizer, PROMPTS[:2], temperature=1.0, **LIMITS)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_follow_the_softmax_of_the_scores() -> None:
    """20,000 draws from four tokens: each share within five standard deviations of its probability."""
    scores = torch.log(torch.tensor([0.5, 0.3, 0.2, 1e-30]))
    noise = GumbelNoise([(0, row) for row in range(20_000)])
    counts = torch.bincount(noise(torch.zeros(0), scores.expand(20_000, 4)).argmax(-1), minlength=4)
    for count, share in zip(counts.tolist(), (0.5, 0.3, 0.2, 0.0), strict=True):
        assert abs(count - 20_000 * share) <= 5 * math.sqrt(20_000 * share * (1 - share))


@settings(max_examples=50, deadline=None)
@given(ruled_out=st.sets(st.integers(0, 9), max_size=9), seed=st.integers(0, 2**32 - 1))
def test_a_token_that_is_ruled_out_is_never_drawn(ruled_out: set[int], seed: int) -> None:
    scores = torch.zeros(1, 10)
    scores[0, list(ruled_out)] = -torch.inf
    assert int(GumbelNoise([(seed, 0)])(torch.zeros(0), scores).argmax()) not in ruled_out


class Scripted(LlamaForCausalLM):
    """A model that says given tokens, whatever it is asked."""

    script: tuple[int, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        at = 0 if kwargs["input_ids"].shape[1] > 1 else self.said
        self.said = at + 1
        out.logits[:, -1] = torch.nn.functional.one_hot(torch.tensor(self.script[at]), out.logits.shape[-1]).float()
        return out


@pytest.mark.parametrize("end", ["<|end|>", "<|im_end|>", "a token of the model's own settings"])
def test_a_text_ends_with_the_turn(end: str, tiny_base: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer's own end, the one behind an answer in its chat template, and one that the model knows of."""
    model = Scripted.from_pretrained(tiny_base).eval()
    said, never = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the fox", " jumps over"))
    if end.startswith("a token"):
        stop = tokenizer(" value", add_special_tokens=False)["input_ids"][0]
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, stop]
    else:
        stop = tokenizer.convert_tokens_to_ids(end)
    model.script = (*said, stop, *never, *never, *never)
    assert generate.write_all(model, tokenizer, ["What does it say?"], **LIMITS)[0] == "the fox"
    assert model.said == len(said) + 1, "nothing is computed behind the end"


def test_a_beginning_that_the_template_has_written_is_not_written_again(tiny_base: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = loading.load_tokenizer(tiny_base)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
    )
    prompt = generate.rendered([{"role": "user", "content": "hello"}], tokenizer)
    assert prompt.startswith("<|im_start|>user")
    counted = collections.Counter(generate.prompt_ids(tokenizer, prompt, 64))
    assert counted[start] == 2, "one for the user and one for the assistant"
    assert generate.prompt_ids(tokenizer, "hello", 64)[0] == start


def test_penalties_of_the_model_s_own_settings_do_not_count(llama: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    expected = generate.write_all(llama, tokenizer, PROMPTS, **LIMITS)
    llama.generation_config.repetition_penalty = 5.0
    try:
        assert generate.write_all(llama, tokenizer, PROMPTS, **LIMITS) == expected
    finally:
        llama.generation_config.repetition_penalty = None


def test_a_saved_model_is_loaded_with_its_tokenizer(tiny_base: str, tmp_path: Path) -> None:
    model, tokenizer = generate.load(tiny_base)
    assert not model.training
    assert generate.write_all(model, tokenizer, [PROMPTS[0]], **LIMITS)[0] == alone(model, tokenizer, PROMPTS[0])


THOUGHT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.content }}{{ m.thinking or '' }};{% endfor %}", "a;bc;"),
        ("{% for m in messages %}{{ m.content }}{{ m.reasoning_content or m.thinking or '' }};{% endfor %}", "a;bc;"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "a;b;"),
    ],
)
def test_a_template_reads_thoughts_by_the_name_it_knows(template: str, text: str, tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = template
    assert generate.rendered(THOUGHT, tokenizer) == text


def test_a_template_that_takes_arguments_as_text_gets_text(tiny_base: str) -> None:
    tokenizer = loading.load_tokenizer(tiny_base)
    tokenizer.chat_template = "{{ tools[0].name }} {{ 'x' + messages[0].tool_calls[0].function.arguments }}"
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    prompt = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert generate.rendered(prompt, tokenizer, [{"name": "add"}]) == 'add x{"a": 1}'
