"""One pass of a drafter under training, of either kind, over a batch of blocks."""

from __future__ import annotations

from torch import Tensor

from dspark.models.autoregressive_module import AutoregressiveModule
from dspark.models.drafter_module import BlockFeatures, DrafterModule
from dspark.training.blocks import BlockBatch
from dspark.training.checkpoint import TrainedModule


def run_blocks(module: TrainedModule, batch: BlockBatch) -> BlockFeatures:
    """Run the drafter over a batch of blocks."""
    inputs = (
        batch.context_features,
        batch.context_positions,
        batch.anchor_token_ids,
        batch.anchor_positions,
        batch.context_visible,
        batch.previous_token_ids,
    )
    features: BlockFeatures = (
        module(*inputs, batch.next_token_ids) if isinstance(module, AutoregressiveModule) else module(*inputs)
    )
    return features


def draft_logits(module: TrainedModule, features: BlockFeatures, at: tuple[Tensor, Tensor]) -> Tensor:
    """Return the draft's logits [S, Vd] float32 at (block [S], slot [S])."""
    logits = module.base_logits(features.hidden[at]).float()
    if features.latent is None:
        return logits
    assert isinstance(module, DrafterModule), "only DSpark's drafter has a sequential head"
    return logits + module.bias(features.latent[at]).float()
