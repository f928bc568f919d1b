"""Drafter checkpoints: config.json and model.safetensors of either layout, read whole or refused, written at once.

Tensors keep their stored names in memory. V target ids, Vd draft ids, D hidden, r Markov rank.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dspark.durable_file import sync
from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_formats import DEEPSPEC, SPECULATORS, config_json, drafter_config_from
from dspark.models.kernels import dtype_name
from dspark.models.weights import CheckpointTensors

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter as its files hold it; `completed` adds the embedding and head that files may leave to the target."""

    config: DrafterConfig
    tensors: dict[str, Tensor]  # by stored name; "d2t" only for a pruned vocabulary, "t2d" never

    def completed(self, target: Decoder) -> DrafterCheckpoint:
        """Return this checkpoint with what it lacks taken from its target: embedding, head, number of target layers.

        With a pruned vocabulary the target's head gives the rows of the kept ids. Raises `CheckpointError` when the
        target's do not fit.
        """
        tensors, config = dict(self.tensors), self.config
        dtype, device = tensors["fc.weight"].dtype, tensors["fc.weight"].device
        is_complete = EMBEDDING in tensors and HEAD in tensors
        if not is_complete and config.hidden_size != target.config.hidden_size:
            raise CheckpointError(
                f"the drafter has no embedding or head of its own, and its hidden size ({config.hidden_size}) is not "
                f"the target's ({target.config.hidden_size}); use the drafter of this target"
            )
        if EMBEDDING not in tensors:
            tensors[EMBEDDING] = target.embedding.to(device=device, dtype=dtype)
        if HEAD not in tensors:
            head, ids = target.head_weight(), draft_target_ids(config, tensors)
            if ids is not None:
                check_draft_ids(ids, target.config.vocab_size)
                head = head[ids.to(head.device)]
            tensors[HEAD] = head.to(device=device, dtype=dtype)
        if config.num_target_layers is None:
            config = replace(config, num_target_layers=target.config.num_layers)
        return DrafterCheckpoint(config=config, tensors=tensors)


def load_drafter_checkpoint(
    folder: Path, *, dtype: torch.dtype, device: torch.device, layout: str = "auto"
) -> DrafterCheckpoint:
    """Read a drafter of either layout; its weights are converted to `dtype`. Python beside it is never run.

    Raises `CheckpointError` naming the key or tensor that is missing, unexpected, ill-shaped or contradictory.
    """
    config = drafter_config_from(folder, layout=layout)
    stored = CheckpointTensors(folder, canonical_name=_canonical_name)
    shapes = drafter_shapes(config)
    vocabulary = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        HEAD: (config.draft_vocab_size, config.hidden_size),
        DRAFT_TO_TARGET: (config.draft_vocab_size,),
        TARGET_TO_DRAFT: (config.vocab_size,),
    }
    shapes |= {name: shape for name, shape in vocabulary.items() if name in stored.names}
    if config.has_pruned_vocab:
        shapes[DRAFT_TO_TARGET] = vocabulary[DRAFT_TO_TARGET]
    stored.check(shapes)
    names = shapes.keys() - {DRAFT_TO_TARGET, TARGET_TO_DRAFT}
    tensors = {name: stored.read(name).to(device=device, dtype=dtype, copy=True) for name in sorted(names)}
    if DRAFT_TO_TARGET in shapes:
        offsets = stored.read(DRAFT_TO_TARGET, dtypes=(torch.int64, torch.int32)).to(torch.int64)
        kept = stored.read(TARGET_TO_DRAFT, dtypes=(torch.bool,)) if TARGET_TO_DRAFT in shapes else None
        _check_vocabulary_map(config, offsets, kept, folder)
        if config.has_pruned_vocab:
            tensors[DRAFT_TO_TARGET] = offsets.to(device=device, copy=True)
    return DrafterCheckpoint(config=config, tensors=tensors)


