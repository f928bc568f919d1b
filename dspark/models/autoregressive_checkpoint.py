"""Files of an autoregressive baseline: the keys of the speculators layout under a model type of our own.

So training and offline evaluation find it again, and engines that would serve it as a DSpark drafter refuse it by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.autoregressive_module import AutoregressiveModule
from dspark.models.decoder import Decoder
from dspark.models.drafter_checkpoint import DRAFT_TO_TARGET, EMBEDDING, HEAD, check_draft_ids, draft_target_ids
from dspark.models.drafter_formats import SPECULATORS, config_json, drafter_config_from
from dspark.models.model_config import read_json_object
from dspark.models.weights import CheckpointTensors

MODEL_TYPE = "dspark-autoregressive-baseline"


def is_autoregressive_folder(folder: Path) -> bool:
    """Return whether `folder`/config.json describes an autoregressive baseline; False without one."""
    path = folder / "config.json"
    return path.is_file() and read_json_object(path).get("speculators_model_type") == MODEL_TYPE


def save_autoregressive(folder: Path, module: AutoregressiveModule) -> None:
    """Write config.json and model.safetensors to `folder`, which must not exist; the target's tensors stay out.

    Raises `OSError` or `SafetensorError` when the disk does not take it.
    """
    folder.mkdir()
    kept = {name: tensor.contiguous() for name, tensor in module.state_dict().items() if name not in (EMBEDDING, HEAD)}
    written = config_json(module.config, SPECULATORS, dtype="float32") | {"speculators_model_type": MODEL_TYPE}
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def load_autoregressive(folder: Path, target: Decoder) -> AutoregressiveModule:
    """Read a baseline, with the embedding and head of its target. Raises `CheckpointError` naming what is wrong."""
    config = drafter_config_from(folder, layout=SPECULATORS)
    own_sizes = (config.vocab_size, config.hidden_size)
    target_sizes = (target.config.vocab_size, target.config.hidden_size)
    if own_sizes != target_sizes:
        raise CheckpointError(
            f"vocabulary and hidden size of the baseline {own_sizes} are not those of the target {target_sizes}, whose "
            "embedding it reads; use the target that it was trained for"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in AutoregressiveModule(config).state_dict().items()}
    stored = CheckpointTensors(folder, canonical_name=lambda name: name)
    own = {name: shape for name, shape in shapes.items() if name not in (EMBEDDING, HEAD)}
    stored.check(own)
    tensors: dict[str, Tensor] = {
        name: stored.read(name).to(device=target.device, dtype=torch.float32, copy=True)
        for name in own.keys() - {DRAFT_TO_TARGET}
    }
    head = target.head_weight()
    if config.has_pruned_vocab:
        tensors[DRAFT_TO_TARGET] = stored.read(DRAFT_TO_TARGET, dtypes=(torch.int64,)).to(target.device, copy=True)
        ids = draft_target_ids(config, tensors)
        assert ids is not None, config.draft_vocab_size
        check_draft_ids(ids, target.config.vocab_size)
        head = head[ids]
    tensors |= {EMBEDDING: target.embedding.float(), HEAD: head.float()}
    return AutoregressiveModule.from_tensors(config, tensors)
