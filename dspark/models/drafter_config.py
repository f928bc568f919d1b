"""What a DSpark drafter is, in one convention whatever layout its files have (`drafter_formats` translates).

A block has B slots: the anchor's token, then mask tokens, at positions anchor .. anchor + B - 1. K of them propose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dspark.errors import CheckpointError, ConfigError
from dspark.models.model_config import DecoderConfig, RotaryConfig, rotary_config_from_hf

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything the drafter's arithmetic depends on, and what its files record beside it.

    Raises `CheckpointError` for values that contradict each other.
    """

    hidden_size: int  # D
    target_hidden_size: int  # of the tapped layers
    vocab_size: int  # V target ids the drafter can read: rows of the embedding and of the Markov W1
    draft_vocab_size: int  # Vd ids it can propose: rows of the head and of the Markov W2; fewer than V when pruned
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta and, for scaled types, the rest
    block_size: int  # B slots, anchor included
    samples_from_anchor: (
        bool  # True: slot k proposes anchor+k+1; False (fill-in): anchor+k, and slot 0 proposes nothing
    )
    tap_ids: tuple[int, ...]  # output of target layer k; -1: of the embedding
    mask_token_id: int
    windows: tuple[int | None, ...]  # [num_layers] context seen is anchor-W .. anchor-1, for every slot; None: all
    is_causal: tuple[bool, ...]  # [num_layers] a slot sees the block's slots up to its own only
    markov_rank: int  # r; 0: no sequential head (plain DFlash)
    markov_head_type: str | None  # one of MARKOV_HEAD_TYPES; None exactly when markov_rank is 0
    has_confidence_head: bool
    confidence_uses_markov: bool  # the confidence head reads [hidden; W1[previous]], otherwise the hidden state alone
    num_target_layers: int | None = None  # as recorded in the file; None: not recorded
    target_name: str | None = None  # as recorded in the file
    target_architecture: str | None = None  # as recorded in the file
    num_anchors: int = 512  # blocks per training sequence, recorded for those who train on

    def __post_init__(self) -> None:
        _refuse(
            self.num_heads % self.num_kv_heads != 0, "num_attention_heads", self.num_heads, "no multiple of KV heads"
        )
        _refuse(self.head_dim % 2 != 0, "head_dim", self.head_dim, "odd, so it cannot be rotated")
        _refuse(len(self.windows) != self.num_layers, "layer_types", self.windows, "not one entry per layer")
        assert len(self.is_causal) == self.num_layers, (self.is_causal, self.num_layers)
        _refuse(self.num_draft_tokens < 1, "block_size", self.block_size, "too small to propose a token")
        _refuse(not self.tap_ids, "target_layer_ids", self.tap_ids, "empty")
        _refuse(min(self.tap_ids) < -1, "target_layer_ids", self.tap_ids, "below -1, the embedding's output")
        _refuse(len(set(self.tap_ids)) < len(self.tap_ids), "target_layer_ids", self.tap_ids, "not distinct")
        _refuse(self.draft_vocab_size > self.vocab_size, "draft_vocab_size", self.draft_vocab_size, "above vocab_size")
        _refuse(
            not 0 <= self.mask_token_id < self.vocab_size,
            "mask_token_id",
            self.mask_token_id,
            f"outside the vocabulary of {self.vocab_size} ids",
        )
        _refuse(any(w is not None and w < 1 for w in self.windows), "sliding_window", self.windows, "below 1")
        _refuse(
            (self.markov_head_type is None) != (self.markov_rank == 0)
            or (self.markov_head_type is not None and self.markov_head_type not in MARKOV_HEAD_TYPES),
            "markov_head_type",
            self.markov_head_type,
            f"not one of {', '.join(MARKOV_HEAD_TYPES)} for markov_rank {self.markov_rank}",
        )
        _refuse(
            self.confidence_uses_markov and not (self.has_confidence_head and self.markov_rank),
            "confidence_head_with_markov",
            self.confidence_uses_markov,
            "impossible without a confidence head and a Markov head",
        )

    @property
    def num_draft_tokens(self) -> int:
        """Proposals of one block, K (gamma in the paper)."""
        return self.block_size if self.samples_from_anchor else self.block_size - 1

    @property
    def first_proposal_slot(self) -> int:
        """The slot that proposes the token after the anchor."""
        return 0 if self.samples_from_anchor else 1

    @property
    def predicted_offsets(self) -> tuple[int, ...]:  # [B]
        """Position of the token each slot predicts, counted from the anchor (fill-in's slot 0 predicts the anchor)."""
        return tuple(slot + 1 - self.first_proposal_slot for slot in range(self.block_size))

    @property
    def previous_offsets(self) -> tuple[int, ...]:  # [B]
        """Position of the token each slot's sequential head takes as predecessor, counted from the anchor."""
        return tuple(max(0, offset - 1) for offset in self.predicted_offsets)

    @property
    def has_pruned_vocab(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def feature_size(self) -> int:
        """Width of the concatenated taps."""
        return len(self.tap_ids) * self.target_hidden_size

    @property
    def confidence_input_size(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_uses_markov else 0)

    @cached_property
    def rotary(self) -> RotaryConfig:
        """Rotary embedding of all layers. Raises `CheckpointError` for unsupported scaling."""
        return rotary_config_from_hf(qwen3_config(self), "full_attention", self.head_dim)


def qwen3_config(config: DrafterConfig) -> Any:
    """Return the transformers configuration of the draft layers."""
    from transformers import Qwen3Config  # takes a second to import

    return Qwen3Config(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=False,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in config.windows],
        use_sliding_window=any(window is not None for window in config.windows),
        sliding_window=next((window for window in config.windows if window is not None), None),
    )