def draft_target_ids(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the target id [Vd] int64 of each draft id, or None where they are the same."""
    if not config.has_pruned_vocab:
        return None
    offsets = tensors[DRAFT_TO_TARGET]
    return torch.arange(config.draft_vocab_size, device=offsets.device) + offsets


def check_draft_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse draft ids that stand for target ids [Vd] at or above `vocab_size`. Raises `CheckpointError`."""
    if int(ids.max()) >= vocab_size:
        raise CheckpointError(
            f"{DRAFT_TO_TARGET} of the drafter names id {int(ids.max())}, the target's vocabulary has {vocab_size} "
            "rows; use the drafter of this target"
        )


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that all files of such a drafter hold."""
    hidden, head_dim, rank = config.hidden_size, config.head_dim, config.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (config.num_heads * head_dim, hidden),
            f"{prefix}self_attn.k_proj.weight": (config.num_kv_heads * head_dim, hidden),
            f"{prefix}self_attn.v_proj.weight": (config.num_kv_heads * head_dim, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, config.num_heads * head_dim),
            f"{prefix}self_attn.q_norm.weight": (head_dim,),
            f"{prefix}self_attn.k_norm.weight": (head_dim,),
            f"{prefix}mlp.gate_proj.weight": (config.intermediate_size, hidden),
            f"{prefix}mlp.up_proj.weight": (config.intermediate_size, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, config.intermediate_size),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.markov_head_type == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if config.markov_head_type == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.has_confidence_head:
        shapes["confidence_head.proj.weight"] = (1, config.confidence_input_size)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def save_drafter(
    folder: Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    layout: str,
    dtype: torch.dtype | None = None,  # of the stored weights; None: as they are
    without_head: bool = False,  # leave a pruned head to the target too: smaller, but only this package completes it
) -> None:
    """Write a drafter to `folder`, which must not exist or be empty, in the layout "deepspec" or "speculators".

    `tensors` go by their stored names (`DrafterModule.state_dict()`, `DrafterCheckpoint.tensors`). DeepSpec files hold
    copies of the target's embedding and head; speculators files leave them to the target, but for a pruned head.
    The folder appears complete or not at all. Raises `ConfigError` for what the layout cannot express,
    `CheckpointError` when the disk does not take it.
    """
    assert layout == SPECULATORS or not without_head, layout
    stored = _stored_tensors(config, tensors, layout, dtype)
    if without_head:
        stored.pop(HEAD, None)
    written = config_json(config, layout, dtype=dtype_name(stored["fc.weight"].dtype))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; choose another folder or remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write(temporary, written, stored)
            temporary.chmod(0o755)  # mkdtemp's folders are private
            temporary.replace(folder)
            sync(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # gone already when all went well
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}; free space or choose another folder") from error


def _stored_tensors(
    config: DrafterConfig, tensors: Mapping[str, Tensor], layout: str, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    shapes = drafter_shapes(config)
    if layout == DEEPSPEC:
        shapes[EMBEDDING] = (config.vocab_size, config.hidden_size)
    if layout == DEEPSPEC or config.has_pruned_vocab:
        shapes[HEAD] = (config.draft_vocab_size, config.hidden_size)
    for name, shape in shapes.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name} is needed in the {layout} layout; complete the drafter first")
        assert tuple(tensors[name].shape) == shape, (name, tuple(tensors[name].shape), shape)
    unknown = tensors.keys() - shapes.keys() - {EMBEDDING, HEAD, DRAFT_TO_TARGET}
    assert not unknown, sorted(unknown)
    stored = {name: tensors[name].detach().to(device="cpu", dtype=dtype).contiguous() for name in sorted(shapes)}
    ids = draft_target_ids(config, tensors)
    if ids is not None:
        kept = torch.zeros(config.vocab_size, dtype=torch.bool)
        kept[ids.cpu()] = True
        stored |= {DRAFT_TO_TARGET: tensors[DRAFT_TO_TARGET].detach().cpu().contiguous(), TARGET_TO_DRAFT: kept}
    return stored


def _write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    # Tensors that share memory (a tied head) are refused by the format, so each gets its own.
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "model.safetensors").chmod(0o644)  # the library's files are for their owner alone
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in (folder / "model.safetensors", folder / "config.json", folder):
        sync(path)


def _check_vocabulary_map(config: DrafterConfig, offsets: Tensor, kept: Tensor | None, folder: Path) -> None:
    ids = torch.arange(config.draft_vocab_size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise CheckpointError(
            f"{DRAFT_TO_TARGET} in {folder} maps to ids {int(ids.min())}..{int(ids.max())}, the vocabulary has "
            f"{config.vocab_size}; it must hold offsets (target id minus draft id)"
        )
    if ids.unique().numel() != ids.numel():
        raise CheckpointError(
            f"{DRAFT_TO_TARGET} in {folder} maps {ids.numel()} draft ids to {ids.unique().numel()} target ids only; "
            "it must hold offsets (target id minus draft id)"
        )
    if not config.has_pruned_vocab and bool(offsets.any()):
        raise CheckpointError(
            f"{DRAFT_TO_TARGET} in {folder} reorders a vocabulary that is not pruned ({config.vocab_size} ids); "
            "use a drafter whose draft ids are the target's ids"
        )
    if kept is not None and (int(kept.sum()) != ids.numel() or not bool(kept[ids].all())):
        raise CheckpointError(
            f"{TARGET_TO_DRAFT} in {folder} keeps {int(kept.sum())} ids, which are not the {ids.numel()} of "
            f"{DRAFT_TO_TARGET}; they are not of the same drafter"
        )


def _canonical_name(stored_name: str) -> str | None:
    if stored_name.startswith("verifier_") or stored_name.endswith("rotary_emb.inv_freq"):
        return None
    return stored_name
