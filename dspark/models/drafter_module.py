"""The drafter as a trainable torch module: many blocks of one sequence in one pass, teacher-forced.

T context positions, N blocks of B slots, S chosen slots, m taps, D hidden, V target ids, Vd draft ids. Parameters
carry the names of the files, so `state_dict()` is what `save_drafter` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.models.drafter_checkpoint import draft_target_ids
from dspark.models.drafter_config import DrafterConfig
from dspark.models.heads import confidence_logits, gated_latent, rnn_latent

# Blocks that attend together: their keys stand side by side, most of them masked, so many would waste work and few
# would not fill the machine.
BLOCKS_PER_CALL = 16


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Neighbouring blocks that attend together, and the span of the context that any of them sees."""

    blocks: slice
    context: slice
    mask: Tensor  # [n * B, span + n * B] bool


@dataclass(frozen=True, kw_only=True)
class BlockFeatures:
    """What one pass computes for every slot; logits over the vocabulary are made for chosen slots only."""

    hidden: Tensor  # [N, B, D] after the final norm
    latent: Tensor | None  # [N, B, r] what W2 turns into the sequential bias; None: no Markov head
    confidence_logits: Tensor | None  # [N, B]


class DrafterModule(nn.Module):
    """DSpark's draft model with autograd. The embedding and the head are the target's and stay frozen."""

    d2t: Tensor
    _inverse_frequencies: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.markov_head = _MarkovHead(config) if config.markov_rank else None
        self.confidence_head = _ConfidenceHead(config) if config.has_confidence_head else None
        if config.has_pruned_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        frequencies = torch.tensor(config.rotary.inverse_frequencies, dtype=torch.float32)
        self.register_buffer("_inverse_frequencies", frequencies, persistent=False)
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    @classmethod
    def from_tensors(cls, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> DrafterModule:
        """Return a module with copies of a completed checkpoint's tensors, in float32, on their device."""
        frequencies = torch.tensor(config.rotary.inverse_frequencies, dtype=torch.float32)
        with torch.device("meta"):  # random values for the embedding would only be overwritten
            module = cls(config)
        module.to_empty(device=tensors["fc.weight"].device)
        module._inverse_frequencies.copy_(frequencies)
        module.load_state_dict(dict(tensors))
        return module

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
        previous_token_ids: Tensor,  # [N, B] int64 target ids, the predecessor of each slot
    ) -> BlockFeatures:
        """Run N blocks over a shared context.

        `context_visible` says which context belongs to a block: the positions of its own text before its anchor; the
        layers' windows are applied on top of it. Positions restart with each text where several are packed.
        """
        hidden = self.backbone(context_features, context_positions, anchor_token_ids, anchor_positions, context_visible)
        embedded = latent = confidence = None
        if self.markov_head is not None:
            embedded, latent = self.markov_head(previous_token_ids, hidden)
        if self.confidence_head is not None:
            confidence = self.confidence_head(hidden, embedded)
        return BlockFeatures(hidden=hidden, latent=latent, confidence_logits=confidence)

    def backbone(
        self,
        context_features: Tensor,
        context_positions: Tensor,
        anchor_token_ids: Tensor,
        anchor_positions: Tensor,
        context_visible: Tensor,
    ) -> Tensor:
        """Return the hidden states [N, B, D] after the final norm; arguments as for `forward`."""
        config = self.config
        num_blocks = anchor_token_ids.shape[0]
        context = self.hidden_norm(self.fc(context_features))  # [T, D]
        ids = torch.full((num_blocks, config.block_size), config.mask_token_id, device=anchor_token_ids.device)
        ids[:, 0] = anchor_token_ids
        hidden = self.embed_tokens(ids)
        positions = anchor_positions[:, None] + torch.arange(config.block_size, device=anchor_positions.device)
        context_phases = self._phases(context_positions)
        block_phases = self._phases(positions.flatten())
        distances = anchor_positions[:, None] - context_positions
        calls = {}
        for window, is_causal in set(zip(config.windows, config.is_causal, strict=True)):
            visible = context_visible if window is None else context_visible & (distances <= window)
            calls[window, is_causal] = attention_calls(visible, config.block_size, is_causal=is_causal)
        for layer, window, is_causal in zip(self.layers, config.windows, config.is_causal, strict=True):
            hidden = layer(hidden, context, block_phases, context_phases, calls[window, is_causal])
        return self.norm(hidden)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [S, Vd] of chosen slots' `hidden` [S, D], before the sequential head."""
        return self.lm_head(hidden)

    def bias(self, latent: Tensor) -> Tensor:
        """Return the sequential bias [S, Vd] of chosen slots' `latent` [S, r]; base logits plus it are the draft's."""
        assert self.markov_head is not None, "without a Markov head there is no latent"
        return self.markov_head.markov_w2(latent)

    def corrected_logits(self, features: BlockFeatures, chosen: Tensor) -> Tensor:
        """Return the draft's logits [S, Vd] float32 at the slots where `chosen` [N, B] is True."""
        logits = self.base_logits(features.hidden[chosen]).float()
        return logits if features.latent is None else logits + self.bias(features.latent[chosen]).float()

    def _phases(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_phases(positions, self._inverse_frequencies, self.config.rotary.magnitude)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self._config = config
        head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,  # [N, B, D]
        context: Tensor,  # [T, D]
        block_phases: tuple[Tensor, Tensor],
        context_phases: tuple[Tensor, Tensor],
        calls: Sequence[AttentionCall],
    ) -> Tensor:
        num_blocks, block_size, _ = hidden.shape
        slots = hidden.flatten(0, 1)
        queries = rotate_halves(self.q_norm(self._heads(self.q_proj(slots))), block_phases)  # [N * B, H, Dh]
        keys = rotate_halves(self.k_norm(self._heads(self.k_proj(slots))), block_phases)
        values = self._heads(self.v_proj(slots))
        context_keys = rotate_halves(self.k_norm(self._heads(self.k_proj(context))), context_phases)
        context_values = self._heads(self.v_proj(context))
        outputs = []
        for call in calls:
            rows = slice(call.blocks.start * block_size, call.blocks.stop * block_size)
            attended = F.scaled_dot_product_attention(
                queries[rows].transpose(0, 1)[None],
                torch.cat([context_keys[call.context], keys[rows]]).transpose(0, 1)[None],
                torch.cat([context_values[call.context], values[rows]]).transpose(0, 1)[None],
                attn_mask=call.mask,
                enable_gqa=self._config.num_heads != self._config.num_kv_heads,
            )
            outputs.append(attended[0].transpose(0, 1).flatten(1))
        return self.o_proj(torch.cat(outputs)).unflatten(0, (num_blocks, block_size))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self._config.head_dim))


