"""Writes a drafter for other engines: complete files of either layout, and the commands that serve them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dspark.config import DEFAULT_MODEL
from dspark.durable_file import write_durably
from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.drafter import fit_vocabulary
from dspark.models.drafter_calibration import CALIBRATION, load_temperatures
from dspark.models.drafter_checkpoint import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    DrafterCheckpoint,
    draft_target_ids,
    load_drafter_checkpoint,
    save_drafter,
)
from dspark.models.drafter_config import DrafterConfig, check_target
from dspark.models.drafter_formats import DEEPSPEC, SPECULATORS, config_json
from dspark.models.model_config import decoder_config_from
from dspark.models.model_source import resolve_model
from dspark.models.tokenizer import load_tokenizer
from dspark.models.weights import CheckpointTensors, load_decoder

KEEP = "keep"
EXPORT_DTYPES = (KEEP, "float32", "bfloat16", "float16")
_W2 = "markov_head.markov_w2.weight"
_SAME_TABLE = 0.01  # of the largest weight: two roundings of one table differ by less


@dataclass(frozen=True, kw_only=True)
class Export:
    """A drafter as it was written, and what people should know of it."""

    folder: Path
    layout: str
    config: DrafterConfig
    target: str  # what the other engine is to serve: a folder or a hub id
    num_added_ids: int  # proposals that --expand-vocabulary made possible
    has_calibration: bool

    @property
    def vllm_command(self) -> str:
        """The command that serves the target with this drafter in vLLM."""
        settings = {
            "method": "dspark",
            "model": str(self.folder),
            "num_speculative_tokens": self.config.num_draft_tokens,
            "draft_sample_method": "probabilistic",
        }
        if self.config.has_confidence_head:
            settings["enable_adaptive_verification"] = True
        return shlex.join(["vllm", "serve", self.target, "--speculative-config", json.dumps(settings)])

    @property
    def sglang_command(self) -> str:
        """The command that serves the target with this drafter in SGLang."""
        command = ["python", "-m", "sglang.launch_server", "--model-path", self.target]
        command += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(self.folder)]
        if self.has_calibration:
            command += ["--speculative-dspark-confidence-sts-path", str(self.folder / CALIBRATION)]
        return shlex.join(command)

    @property
    def note(self) -> str | None:
        """What differs from the drafter that was read; None when it drafts the same."""
        if not self.num_added_ids:
            return None
        return (
            f"the vocabulary was expanded by {self.num_added_ids} ids that the drafter was not trained to propose: the "
            "target's head rows speak for them, the sequential head says nothing. Drafts can differ from those of the "
            "pruned drafter, and may be accepted less often; the text that is served cannot"
        )


def export_drafter(
    drafter: str,
    output: Path,
    *,
    layout: str,  # to write: "deepspec" or "speculators"
    target: str | None = None,  # as for `serve --model`; None: the one that the drafter's files name
    dtype: str = KEEP,  # of the stored weights: "keep", "float32", "bfloat16" or "float16"
    expand_vocabulary: bool = False,
    without_head: bool = False,  # leave a pruned head to the target, as other engines cannot
    source_layout: str = "auto",  # to read
) -> Export:
    """Write `drafter` (a folder or hub id) to the new folder `output` in `layout`, with all that the layout stores.

    The target's weights are loaded only where the files take something from them. Raises `ConfigError` for what the
    layout cannot express, `CheckpointError` for files that are damaged or do not fit.
    """
    source = resolve_model(drafter).path
    torch_dtype = _stored_dtype(source) if dtype == KEEP else _torch_dtype(dtype)
    checkpoint = load_drafter_checkpoint(source, dtype=torch_dtype, device=torch.device("cpu"), layout=source_layout)
    config = checkpoint.config
    _check_wanted(config, layout, expand_vocabulary, without_head)
    calibration = _calibration(source, config)
    target_name = target or config.target_name
    if target_name is None:
        raise ConfigError(f"{drafter} does not say which model it was made for; name that model (--target)")
    left_out = _left_out(config, layout, without_head=without_head)
    needs_target = (
        expand_vocabulary
        or _lacks_something(checkpoint, layout)
        or any(name in checkpoint.tensors for name in left_out)
    )
    # Other engines know our names and GGUF files not, so a target of this machine is named by its folder.
    is_local = target_name == DEFAULT_MODEL or Path(target_name).expanduser().exists()
    served = target_name
    if needs_target or is_local or target is not None:
        folder = resolve_model(target_name).path
        served = str(folder.resolve()) if is_local else target_name
        decoder_config = decoder_config_from(folder)
        check_target(config, decoder_config, tokenizer_size=_num_token_ids(folder))
        checkpoint = replace(checkpoint, config=replace(config, target_architecture=decoder_config.architecture))
        if needs_target:
            decoder = load_decoder(folder, dtype=torch_dtype, device=torch.device("cpu"))
            checkpoint = _completed(checkpoint, decoder, expand_vocabulary=expand_vocabulary)
            _check_left_out(checkpoint, decoder, left_out)
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, target_name=target_name))
    _check_finite(checkpoint, dtype)
    save_drafter(output, checkpoint.config, checkpoint.tensors, layout=layout, without_head=without_head)
    if calibration is not None:
        _write(output / CALIBRATION, calibration)
    return Export(
        folder=output.resolve(),
        layout=layout,
        config=checkpoint.config,
        target=served,
        num_added_ids=checkpoint.config.draft_vocab_size - config.draft_vocab_size if expand_vocabulary else 0,
        has_calibration=calibration is not None,
    )


def expanded(checkpoint: DrafterCheckpoint, target_head: Tensor) -> DrafterCheckpoint:
    """Return a drafter that can propose all V ids from one of a pruned vocabulary; `target_head` is [V, D].

    Ids that were pruned get the target's rows of the head and no sequential bias (zero rows of W2), for which nothing
    was trained: they compete with what the draft layers alone say for them.
    """
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    ids = draft_target_ids(config, tensors)
    assert ids is not None, config
    head = target_head.to(tensors[HEAD].dtype, copy=True)
    head[ids] = tensors[HEAD]
    tensors[HEAD] = head
    if _W2 in tensors:
        bias = tensors[_W2].new_zeros(config.vocab_size, config.markov_rank)
        bias[ids] = tensors[_W2]
        tensors[_W2] = bias
    del tensors[DRAFT_TO_TARGET]
    return DrafterCheckpoint(config=replace(config, draft_vocab_size=config.vocab_size), tensors=tensors)


def _check_wanted(config: DrafterConfig, layout: str, expand_vocabulary: bool, without_head: bool) -> None:
    """Raise `ConfigError` for what `layout` cannot express, before anything large is read."""
    size = f"{config.draft_vocab_size} of {config.vocab_size} ids"
    if without_head and (layout == DEEPSPEC or expand_vocabulary or not config.has_pruned_vocab):
        raise ConfigError(
            f"--without-head leaves out the head of a pruned vocabulary (here {size}) in the {SPECULATORS} layout; "
            "that of a whole one is left to the target anyway, and DeepSpec files need theirs: leave the flag out"
        )
    if expand_vocabulary and not config.has_pruned_vocab:
        raise ConfigError(f"the drafter's vocabulary is not pruned ({size}); leave out --expand-vocabulary")
    if layout == DEEPSPEC and config.has_pruned_vocab and not expand_vocabulary:
        raise ConfigError(
            f"the {DEEPSPEC} layout cannot express a pruned vocabulary ({size}); add --expand-vocabulary, which gives "
            f"the other ids the target's rows of the head, or export in the {SPECULATORS} layout"
        )
    as_written = replace(
        config,
        draft_vocab_size=config.vocab_size if expand_vocabulary else config.draft_vocab_size,
        num_target_layers=config.num_target_layers or 1,  # the target will tell
    )
    config_json(as_written, layout, dtype="float32")


def _lacks_something(checkpoint: DrafterCheckpoint, layout: str) -> bool:
    config, tensors = checkpoint.config, checkpoint.tensors
    if layout == DEEPSPEC:
        return EMBEDDING not in tensors or HEAD not in tensors or config.num_target_layers is None
    return config.has_pruned_vocab and HEAD not in tensors


def _left_out(config: DrafterConfig, layout: str, *, without_head: bool) -> list[str]:
    """Return which tables the files of `layout` leave to the target."""
    if layout == DEEPSPEC:
        return []
    return [EMBEDDING] if config.has_pruned_vocab and not without_head else [EMBEDDING, HEAD]


def _check_left_out(checkpoint: DrafterCheckpoint, target: Decoder, names: Sequence[str]) -> None:
    """Raise `ConfigError` for a table of `names` that the files leave to the target, and that is not the target's."""
    head, ids = target.head_weight(), draft_target_ids(checkpoint.config, checkpoint.tensors)
    tables = {EMBEDDING: target.embedding, HEAD: head if ids is None else head[ids]}
    for name in names:
        own = checkpoint.tensors[name]
        others = tables[name][: own.shape[0]]
        if own.shape != others.shape or float((own - others).abs().max()) > _SAME_TABLE * float(own.abs().max()):
            raise ConfigError(
                f"{name} of the drafter is not the target's, from which it would be taken; export in the {DEEPSPEC} "
                "layout or with its head, or use the target that it was trained for"
            )


