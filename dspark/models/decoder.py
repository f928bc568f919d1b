"""The decoder of every supported family: embedding, layers over the paged KV cache, final norm, output head.

T tokens in the flattened batch, N rows of logits, D hidden size, V vocabulary. Families differ by `DecoderConfig` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.batch import ForwardBatch
from dspark.models.attention import AttentionPlan, PagedAttention
from dspark.models.kv_cache import KVCache
from dspark.models.layers import GatedMlp, HeadNorm, PackedLinear, RMSNorm, Rotary, rotate
from dspark.models.model_config import DecoderConfig

EMBEDDING_TAP = -1


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """The weights of one layer. Query and key rows are in rotary order (`layers.pair_rows`)."""

    input_norm: RMSNorm
    qkv: PackedLinear  # [H * Dh queries | KVH * Dh keys | KVH * Dh values]
    head_norm: HeadNorm | None
    output: PackedLinear
    post_attention_norm: RMSNorm | None  # Gemma: on the attention's result, before it is added
    mlp_norm: RMSNorm
    mlp: GatedMlp
    post_mlp_norm: RMSNorm | None  # Gemma


class Decoder:
    """A decoder with its weights. Run it under `torch.inference_mode()`."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: Tensor | None,  # [V, D]; None: the head's rows
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        head: PackedLinear,
        dtype: torch.dtype,  # of what is computed, and of keys and values
        device: torch.device,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._embedding = embedding
        self._layers = list(layers)
        self._final_norm = final_norm
        self.head = head  # [V, D]
        self._rotary = {kind: Rotary(rotary, self.device) for kind, rotary in config.rotary.items()}
        self._attention = PagedAttention(config)
        # Gemma rounds its embedding factor to the weights' type.
        self._embedding_scale = torch.tensor(config.embedding_scale).to(self.dtype).item()

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, *, tapped_layers: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run `batch`, writing its keys and values into `kv_cache` (on the decoder's device, of its dtype).

        Returns the hidden states [T, D] after the final norm, and the taps [T, len(tapped_layers) * D] or None: tap k
        is the output of layer k, -1 the embedding's output, in the order given. `embed` and `compute_logits` complete
        the model.
        """
        config = self.config
        assert all(EMBEDDING_TAP <= tap < config.num_layers for tap in tapped_layers), tuple(tapped_layers)
        assert batch.page_size == kv_cache.page_size, (batch.page_size, kv_cache.page_size)
        num_tokens = batch.num_tokens
        hidden = self.embed(batch.input_ids)
        if num_tokens < self.head.min_rows:  # rows of zeros stay zeros, or are nobody's
            hidden = F.pad(hidden, (0, 0, 0, self.head.min_rows - num_tokens))
        taps = hidden.new_empty((batch.num_tokens, len(tapped_layers), config.hidden_size)) if tapped_layers else None
        self._tap(taps, tapped_layers, EMBEDDING_TAP, hidden[:num_tokens])
        phases = {kind: rotary.phases(batch.positions) for kind, rotary in self._rotary.items()}
        plan = self._attention.plan(batch)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer.input_norm(hidden), batch, kv_cache, plan, phases)
            _add(hidden[:num_tokens], attended, layer.output, layer.post_attention_norm)
            _add(hidden, layer.mlp.inner(layer.mlp_norm(hidden)), layer.mlp.down, layer.post_mlp_norm)
            self._tap(taps, tapped_layers, index, hidden[:num_tokens])
        return self._final_norm(hidden[:num_tokens]), None if taps is None else taps.flatten(1)

    __call__ = forward

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [T, D] of `input_ids` [T], scaled as the family scales them; fresh memory."""
        hidden = self.embed_unscaled(input_ids)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def embed_unscaled(self, input_ids: Tensor) -> Tensor:
        """Return the rows [T, D] of the embedding for `input_ids` [T]; fresh memory."""
        return self.head.rows(input_ids) if self._embedding is None else F.embedding(input_ids, self._embedding)

    @property
    def embedding(self) -> Tensor:
        """The embedding [V, D], unscaled: a copy where the head holds it packed."""
        return self.head.unpacked_weight() if self._embedding is None else self._embedding

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of weights that each pass reads: all matrices, the output head once.

        Norms and biases are left out (0.1 % of a small model), and so are the few rows of the embedding.
        """
        linears = [x for layer in self._layers for x in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)]
        return sum(linear.num_bytes for linear in (*linears, self.head))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, V] of `hidden` [N, D], rows of `forward`'s first result."""
        return self._capped(self.head(hidden).float())

    def compute_logits_of(self, hidden: Tensor, head_rows: Tensor) -> Tensor:
        """Return float32 logits [N, I] of `hidden` [N, D] for those ids whose rows of the head are `head_rows` [I, D].

        They equal columns of `compute_logits` up to rounding.
        """
        return self._capped(F.linear(hidden, head_rows).float())

    def _capped(self, logits: Tensor) -> Tensor:
        softcap = self.config.final_softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def head_weight(self) -> Tensor:
        """Return the output head [V, D] in plain layout: a copy where it is packed."""
        tied = self._embedding if self.config.ties_embeddings else None
        return self.head.unpacked_weight() if tied is None else tied

    def _attend(
        self,
        index: int,
        hidden: Tensor,  # [T or more, D]
        batch: ForwardBatch,
        kv_cache: KVCache,
        plan: AttentionPlan,
        phases: dict[str, Tensor],
    ) -> Tensor:  # [T, H * Dh], what the output map is applied to
        config = self.config
        layer = self._layers[index]
        num_rotated = config.num_heads + config.num_kv_heads
        qkv = layer.qkv(hidden)[: batch.num_tokens].unflatten(1, (-1, config.head_dim))
        if plan.has_kernel and qkv.dtype == kv_cache.dtype == torch.float32:
            if layer.head_norm is not None:
                qkv[:, :num_rotated] = layer.head_norm(qkv[:, :num_rotated])
            rotations = phases[config.layer_types[index]]
            return plan.rotate_and_attend(qkv.flatten(1), rotations, kv_cache.pools[index], window=config.window(index))
        queries_keys = qkv[:, :num_rotated]
        if layer.head_norm is not None:
            queries_keys = layer.head_norm(queries_keys)
        queries_keys = rotate(queries_keys, phases[config.layer_types[index]])
        kv_cache.write(index, queries_keys[:, config.num_heads :], qkv[:, num_rotated:], batch.slot_mapping)
        queries = queries_keys[:, : config.num_heads]
        attended = plan.attend(queries, kv_cache.pools[index], window=config.window(index))
        return attended.flatten(1)

    @staticmethod
    def _tap(taps: Tensor | None, tapped_layers: Sequence[int], index: int, hidden: Tensor) -> None:
        if taps is None or index not in tapped_layers:
            return
        for column, tap in enumerate(tapped_layers):
            if tap == index:
                taps[:, column] = hidden


def _add(hidden: Tensor, x: Tensor, linear: PackedLinear, norm: RMSNorm | None) -> None:
    """Add the map of `x`, normed if the family does so, to `hidden` in place."""
    if norm is None:
        linear.add_to(hidden, x)
    else:
        hidden.add_(norm(linear(x)))
