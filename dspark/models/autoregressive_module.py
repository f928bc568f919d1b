"""An autoregressive drafter of one layer with EAGLE-3's inputs, to train as a baseline; the engine does not serve it.

T context positions, N blocks of K drafted tokens, m taps, D hidden, Vd draft ids (Li et al. 2025, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.drafter_checkpoint import draft_target_ids
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import (
    AttentionCall,
    BlockFeatures,
    Mlp,
    attention_calls,
    rotary_phases,
    rotate_halves,
)


class AutoregressiveModule(nn.Module):
    """Drafts token after token: each reads the embedding of the token before it and a feature of the place before that.

    Where the target has been, the feature is its projected taps; further on it is the layer's own last output. Training
    unrolls all K steps over the layer's own outputs ("training-time test"). The embedding and the head are the
    target's and stay frozen.
    """

    d2t: Tensor
    _inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        """Take sizes, taps and vocabulary of `config`; it must describe one layer without Markov or confidence head."""
        super().__init__()
        assert config.num_layers == 1 and not config.markov_rank and not config.has_confidence_head, config
        assert config.samples_from_anchor and config.windows == (None,), config
        self.config = config
        width, head_dim = config.hidden_size, config.head_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.embedding_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(2 * width, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.confidence_head = None  # what the loss asks of every drafter
        if config.has_pruned_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        frequencies = torch.tensor(config.rotary.inverse_frequencies, dtype=torch.float32)
        self.register_buffer("_inverse_frequencies", frequencies, persistent=False)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    @classmethod
    def from_tensors(cls, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> AutoregressiveModule:
        """Return a module with copies of `tensors` by parameter name, in float32, on their device."""
        module = cls(config)
        module.load_state_dict(dict(tensors))
        return module.to(tensors["fc.weight"].device)

    @property
    def target_ids(self) -> Tensor | None:
        """The target id [Vd] of each draft id; None where they are the same."""
        return draft_target_ids(self.config, {"d2t": self.d2t}) if self.config.has_pruned_vocab else None

    def forward(
        self,
        context_features: Tensor,  # [T, m * D_target] concatenated taps
        context_positions: Tensor,  # [T] int64
        anchor_token_ids: Tensor,  # [N] int64
        anchor_positions: Tensor,  # [N] int64
        context_visible: Tensor,  # [N, T] bool
        previous_token_ids: Tensor,  # [N, K] int64, the anchor first
        next_token_ids: Tensor,  # [T] int64 the token after each context position
    ) -> BlockFeatures:
        """Unroll N blocks over a shared context, teacher-forced; arguments otherwise as for `DrafterModule.forward`."""
        projected = self.fc(context_features)  # [T, D]
        context_keys, context_values = self._keys_values(
            self._inputs(self.embed_tokens(next_token_ids), projected), context_positions
        )
        # The first step stands on the last visible position and brings its own key, like all later ones.
        num_visible = context_visible.sum(1)
        last = context_visible.shape[1] - 1 - context_visible.flip(1).int().argmax(1)  # [N]
        feature = projected[last] * (num_visible > 0)[:, None]
        before = context_visible.clone()
        before[torch.arange(len(last), device=last.device), last] = False
        calls = attention_calls(before, 1, is_causal=False)
        keys, values, hidden = [], [], []
        for step in range(self.config.block_size):
            inputs = self._inputs(self.embed_tokens(previous_token_ids[:, step]), feature)
            positions = anchor_positions - 1 + step
            queries = self._rotated(self.q_proj(inputs), positions)
            key, value = self._keys_values(inputs, positions)
            keys.append(key)
            values.append(value)
            attended = [_attend(queries, call, context_keys, context_values, keys, values) for call in calls]
            feature = feature + self.o_proj(torch.cat(attended))
            feature = feature + self.mlp(self.post_attention_layernorm(feature))
            hidden.append(self.norm(feature))
        return BlockFeatures(hidden=torch.stack(hidden, dim=1), latent=None, confidence_logits=None)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return the draft's logits [S, Vd] of chosen slots' `hidden` [S, D]."""
        return self.lm_head(hidden)

    def _inputs(self, embedded: Tensor, features: Tensor) -> Tensor:  # [n, 2 * D]
        return torch.cat([self.embedding_norm(embedded), self.hidden_norm(features)], dim=-1)

    def _keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotated(self.k_proj(inputs), positions), self._heads(self.v_proj(inputs))

    def _rotated(self, projected: Tensor, positions: Tensor) -> Tensor:
        phases = rotary_phases(positions, self._inverse_frequencies, self.config.rotary.magnitude)
        return rotate_halves(self._heads(projected), phases)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.config.head_dim))


def _attend(
    queries: Tensor,  # [N, H, Dh]
    call: AttentionCall,
    context_keys: Tensor,  # [T, KVH, Dh]
    context_values: Tensor,
    keys: list[Tensor],  # of each step so far, [N, KVH, Dh]
    values: list[Tensor],
) -> Tensor:  # [n, H * Dh]
    own = torch.eye(call.blocks.stop - call.blocks.start, dtype=torch.bool, device=queries.device)
    attended = F.scaled_dot_product_attention(
        queries[call.blocks].transpose(0, 1)[None],
        torch.cat([context_keys[call.context], *(key[call.blocks] for key in keys)]).transpose(0, 1)[None],
        torch.cat([context_values[call.context], *(value[call.blocks] for value in values)]).transpose(0, 1)[None],
        attn_mask=torch.cat([call.mask, *[own] * (len(keys) - 1)], dim=1),  # the first step's key is in the mask
        enable_gqa=queries.shape[1] != context_keys.shape[1],
    )
    return attended[0].transpose(0, 1).flatten(1)
