"""A tiny target with a byte tokenizer and a chat template, and conversations it wrote itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from byte_tokenizers import END_OF_TURN_ID, VOCAB_SIZE, byte_level_backend

from dspark.batch import BatchRow, build_forward_batch
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache
from dspark.training.config import TrainConfig
from dspark.training.dataset import Conversation

CPU = torch.device("cpu")
TEMPLATE = (
    "{% if tools %}tools:{{ tools | length }}<end>{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_target(folder: Path, *, template: str = TEMPLATE) -> Path:
    """Write a Llama of two layers whose vocabulary is bytes and a few special tokens."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=257,
        eos_token_id=[256, END_OF_TURN_ID],
    )
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Sharp enough for clear argmaxes.
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.3, generator=generator)
    model.save_pretrained(folder)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@torch.no_grad()
def answer(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Continue `prompt` with the target greedily, token by token."""
    kv_cache = KVCache(decoder.config, 64, 16, decoder.dtype, CPU)
    ids, new, start, written = list(prompt), list(prompt), 0, []
    for _ in range(num_tokens):
        batch = build_forward_batch([BatchRow(token_ids=new, start_position=start, page_ids=range(64))], page_size=16)
        hidden, _ = decoder.forward(batch, kv_cache)
        token = int(decoder.compute_logits(hidden[-1:]).argmax())
        start, new = len(ids), [token]
        ids.append(token)
        written.append(token)
    return written


def write_records(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_conversations(path: Path, decoder: Decoder, count: int) -> Path:
    """Write `count` conversations, each answered greedily by the target with 24 tokens."""
    generator = torch.Generator().manual_seed(3)
    records = []
    for number in range(count):
        prompt = torch.randint(0, 256, (5 + number % 4,), generator=generator).tolist()
        records.append({"prompt_ids": prompt, "response_ids": answer(decoder, prompt, 24)})
    return write_records(path, records)


def conversation(ids: Sequence[int], supervised_from: int, index: int = 0) -> Conversation:
    """Return a conversation whose answer begins at `supervised_from`."""
    return Conversation(
        index=index,
        token_ids=np.array(ids),
        is_supervised=np.arange(len(ids)) >= supervised_from,
        is_held_out=False,
    )


def settings(target: Path, data: Path, output: Path, **changes: Any) -> TrainConfig:
    """Return settings of a run that takes seconds."""
    small: dict[str, Any] = {
        "target": str(target),
        "data": (str(data),),
        "output": str(output),
        "num_taps": 2,
        "markov_rank": 8,
        "block_size": 3,
        "num_anchors": 6,
        "batch_size": 4,
        "max_steps": 4,
        "hold_out_fraction": 0.0,
        "log_interval": 1,
    }
    return TrainConfig(**small | changes)


def read_log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