def check_target(config: DrafterConfig, target: DecoderConfig, *, tokenizer_size: int) -> None:
    """Refuse a drafter that was not made for `target`, whose tokenizer has `tokenizer_size` ids.

    Embedding rows may differ by padding. Raises `CheckpointError` with both values.
    """
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"the drafter was made for a target of hidden size {config.target_hidden_size}, this target has "
            f"{target.hidden_size}; use the drafter of this target"
        )
    if max(config.tap_ids) >= target.num_layers:
        raise CheckpointError(
            f"the drafter reads the output of target layer {max(config.tap_ids)}, this target has the layers "
            f"0..{target.num_layers - 1}; use the drafter of this target, or correct the layout"
        )
    if config.num_target_layers is not None and config.num_target_layers != target.num_layers:
        raise CheckpointError(
            f"the drafter was made for a target of {config.num_target_layers} layers, this target has "
            f"{target.num_layers}; use the drafter of this target"
        )
    if config.vocab_size < tokenizer_size:
        raise CheckpointError(
            f"the drafter's vocabulary has {config.vocab_size} rows, the target's tokenizer has {tokenizer_size} ids; "
            "use a drafter that was trained for this vocabulary"
        )
    if config.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"the drafter's mask token {config.mask_token_id} is outside the target's vocabulary of "
            f"{target.vocab_size} rows; use the drafter of this target"
        )


def check_num_draft_tokens(config: DrafterConfig, num_draft_tokens: int) -> None:
    """Refuse more proposals than the block was trained for: positions never seen spoil even the first one.

    Fewer are fine: the whole block is drafted and its first proposals are used. Raises `ConfigError`.
    """
    if not 1 <= num_draft_tokens <= config.num_draft_tokens:
        raise ConfigError(
            f"num_draft_tokens ({num_draft_tokens}) must be at least 1 and at most the drafter's trained length "
            f"({config.num_draft_tokens}); change it or use another drafter"
        )


def _refuse(is_wrong: bool, key: str, value: object, why: str) -> None:
    if is_wrong:
        raise CheckpointError(f"the drafter's {key} ({value}) is {why}; correct its config.json")