def _completed(checkpoint: DrafterCheckpoint, target: Decoder, *, expand_vocabulary: bool) -> DrafterCheckpoint:
    if expand_vocabulary and checkpoint.config.hidden_size != target.config.hidden_size:
        raise ConfigError(
            f"the drafter's hidden size ({checkpoint.config.hidden_size}) is not the target's "
            f"({target.config.hidden_size}), whose head has no rows for it; leave out --expand-vocabulary"
        )
    # Tables of one vocabulary are padded differently: rows that only one side has stand for no token.
    vocab_size = min(checkpoint.config.vocab_size, target.config.vocab_size)
    checkpoint = fit_vocabulary(checkpoint.completed(target), vocab_size)
    return expanded(checkpoint, target.head_weight()[:vocab_size]) if expand_vocabulary else checkpoint


def _check_finite(checkpoint: DrafterCheckpoint, dtype: str) -> None:
    for name, tensor in checkpoint.tensors.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"tensor {name} holds values that are not finite as {dtype}; use another --dtype, or another drafter"
            )


def _calibration(source: Path, config: DrafterConfig) -> str | None:
    """Return the calibration file beside a drafter, if there is one. Raises `CheckpointError` for another drafter's."""
    if load_temperatures(source, num_draft_tokens=config.num_draft_tokens) is None:
        return None
    return (source / CALIBRATION).read_text(encoding="utf-8")


def _write(path: Path, content: str) -> None:
    try:
        write_durably(path, content)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}; free space, remove {path.parent} and retry"
        ) from error


def _stored_dtype(folder: Path) -> torch.dtype:
    stored = CheckpointTensors(folder, canonical_name=lambda name: name)
    return stored.read("fc.weight").dtype if "fc.weight" in stored.names else torch.float32


def _torch_dtype(name: str) -> torch.dtype:
    if name not in EXPORT_DTYPES:
        raise ConfigError(f"dtype ({name!r}) must be one of {', '.join(EXPORT_DTYPES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _num_token_ids(folder: Path) -> int:
    return max(load_tokenizer(folder).vocabulary().values(), default=-1) + 1