class Mlp(nn.Module):
    """silu(gate) * up, projected down."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        block_phases: tuple[Tensor, Tensor],
        context_phases: tuple[Tensor, Tensor],
        calls: Sequence[AttentionCall],
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), context, block_phases, context_phases, calls)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _MarkovHead(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, config.hidden_size
        self._kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self._kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self._kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, previous_token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return W1[previous] and the input of W2, [N, B, r] each."""
        embedded = self.markov_w1(previous_token_ids)
        if self._kind == "vanilla":
            return embedded, embedded
        if self._kind == "gated":
            return embedded, gated_latent(embedded, hidden, self.gate_proj)
        state = torch.zeros_like(embedded[:, 0])
        latents = []
        for slot in range(embedded.shape[1]):  # fill-in's slot 0 proposes nothing but feeds the state
            latent, state = rnn_latent(state, embedded[:, slot], hidden[:, slot], self.joint_proj)
            latents.append(latent)
        return embedded, torch.stack(latents, dim=1)


class _ConfidenceHead(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self._uses_markov = config.confidence_uses_markov
        self.proj = nn.Linear(config.confidence_input_size, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:  # [N, B]
        return confidence_logits(hidden, embedded if self._uses_markov else None, self.proj)


def rotary_phases(positions: Tensor, inverse_frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, 1, Dh] of `positions` [T] for `rotate_halves`."""
    angles = positions[:, None].float() * inverse_frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate_halves(x: Tensor, phases: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads `x` [T, N, Dh], whose rotary partners stand half a head apart."""
    cosines, sines = phases
    first, second = x.float().chunk(2, dim=-1)
    return (x * cosines + torch.cat([-second, first], dim=-1) * sines).to(x.dtype)


def attention_calls(visible: Tensor, block_size: int, *, is_causal: bool) -> list[AttentionCall]:
    """Return calls that cover all blocks of `visible` [N, T]. Synchronises once."""
    num_blocks, num_context = visible.shape
    starts = range(0, num_blocks, BLOCKS_PER_CALL)
    positions = torch.arange(num_context, device=visible.device)
    spans = []
    for start in starts:
        unseen = ~visible[start : start + BLOCKS_PER_CALL].any(0)
        firsts = positions.masked_fill(unseen, num_context)
        ends = (positions + 1).masked_fill(unseen, 0)
        # The extra element stands for a context of no positions at all.
        spans.append(torch.stack([F.pad(firsts, (0, 1), value=num_context).amin(), F.pad(ends, (0, 1)).amax()]))
    own = torch.ones((block_size, block_size), dtype=torch.bool, device=visible.device)
    if is_causal:
        own = own.tril()
    calls = []
    for start, (first, end) in zip(starts, torch.stack(spans).tolist(), strict=True):
        blocks = slice(start, min(start + BLOCKS_PER_CALL, num_blocks))
        context = slice(min(first, end), end)
        in_context = visible[blocks, context].repeat_interleave(block_size, dim=0)
        in_blocks = torch.block_diag(*[own] * (blocks.stop - blocks.start)).bool()
        calls.append(AttentionCall(blocks=blocks, context=context, mask=torch.cat([in_context, in_blocks], dim=1)))
    return calls
