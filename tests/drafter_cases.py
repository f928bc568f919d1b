"""The stored drafters with their expected tensors, and ways to run both implementations on them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.models.decoder import Decoder
from dspark.models.drafter import Drafter, load_drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_checkpoint import EMBEDDING, HEAD, drafter_shapes, load_drafter_checkpoint
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import DrafterModule
from dspark.models.kv_cache import KVCache
from dspark.models.weights import load_decoder

FIXTURES = Path(__file__).parent / "fixtures"
DEEPSPEC = (
    "deepspec_vanilla",
    "deepspec_gated",
    "deepspec_dflash",
    "deepspec_dflash_noconf",
    "deepspec_vanilla_bf16",
)
SPECULATORS = (
    "speculators_anchor",
    "speculators_fill_in",
    "speculators_anchor_window",
    "speculators_full_attn_noconf",
)
PAGE_SIZE = 4
CPU = torch.device("cpu")


@cache
def tiny_target() -> Decoder:
    """Return the target of all stored drafters."""
    return load_decoder(FIXTURES / "tiny_target", dtype=torch.float32, device=CPU)


@cache
def case(name: str) -> dict[str, Tensor]:
    """Return the inputs and expected outputs of a stored drafter."""
    return load_file(FIXTURES / name / "case.safetensors")


def stage(name: str, number: int) -> dict[str, Tensor]:
    """Return one of the four drafting steps of a DeepSpec case."""
    prefix = f"stage{number}."
    return {key.removeprefix(prefix): value for key, value in case(name).items() if key.startswith(prefix)}


def load_module(folder: Path, layout: str = "auto") -> DrafterModule:
    """Load a drafter for training, with the tiny target's embedding and head where it has none."""
    checkpoint = load_drafter_checkpoint(folder, dtype=torch.float32, device=CPU, layout=layout)
    checkpoint = checkpoint.completed(tiny_target())
    return DrafterModule.from_tensors(checkpoint.config, checkpoint.tensors)


def load(folder: Path, layout: str = "auto", tokenizer_size: int = 256) -> Drafter:
    """Load a drafter for serving the tiny target."""
    return load_drafter(folder, tiny_target(), tokenizer_size=tokenizer_size, layout=layout)


@dataclass
class PagedContext:
    """A drafter with a pool of its own, whose pages are handed out in shuffled order."""

    drafter: Drafter
    kv_cache: KVCache

    @classmethod
    def of(cls, drafter: Drafter, num_pages: int = 64) -> PagedContext:
        return cls(drafter, KVCache(drafter.config, num_pages, PAGE_SIZE, drafter.dtype, CPU))

    @torch.inference_mode()
    def write(self, taps: Tensor, positions: Tensor, page_ids: Sequence[int]) -> None:
        pages = torch.tensor(page_ids)
        slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        self.drafter.write_context(taps, positions, slots, self.kv_cache)

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow], forced: Tensor | None = None) -> GreedyDraft:
        """Draft along the argmax, or along `forced` target ids [R, K]."""
        drafter = self.drafter
        blocks = drafter.draft_blocks(rows, self.kv_cache)
        steps = drafter.begin(blocks, rows)
        previous = torch.tensor([row.anchor_token_id for row in rows])
        logits, confidences, target_ids, draft_ids = [], [], [], []
        for k in range(drafter.config.num_draft_tokens):
            bias, confidence = steps.step(previous)
            corrected = blocks.base_logits[:, k] if bias is None else blocks.base_logits[:, k] + bias
            drawn = corrected.argmax(-1)
            previous = drafter.to_target_ids(drawn) if forced is None else forced[:, k]
            logits.append(corrected)
            draft_ids.append(drawn)
            target_ids.append(previous)
            if confidence is not None:
                confidences.append(confidence)
        return GreedyDraft(
            hidden=blocks.hidden,
            base_logits=blocks.base_logits,
            logits=torch.stack(logits, 1),
            draft_ids=torch.stack(draft_ids, 1),
            target_ids=torch.stack(target_ids, 1),
            confidence_logits=torch.stack(confidences, 1) if confidences else None,
        )


@dataclass
class GreedyDraft:
    """Everything about drafted blocks, proposals only but for `hidden`."""

    hidden: Tensor  # [R, B, D]
    base_logits: Tensor  # [R, K, Vd]
    logits: Tensor  # [R, K, Vd]
    draft_ids: Tensor  # [R, K]
    target_ids: Tensor  # [R, K]
    confidence_logits: Tensor | None  # [R, K]


@torch.no_grad()
def draft_with_module(
    module: DrafterModule,
    context: Tensor,
    positions: Tensor,
    anchor_ids: Tensor,
    anchor_positions: Tensor,
    forced: Tensor | None = None,
) -> GreedyDraft:
    """Draft blocks with the trainable module, slot by slot, over a shared context."""
    config = module.config
    visible = positions[None] < anchor_positions[:, None]
    previous = anchor_ids[:, None].repeat(1, config.block_size)
    first = config.first_proposal_slot
    drawn = torch.zeros((len(anchor_ids), config.num_draft_tokens), dtype=torch.int64)
    chosen = torch.ones_like(previous, dtype=torch.bool)
    chosen[:, :first] = False
    for k in range(config.num_draft_tokens):
        features = module(context, positions, anchor_ids, anchor_positions, visible, previous)
        logits = module.corrected_logits(features, chosen).unflatten(0, drawn.shape)
        drawn[:, k] = logits[:, k].argmax(-1)
        token = drawn[:, k] if module.target_ids is None else module.target_ids[drawn[:, k]]
        if first + k + 1 < config.block_size:
            previous[:, first + k + 1] = token if forced is None else forced[:, k]
    confidence = features.confidence_logits
    return GreedyDraft(
        hidden=features.hidden,
        base_logits=module.base_logits(features.hidden)[:, first:],
        logits=logits,
        draft_ids=drawn,
        target_ids=drawn if module.target_ids is None else module.target_ids[drawn],
        confidence_logits=None if confidence is None else confidence[:, first:],
    )


def copy_checkpoint(name: str, folder: Path) -> Path:
    """Copy a stored drafter to `folder`, to be changed there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes((FIXTURES / name / file).read_bytes())
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Set top-level keys of `folder`/config.json; `...` removes one."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the tensors of `folder`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def make_config(**changes: Any) -> DrafterConfig:
    """Return the configuration of a small drafter for the tiny target."""
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "target_hidden_size": 64,
        "vocab_size": 256,
        "draft_vocab_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": 5,
        "samples_from_anchor": True,
        "tap_ids": (-1, 2),
        "mask_token_id": 251,
        "windows": (None, None),
        "is_causal": (False, False),
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "has_confidence_head": True,
        "confidence_uses_markov": True,
        "num_target_layers": 6,
    }
    return DrafterConfig(**settings | changes)


def make_tensors(config: DrafterConfig, seed: int = 3) -> dict[str, Tensor]:
    """Return random weights, large enough that every part matters; a pruned vocabulary keeps every second id."""
    generator = torch.Generator().manual_seed(seed)
    shapes = drafter_shapes(config) | {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (config.draft_vocab_size, config.hidden_size),
    }
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in sorted(shapes.items())}
    if config.has_pruned_vocab:
        assert 2 * config.draft_vocab_size <= config.vocab_size, (config.draft_vocab_size, config.vocab_size)
        tensors["d2t"] = torch.arange(config.draft_vocab_size)  # target id 2i
    return tensors
