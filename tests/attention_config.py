"""The configuration of a model of which attention alone matters."""

from __future__ import annotations

from dspark.models.model_config import DecoderConfig, RotaryConfig


def attention_config(
    *, num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 8, window: int | None = None, softcap: float | None
) -> DecoderConfig:
    kind = "full_attention" if window is None else "sliding_attention"
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=8,
        max_position=4096,
        rms_norm_eps=1e-6,
        activation="silu",
        attention_scale=0.3,
        rotary={kind: RotaryConfig(inverse_frequencies=(1.0,) * (head_dim // 2))},
        layer_types=(kind,),
        sliding_window=window,
        attention_softcap=softcap,
    )
