"""A new drafter for a target: its configuration from the settings and the data, its first weights.

D hidden, V target ids, Vd draft ids, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.autoregressive_module import AutoregressiveModule
from dspark.models.decoder import Decoder
from dspark.models.drafter_checkpoint import DRAFT_TO_TARGET, EMBEDDING, HEAD, drafter_shapes
from dspark.models.drafter_config import MARKOV_HEAD_TYPES, DrafterConfig
from dspark.models.drafter_module import DrafterModule
from dspark.models.model_config import DecoderConfig, read_json_object
from dspark.models.weights import CheckpointTensors
from dspark.training.checkpoint import TrainedModule, load_module
from dspark.training.config import TrainConfig
from dspark.training.dataset import Dataset
from dspark.training.setup import Target

_STD = 0.02  # of new matrices, as language models usually begin
_LAYER_PARTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
)


def new_drafter(config: TrainConfig, target: Target, dataset: Dataset, tap_ids: tuple[int, ...]) -> TrainedModule:
    """Return the drafter with which a run of these settings and this data begins."""
    decoder = target.decoder
    vocab_size = decoder.config.vocab_size
    mask_token_id = config.mask_token_id
    if mask_token_id is None:
        mask_token_id = choose_mask_token(dataset, target.tokenizer.special_token_ids, vocab_size)
    drafter_config = make_drafter_config(
        config, decoder.config, target.folder, tap_ids=tap_ids, mask_token_id=mask_token_id
    )
    if config.init_from is not None:
        return _loaded(Path(config.init_from), drafter_config, decoder, dataset)
    draft_ids = None
    if drafter_config.has_pruned_vocab:
        draft_ids = choose_draft_ids(dataset.answer_counts(vocab_size), drafter_config.draft_vocab_size)
    initialise = initialise_drafter if config.architecture == "dspark" else initialise_autoregressive
    return initialise(
        drafter_config,
        decoder,
        target.folder,
        draft_ids=draft_ids,
        init_from_target=config.init_from_target,
        seed=config.seed,
    )


def _loaded(folder: Path, wanted: DrafterConfig, target: Decoder, dataset: Dataset) -> TrainedModule:
    """Return the drafter in `folder`, if it is what the settings describe; its mask token and draft ids stay."""
    module = load_module(folder, target)
    found = module.config
    # What does not shape the weights, or is the drafter's own.
    free = {"mask_token_id", "num_anchors", "target_name", "rope_parameters"}
    differing = [
        f"{f.name} is {getattr(found, f.name)}, asked for is {getattr(wanted, f.name)}"
        for f in fields(DrafterConfig)
        if f.name not in free and getattr(found, f.name) != getattr(wanted, f.name)
    ]
    if differing:
        raise ConfigError(f"the drafter in {folder} does not fit: {'; '.join(differing)}; change the settings")
    used = any((c.token_ids == found.mask_token_id).any() for c in dataset.conversations)
    if used:
        raise ConfigError(
            f"the data uses token id {found.mask_token_id}, the mask of the drafter in {folder}; leave those texts out"
        )
    return module


def spread_taps(num_taps: int, num_target_layers: int) -> tuple[int, ...]:
    """Return `num_taps` tapped layers spread evenly as in the paper (36 layers, 5 taps: 1, 9, 17, 25, 33)."""
    if num_taps > num_target_layers:
        raise ConfigError(
            f"num_taps ({num_taps}) exceeds the target's number of layers ({num_target_layers}); lower it"
        )
    first, last = 1, num_target_layers - 3
    if last - first + 1 < num_taps:  # a target too shallow to leave out its ends
        first, last = 0, num_target_layers - 1
    return tuple(round(x) for x in np.linspace(first, last, num_taps)) if num_taps > 1 else (last,)


def make_drafter_config(
    config: TrainConfig, target: DecoderConfig, folder: Path, *, tap_ids: tuple[int, ...], mask_token_id: int
) -> DrafterConfig:
    """Return the configuration of a drafter whose layers have the shape of the target's in `folder`."""
    if max(tap_ids) >= target.num_layers or min(tap_ids) < -1 or len(set(tap_ids)) < len(tap_ids):
        raise ConfigError(
            f"tap_ids ({', '.join(map(str, tap_ids))}) must be distinct layers from -1 (the embedding) to "
            f"{target.num_layers - 1}; change them"
        )
    if config.markov_head_type not in MARKOV_HEAD_TYPES:
        kinds = ", ".join(MARKOV_HEAD_TYPES)
        raise ConfigError(f"markov_head_type ({config.markov_head_type!r}) must be one of {kinds}; change it")
    draft_vocab_size = target.vocab_size if config.draft_vocab_size is None else config.draft_vocab_size
    if draft_vocab_size > target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size ({draft_vocab_size}) exceeds the target's vocabulary ({target.vocab_size}); lower it"
        )
    return DrafterConfig(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_layers=config.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        max_position=target.max_position,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=_rope_parameters(folder),
        block_size=config.block_size,
        samples_from_anchor=True,
        tap_ids=tap_ids,
        mask_token_id=mask_token_id,
        windows=(config.window,) * config.num_layers,
        is_causal=(False,) * config.num_layers,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type if config.markov_rank else None,
        has_confidence_head=config.has_confidence_head,
        confidence_uses_markov=config.has_confidence_head and config.markov_rank > 0,
        num_target_layers=target.num_layers,
        target_name=config.target,
        target_architecture=target.architecture,
        num_anchors=config.num_anchors,
    )


