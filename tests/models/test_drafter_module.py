"""The trainable drafter: what learns, what one pass over many blocks means, and where logits are made."""

from __future__ import annotations

import pytest
import torch
from drafter_cases import make_config, make_tensors
from torch import Tensor

from dspark.models import drafter_module
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import BlockFeatures, DrafterModule

NUM_CONTEXT = 12
ANCHORS = torch.tensor([3, 12, 7, 1, 9])


def make_module(config: DrafterConfig) -> DrafterModule:
    return DrafterModule.from_tensors(config, make_tensors(config))


def random_context(config: DrafterConfig, length: int = NUM_CONTEXT, seed: int = 4) -> Tensor:
    return torch.randn((length, config.feature_size), generator=torch.Generator().manual_seed(seed))


def run(module: DrafterModule, context: Tensor, anchors: Tensor = ANCHORS) -> BlockFeatures:
    positions = torch.arange(len(context))
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, 256, (len(ANCHORS), module.config.block_size), generator=generator)[: len(anchors)]
    return module(context, positions, tokens[:, 0], anchors, positions[None] < anchors[:, None], tokens)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_every_part_learns_but_the_embedding_and_the_head(kind: str) -> None:
    config = make_config(markov_head_type=kind, windows=(4, None), is_causal=(True, False))
    module = make_module(config)
    features = run(module, random_context(config))
    assert features.confidence_logits is not None
    chosen = torch.ones((5, 5), dtype=torch.bool)
    loss = module.corrected_logits(features, chosen).logsumexp(-1).sum() + features.confidence_logits.square().sum()
    loss.backward()
    without_gradient = {name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert without_gradient == {"embed_tokens.weight", "lm_head.weight"}


def test_gradients_equal_finite_differences() -> None:
    """Along one random direction of all trainable parameters, in float64."""
    config = make_config(markov_head_type="rnn", windows=(4, None), is_causal=(True, False))
    module = make_module(config).double()
    context, chosen = random_context(config).double(), torch.ones((5, 5), dtype=torch.bool)

    def loss() -> Tensor:
        features = run(module, context)
        assert features.confidence_logits is not None
        assert features.latent is not None
        logits = module.base_logits(features.hidden[chosen]) + module.bias(features.latent[chosen])
        return logits.logsumexp(-1).sum() + features.confidence_logits.square().sum()

    parameters = [p for p in module.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(9)
    directions = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
    loss().backward()
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True) if p.grad is not None)
    losses = []
    for step in (1e-3, -1e-3):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=step)
            losses.append(loss().item())
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(d, alpha=step)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(float(slope), rel=1e-2)


def test_blocks_do_not_see_each_other() -> None:
    """Case M9."""
    config = make_config()
    module, context = make_module(config), random_context(config)
    with torch.no_grad():
        together = run(module, context)
        for block in range(2):
            alone = run(module, context, ANCHORS[: block + 1])
            torch.testing.assert_close(alone.hidden[block], together.hidden[block])


def test_how_many_blocks_attend_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(windows=(4, None), is_causal=(True, False))
    module, context = make_module(config), random_context(config)
    with torch.no_grad():
        at_once = run(module, context)
        monkeypatch.setattr(drafter_module, "BLOCKS_PER_CALL", 2)
        torch.testing.assert_close(run(module, context).hidden, at_once.hidden)


def test_texts_packed_into_one_context_stay_apart() -> None:
    """Case M9: positions restart with each text, and so does the window."""
    config = make_config(windows=(4, None), is_causal=(True, False))
    module = make_module(config)
    texts = [random_context(config, 6, seed=1), random_context(config, 9, seed=2)]
    anchors = torch.tensor([5, 8])
    tokens = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
    text_of = torch.tensor([0] * 6 + [1] * 9)
    positions = torch.cat([torch.arange(6), torch.arange(9)])
    visible = (text_of == torch.arange(2)[:, None]) & (positions < anchors[:, None])
    with torch.no_grad():
        packed = module(torch.cat(texts), positions, tokens[:, 0], anchors, visible, tokens)
        for i, text in enumerate(texts):
            block = slice(i, i + 1)
            own = torch.arange(len(text))
            alone = module(text, own, tokens[block, 0], anchors[block], own[None] < anchors[block, None], tokens[block])
            torch.testing.assert_close(packed.hidden[block], alone.hidden)


def test_logits_are_made_for_chosen_slots_only() -> None:
    config = make_config(draft_vocab_size=100)
    module = make_module(config)
    chosen = torch.zeros((5, 5), dtype=torch.bool)
    chosen[1, 3] = chosen[4, 0] = True
    with torch.no_grad():
        features = run(module, random_context(config))
        some = module.corrected_logits(features, chosen)
        every = module.corrected_logits(features, torch.ones_like(chosen)).unflatten(0, (5, 5))
    assert some.shape == (2, 100)
    torch.testing.assert_close(some, torch.stack([every[1, 3], every[4, 0]]))


def test_parameters_carry_the_names_of_the_files() -> None:
    config = make_config(markov_head_type="rnn", draft_vocab_size=100)
    assert make_module(config).state_dict().keys() == make_tensors(config).keys()


def test_a_new_module_has_the_same_shapes_as_a_loaded_one() -> None:
    config = make_config(markov_head_type="gated")
    shapes = {name: tensor.shape for name, tensor in DrafterModule(config).state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in make_tensors(config).items()}
