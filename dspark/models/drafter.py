"""The drafter while serving: context keys and values in pages, one parallel pass per round for all requests.

T context positions, R requests, B slots of a block, K proposals, m taps, D hidden, V target ids, Vd draft ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.decoder import Decoder
from dspark.models.drafter_attention import BlockAttention, BlockPlan, DraftRow
from dspark.models.drafter_calibration import load_temperatures
from dspark.models.drafter_checkpoint import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    DrafterCheckpoint,
    check_draft_ids,
    draft_target_ids,
    load_drafter_checkpoint,
)
from dspark.models.drafter_config import DrafterConfig, check_target
from dspark.models.heads import HeadSteps, SequentialHead
from dspark.models.kv_cache import KVCache
from dspark.models.layers import GatedMlp, PackedLinear, RMSNorm, Rotary, pair_rows, rotate

_W1 = "markov_head.markov_w1.weight"
_W2 = "markov_head.markov_w2.weight"


@dataclass(frozen=True, kw_only=True)
class DraftedBlocks:
    """The parallel stage of R blocks; `SequentialHead` corrects the logits from left to right."""

    hidden: Tensor  # [R, B, D] after the final norm
    base_logits: Tensor  # [R, K, Vd] float32, of the proposals asked for


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The weights of one layer. Query and key rows are in rotary order (`layers.pair_rows`)."""

    input_norm: RMSNorm
    queries: PackedLinear
    keys_values: PackedLinear  # [KVH * Dh keys | KVH * Dh values]; the context needs these alone
    query_norm: RMSNorm
    key_norm: RMSNorm
    output: PackedLinear
    mlp_norm: RMSNorm
    mlp: GatedMlp