def choose_mask_token(dataset: Dataset, special_ids: Collection[int], vocab_size: int) -> int:
    """Return the highest special id that no conversation uses, or else the highest such id of any kind."""
    used = set(np.unique(np.concatenate([c.token_ids for c in dataset.conversations])).tolist())
    for candidates in (special_ids, range(vocab_size)):
        free = [token_id for token_id in candidates if token_id not in used and token_id < vocab_size]
        if free:
            return max(free)
    raise ConfigError(f"the data uses all {vocab_size} token ids, so none is free as mask; set mask_token_id")


def choose_draft_ids(counts: np.ndarray, num_ids: int) -> Tensor:
    """Return the `num_ids` ids [Vd] that `counts` [V] has most often, ascending; among equals the lower ones."""
    order = np.argsort(-counts, kind="stable")[:num_ids]
    return torch.from_numpy(np.sort(order).astype(np.int64))


def initialise_drafter(
    config: DrafterConfig,
    target: Decoder,
    folder: Path,
    *,
    draft_ids: Tensor | None,  # [Vd] ascending, for a pruned vocabulary
    init_from_target: bool,
    seed: int,
) -> DrafterModule:
    """Return a drafter with the target's embedding, head and final norm, and new weights for the rest.

    With `init_from_target` the draft layers begin as copies of the target's last ones in `folder`, and read the highest
    tap as the first of those read their input. At first there is no Markov bias (W2 is zero) and the confidence is
    undecided (0.5). The same seed gives the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in drafter_shapes(config).items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = torch.ones(shape)
        elif name == "markov_head.markov_w2.weight" or name.startswith("confidence_head") or name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * _STD
    tensors |= _vocabulary_tables(target, draft_ids)
    if init_from_target:
        tensors |= _target_layers(config, target.config, folder)
    return DrafterModule.from_tensors(config, {name: t.to(target.device) for name, t in tensors.items()})


def initialise_autoregressive(
    config: DrafterConfig,
    target: Decoder,
    folder: Path,
    *,
    draft_ids: Tensor | None,
    init_from_target: bool,
    seed: int,
) -> AutoregressiveModule:
    """Return a baseline with the target's embedding, head and final norm; arguments as for `initialise_drafter`.

    With `init_from_target` its layer begins as the target's last one, reading features; the weights that read
    embeddings are new.
    """
    generator = torch.Generator().manual_seed(seed)
    module = AutoregressiveModule(config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        is_norm = name.endswith("norm.weight")
        tensors[name] = torch.ones(tensor.shape) if is_norm else torch.randn(tensor.shape, generator=generator) * _STD
    tensors |= _vocabulary_tables(target, draft_ids)
    if init_from_target:
        copies = _target_layers(config, target.config, folder)
        for name, tensor in copies.items():
            own_name = name.removeprefix("layers.0.").removeprefix("self_attn.")
            if own_name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
                tensors[own_name][:, config.hidden_size :] = tensor
            elif own_name in tensors:
                tensors[own_name] = tensor
    module.load_state_dict(tensors)
    return module.to(target.device)


def _vocabulary_tables(target: Decoder, draft_ids: Tensor | None) -> dict[str, Tensor]:
    """Return the target's embedding and head by stored name, the head's rows of `draft_ids` with their map."""
    tables, head = {EMBEDDING: target.embedding.float().cpu()}, target.head_weight().float().cpu()
    if draft_ids is None:
        return tables | {HEAD: head}
    return tables | {HEAD: head[draft_ids], DRAFT_TO_TARGET: draft_ids - torch.arange(len(draft_ids))}


def _target_layers(config: DrafterConfig, target: DecoderConfig, folder: Path) -> dict[str, Tensor]:
    if target.has_sandwich_norms or target.activation != "silu" or config.num_layers > target.num_layers:
        raise ConfigError(
            f"{config.num_layers} draft layers cannot begin as layers of this target ({target.architecture}, "
            f"{target.num_layers} layers, {target.activation}); set init_from_target to false"
        )
    stored = CheckpointTensors(folder, canonical_name=lambda name: name)
    parts = [*_LAYER_PARTS, *(("self_attn.q_norm", "self_attn.k_norm") if target.has_qk_norm else ())]
    first = target.num_layers - config.num_layers
    names = {
        f"layers.{index}.{part}.weight": f"model.layers.{first + index}.{part}.weight"
        for index in range(config.num_layers)
        for part in parts
    }
    copies = {name: stored.read(source).float().clone() for name, source in names.items()}
    projection = torch.zeros(config.hidden_size, len(config.tap_ids), config.target_hidden_size)
    projection[:, config.tap_ids.index(max(config.tap_ids))] = torch.eye(config.hidden_size)
    return copies | {
        "norm.weight": stored.read("model.norm.weight").float().clone(),
        "fc.weight": projection.flatten(1),
        "hidden_norm.weight": copies["layers.0.input_layernorm.weight"].clone(),
    }


def _rope_parameters(folder: Path) -> dict[str, object]:
    """Return the target's rotary settings; a family with several kinds of layers gives those of full attention."""
    from transformers import AutoConfig  # takes a second to import

    parameters = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().rope_parameters
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    assert "rope_type" in parameters, (parameters, read_json_object(folder / "config.json"))
    return dict(parameters)
