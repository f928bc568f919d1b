"""The autoregressive baseline: its unrolled, packed pass against one that drafts a block alone, and its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from drafter_cases import make_config
from torch import Tensor
from training_cases import save_target

from dspark.errors import CheckpointError
from dspark.models.autoregressive_checkpoint import load_autoregressive, save_autoregressive
from dspark.models.autoregressive_module import AutoregressiveModule
from dspark.models.drafter import load_drafter
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import rotary_phases, rotate_halves
from dspark.models.weights import load_decoder

CPU = torch.device("cpu")
ALONE = {"num_layers": 1, "markov_rank": 0, "markov_head_type": None, "has_confidence_head": False}


def baseline_config(**changes: object) -> DrafterConfig:
    fields = ALONE | {"confidence_uses_markov": False, "windows": (None,), "is_causal": (False,), "block_size": 3}
    return make_config(**fields | changes)


def random_module(config: DrafterConfig) -> AutoregressiveModule:
    generator = torch.Generator().manual_seed(2)
    module = AutoregressiveModule(config)
    for name, parameter in module.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name)
    return module


@torch.no_grad()
def drafted_alone(module: AutoregressiveModule, taps: Tensor, ids: Tensor, anchor: int, num_steps: int) -> Tensor:
    """Return hidden states [K, D] of one block, with plain attention over a growing list of keys."""
    config = module.config
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim

    def place(token_id: Tensor, feature: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([module.embedding_norm(module.embed_tokens(token_id)), module.hidden_norm(feature)])[None]
        phases = rotary_phases(torch.tensor([position]), module._inverse_frequencies, 1.0)
        query = rotate_halves(module.q_proj(x).view(1, heads, width), phases)
        key = rotate_halves(module.k_proj(x).view(1, kv_heads, width), phases)
        return query, key, module.v_proj(x).view(1, kv_heads, width)

    keys, values, hidden = [], [], []
    for i in range(anchor - 1):
        _, key, value = place(ids[i + 1], module.fc(taps[i]), i)
        keys.append(key)
        values.append(value)
    feature = module.fc(taps[anchor - 1])
    for step in range(num_steps):
        query, key, value = place(ids[anchor + step], feature, anchor - 1 + step)
        keys.append(key)
        values.append(value)
        k, v = (torch.cat(x).repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for x in (keys, values))
        attended = F.scaled_dot_product_attention(query.transpose(0, 1), k, v)  # [H, 1, Dh]
        feature = feature + module.o_proj(attended.transpose(0, 1).flatten())
        feature = feature + module.mlp(module.post_attention_layernorm(feature))
        hidden.append(module.norm(feature))
    return torch.stack(hidden)


@torch.no_grad()
def test_packed_blocks_equal_blocks_that_are_drafted_alone() -> None:
    config = baseline_config()
    module = random_module(config)
    generator = torch.Generator().manual_seed(5)
    lengths, anchors = (12, 9), ((1, 4, 8), (2, 6))
    texts = [torch.randint(0, 250, (length,), generator=generator) for length in lengths]
    taps = [torch.randn((length, config.feature_size), generator=generator) for length in lengths]
    documents = torch.tensor([0] * 12 + [1] * 9)
    positions = torch.cat([torch.arange(length) for length in lengths])
    of_block = [(document, anchor) for document, own in enumerate(anchors) for anchor in own]
    visible = torch.stack([(documents == document) & (positions < anchor) for document, anchor in of_block])
    previous = torch.stack([texts[document][anchor : anchor + 3] for document, anchor in of_block])
    got = module(
        torch.cat(taps),
        positions,
        previous[:, 0],
        torch.tensor([anchor for _, anchor in of_block]),
        visible,
        previous,
        torch.cat([torch.cat([text[1:], text[:1]]) for text in texts]),
    )
    wanted = torch.stack([drafted_alone(module, taps[d], texts[d], anchor, 3) for d, anchor in of_block])
    torch.testing.assert_close(got.hidden, wanted, rtol=1e-5, atol=1e-5)


def test_later_steps_send_gradients_through_the_own_features() -> None:
    config = baseline_config()
    module = random_module(config)
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn((4, config.feature_size), generator=generator, requires_grad=True)
    ids = torch.tensor([3, 1, 4, 1])
    visible = torch.tensor([[True, True, True, False]])
    previous = torch.tensor([[1, 5, 9]])
    got = module(taps, torch.arange(4), ids[3:], torch.tensor([3]), visible, previous, torch.tensor([1, 4, 1, 0]))
    got.hidden[0, 2].sum().backward()
    assert taps.grad is not None
    assert bool((taps.grad[2] != 0).any())
    assert not bool((taps.grad[3] != 0).any())  # the anchor's own features do not exist yet


def test_a_baseline_of_another_target_is_refused(tmp_path: Path) -> None:
    target = load_decoder(save_target(tmp_path / "target"), dtype=torch.float32, device=CPU)
    save_autoregressive(tmp_path / "baseline", random_module(baseline_config()))
    with pytest.raises(CheckpointError, match=r"\(256, 64\) are not those of the target \(264, 32\), .*use the target"):
        load_autoregressive(tmp_path / "baseline", target)


def test_files_give_the_module_back_and_serving_refuses_them_by_name(tmp_path: Path) -> None:
    target = load_decoder(save_target(tmp_path / "target"), dtype=torch.float32, device=CPU)
    width = target.config.hidden_size
    sizes = {"hidden_size": width, "target_hidden_size": width, "vocab_size": target.config.vocab_size}
    config = baseline_config(**sizes, draft_vocab_size=100, mask_token_id=7)
    module = random_module(config)
    ids = torch.arange(0, 200, 2)
    module.d2t.copy_(ids - torch.arange(100))
    module.embed_tokens.weight.data = target.embedding.clone()
    module.lm_head.weight.data = target.head_weight()[ids].clone()
    save_autoregressive(tmp_path / "baseline", module)
    loaded = load_autoregressive(tmp_path / "baseline", target)
    assert loaded.state_dict().keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with pytest.raises(CheckpointError, match="dspark-autoregressive-baseline"):
        load_drafter(tmp_path / "baseline", target, tokenizer_size=100)