class Drafter:
    """A drafter with packed weights. Run it under `torch.inference_mode()`.

    Its context lives in a `KVCache(drafter.config, ...)` indexed by the target's page tables: `write_context` puts the
    committed positions there, `draft_blocks` reads them and writes nothing.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        *,
        embed: Callable[[Tensor], Tensor] | None = None,  # ids [T] -> [T, D], in place of the stored table
        head: PackedLinear | None = None,  # [Vd, D] in place of the stored one
        temperatures: Sequence[float] | None = None,  # [K] of the confidence logits; None: not calibrated, all 1
    ) -> None:
        """Take a completed checkpoint's tensors."""
        self.config = config
        self.dtype = tensors["fc.weight"].dtype
        self.device = tensors["fc.weight"].device
        self.sequential_head = SequentialHead(config, tensors)
        self.target_ids = draft_target_ids(config, tensors)  # [Vd] int64; None: draft ids are target ids
        self.is_calibrated = temperatures is not None
        temperatures = [1.0] * config.num_draft_tokens if temperatures is None else temperatures
        assert len(temperatures) == config.num_draft_tokens, (temperatures, config.num_draft_tokens)
        self._temperatures = torch.tensor(temperatures, dtype=torch.float32, device=self.device)
        self._embed = partial(F.embedding, weight=tensors[EMBEDDING]) if embed is None else embed
        self._head = PackedLinear(tensors[HEAD]) if head is None else head
        assert self._head.num_outputs == config.draft_vocab_size, (self._head.num_outputs, config.draft_vocab_size)
        self._projection = PackedLinear(tensors["fc.weight"])
        self._context_norm = RMSNorm(tensors["hidden_norm.weight"], config.rms_norm_eps)
        self._final_norm = RMSNorm(tensors["norm.weight"], config.rms_norm_eps)
        self._layers = [_layer_of(config, tensors, f"layers.{index}.") for index in range(config.num_layers)]
        self._rotary = Rotary(config.rotary, self.device)
        self._attention = BlockAttention(config)

    def write_context(self, taps: Tensor, positions: Tensor, slot_mapping: Tensor, kv_cache: KVCache) -> None:
        """Write the drafter's keys and values of committed positions.

        taps [T, m * D_target] from `Decoder.forward(tapped_layers=config.tap_ids)`; positions [T] int64; slot_mapping
        [T] int64 as in `ForwardBatch`. Every committed position must be written before a block is drafted after it.
        """
        context = self._context_norm(self._projection(taps))
        phases = self._rotary.phases(positions)
        for index, layer in enumerate(self._layers):
            keys_values = self._keys_values(layer, context, phases)
            kv_cache.write(index, keys_values[:, 0], keys_values[:, 1], slot_mapping)

    def draft_blocks(
        self, rows: Sequence[DraftRow], kv_cache: KVCache, *, num_proposals: int | None = None
    ) -> DraftedBlocks:
        """Run the parallel stage for all `rows` in one pass: `run_blocks`, then `with_base_logits`."""
        return self.with_base_logits(self.run_blocks(rows, kv_cache), num_proposals=num_proposals)

    def run_blocks(self, rows: Sequence[DraftRow], kv_cache: KVCache) -> Tensor:
        """Return the hidden states [R, B, D] after the final norm; the whole block is computed, as it was trained."""
        config = self.config
        assert rows, "drafting needs at least one row"
        num_rows, size = len(rows), config.block_size
        ids = torch.full((num_rows, size), config.mask_token_id)
        ids[:, 0] = torch.tensor([row.anchor_token_id for row in rows])
        positions = torch.tensor([row.anchor_position for row in rows])[:, None] + torch.arange(size)
        hidden = self._embed(ids.to(self.device).flatten())  # [R * B, D]
        phases = self._rotary.phases(positions.to(self.device).flatten())
        plan = self._attention.plan(rows, page_size=kv_cache.page_size, dtype=self.dtype, device=self.device)
        for index, layer in enumerate(self._layers):
            hidden.add_(self._attend(index, layer.input_norm(hidden), phases, plan, kv_cache))
            layer.mlp.down.add_to(hidden, layer.mlp.inner(layer.mlp_norm(hidden)))
        return self._final_norm(hidden).unflatten(0, (num_rows, size))

    def with_base_logits(self, hidden: Tensor, *, num_proposals: int | None = None) -> DraftedBlocks:
        """Add the base logits of the first `num_proposals` to hidden states [R, B, D] of `run_blocks`.

        1 to `config.num_draft_tokens`; None: all of them.
        """
        config = self.config
        num_proposals = config.num_draft_tokens if num_proposals is None else num_proposals
        assert 1 <= num_proposals <= config.num_draft_tokens, (num_proposals, config.num_draft_tokens)
        first = config.first_proposal_slot
        proposing = hidden[:, first : first + num_proposals].flatten(0, 1)
        base_logits = self._head(proposing).float().unflatten(0, (hidden.shape[0], num_proposals))
        return DraftedBlocks(hidden=hidden, base_logits=base_logits)

    def begin(self, blocks: DraftedBlocks, rows: Sequence[DraftRow]) -> HeadSteps:
        """Start the sequential stage of drafted blocks."""
        return self.sequential_head.begin(blocks.hidden, self._anchor_ids(rows))

    def first_confidences(self, hidden: Tensor, rows: Sequence[DraftRow]) -> Tensor:
        """Return c_1 of each row [R] float32 from `run_blocks`, before anything is drawn (Eq. 7)."""
        logits = self.sequential_head.first_confidence_logits(hidden, self._anchor_ids(rows))
        return self.confidences(logits[:, None])[:, 0]

    def confidences(self, logits: Tensor) -> Tensor:
        """Return the calibrated confidences c_1 .. c_k of the sequential head's logits [R, k] float32."""
        return (logits / self._temperatures[: logits.shape[1]]).sigmoid()

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map draft ids to target ids; apply it once, to what was drawn from the corrected logits."""
        return draft_ids if self.target_ids is None else self.target_ids[draft_ids]

    def _anchor_ids(self, rows: Sequence[DraftRow]) -> Tensor:
        return torch.tensor([row.anchor_token_id for row in rows]).to(self.device)

    def _attend(self, index: int, hidden: Tensor, phases: Tensor, plan: BlockPlan, kv_cache: KVCache) -> Tensor:
        config, layer = self.config, self._layers[index]
        queries = layer.query_norm(layer.queries(hidden).unflatten(1, (config.num_heads, config.head_dim)))
        queries = rotate(queries, phases)
        keys_values = self._keys_values(layer, hidden, phases)
        attended = plan.attend(
            queries.unflatten(0, (-1, config.block_size)),
            keys_values.unflatten(0, (-1, config.block_size)),
            kv_cache.pools[index],
            window=config.windows[index],
            is_causal=config.is_causal[index],
        )
        return layer.output(attended.flatten(0, 1).flatten(1))

    def _keys_values(self, layer: _Layer, inputs: Tensor, phases: Tensor) -> Tensor:  # [T, D] -> [T, 2, KVH, Dh]
        config = self.config
        keys_values = layer.keys_values(inputs).view(-1, 2, config.num_kv_heads, config.head_dim)
        keys_values[:, 0] = rotate(layer.key_norm(keys_values[:, 0]), phases)
        return keys_values


def load_drafter(folder: Path, target: Decoder, *, tokenizer_size: int, layout: str = "auto") -> Drafter:
    """Load the drafter in `folder` for `target`, in its type and on its device, sharing its embedding and head.

    Its confidences are calibrated with the temperatures in the `sts.json` beside it, if there is one. Raises
    `CheckpointError` for damaged files and for a drafter of another target; `tokenizer_size` ids must fit.
    """
    checkpoint = load_drafter_checkpoint(folder, dtype=target.dtype, device=target.device, layout=layout)
    check_target(checkpoint.config, target.config, tokenizer_size=tokenizer_size)
    temperatures = load_temperatures(folder, num_draft_tokens=checkpoint.config.num_draft_tokens)
    with torch.inference_mode(False), torch.no_grad():
        checkpoint = fit_vocabulary(checkpoint.completed(target), target.config.vocab_size)
        tensors = checkpoint.tensors
        # A drafter's embedding and head are copies of its target's, and large: the same memory serves both.
        shares_embedding = torch.equal(tensors[EMBEDDING], target.embedding)
        shares_head = torch.equal(tensors[HEAD], target.head_weight())
        return Drafter(
            checkpoint.config,
            tensors,
            embed=target.embed_unscaled if shares_embedding else None,
            head=target.head if shares_head else None,
            temperatures=temperatures,
        )


def fit_vocabulary(checkpoint: DrafterCheckpoint, vocab_size: int) -> DrafterCheckpoint:
    """Return a completed checkpoint that reads every id below `vocab_size`, and proposes no other.

    Embedding tables of one vocabulary are padded to different multiples. Rows that only the drafter has could be
    proposed and are cut off; rows it lacks are padding of the target, are never proposed, and read as zeros.
    """
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    ids = draft_target_ids(config, tensors)
    if ids is not None:
        check_draft_ids(ids, vocab_size)
    for name in (EMBEDDING, _W1):
        if name in tensors:
            rows = tensors[name][:vocab_size]
            missing = vocab_size - rows.shape[0]
            tensors[name] = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    num_draft_ids = min(tensors[HEAD].shape[0], config.draft_vocab_size, vocab_size)
    for name in (HEAD, _W2):
        if name in tensors:
            tensors[name] = tensors[name][:num_draft_ids]
    if ids is None and num_draft_ids < vocab_size:
        tensors[DRAFT_TO_TARGET] = torch.zeros(num_draft_ids, dtype=torch.int64, device=tensors[HEAD].device)
    fitted = replace(config, vocab_size=vocab_size, draft_vocab_size=num_draft_ids)
    return DrafterCheckpoint(config=fitted, tensors=tensors)


def _layer_of(config: DrafterConfig, tensors: Mapping[str, Tensor], prefix: str) -> _Layer:
    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    def norm(name: str) -> RMSNorm:
        return RMSNorm(weight(name), config.rms_norm_eps)

    def head_norm(name: str) -> RMSNorm:
        return RMSNorm(pair_rows(weight(name), config.head_dim), config.rms_norm_eps)

    keys = pair_rows(weight("self_attn.k_proj"), config.head_dim)
    return _Layer(
        input_norm=norm("input_layernorm"),
        queries=PackedLinear(pair_rows(weight("self_attn.q_proj"), config.head_dim)),
        keys_values=PackedLinear(torch.cat([keys, weight("self_attn.v_proj")])),
        query_norm=head_norm("self_attn.q_norm"),
        key_norm=head_norm("self_attn.k_norm"),
        output=PackedLinear(weight("self_attn.o_proj")),
        mlp_norm=norm("post_attention_layernorm"),
        mlp=GatedMlp(
            PackedLinear(torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])),
            PackedLinear(weight("mlp.down_proj")),
            "silu",
        ),
    )
