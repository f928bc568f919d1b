"""The embedded model says what transformers says from the same folder."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark.batch import BatchRow, build_forward_batch
from dspark.models.kv_cache import KVCache
from dspark.models.model_source import ModelFolder, resolve_model
from dspark.models.tokenizer import load_generation_defaults, load_tokenizer
from dspark.models.weights import load_decoder

pytestmark = pytest.mark.embedded
MESSAGES = [{"role": "user", "content": "Name the 4 seasons,\n\n1 per line."}]


@pytest.fixture(scope="module")
def model() -> ModelFolder:
    return resolve_model("smollm2-135m")


def test_prompt_is_that_of_the_official_model(model: ModelFolder) -> None:
    tokenizer = load_tokenizer(model.path)
    ids = tokenizer.render_chat(MESSAGES)
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nName the 4 seasons,\n\n1 per line.<|im_end|>\n<|im_start|>assistant\n"
    )
    reference = AutoTokenizer.from_pretrained(model.path)
    assert ids == reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)


def test_its_chat_template_takes_no_tools(model: ModelFolder) -> None:
    assert not load_tokenizer(model.path).takes_tools


def test_generation_ends_at_the_end_of_turn_and_samples_as_the_user_says(model: ModelFolder) -> None:
    defaults = load_generation_defaults(model.path)
    assert defaults.eos_token_ids == {2}
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (None, None, None, None)


def test_greedy_text_equals_transformers(model: ModelFolder) -> None:
    ids = load_tokenizer(model.path).render_chat(MESSAGES)
    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
    del reference

    decoder = load_decoder(model.path, dtype=torch.float32, device=torch.device("cpu"))
    cache = KVCache(decoder.config, 8, 16, torch.float32, "cpu")
    pages = [5, 2, 7, 0, 1, 3, 6, 4]
    tokens: list[int] = []
    position, step = 0, ids
    with torch.inference_mode():
        while len(tokens) < len(expected):
            batch = build_forward_batch(
                [BatchRow(token_ids=step, start_position=position, page_ids=pages)], page_size=16
            )
            hidden, _ = decoder.forward(batch, cache)
            position += len(step)
            step = decoder.compute_logits(hidden[-1:]).argmax(dim=-1).tolist()
            tokens += step
    assert tokens == expected
