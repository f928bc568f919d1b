"""What training and offline evaluation start from: the frozen target with its text side, and the place they run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dspark.models.decoder import Decoder
from dspark.models.device import open_device
from dspark.models.model_source import resolve_model
from dspark.models.tokenizer import Tokenizer, load_generation_defaults, load_tokenizer
from dspark.models.weights import load_decoder
from dspark.training.dataset import Dataset, load_dataset
from dspark.training.loss import TargetLogits


@dataclass(frozen=True, kw_only=True)
class Target:
    """The frozen target: float32 on the CPU, bfloat16 elsewhere, as it is served by default."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]

    @torch.no_grad()
    def logits(self, final_hidden: Tensor) -> Tensor:
        """Return float32 logits [U, V] of final hidden states [U, D] of any float type."""
        return self.decoder.compute_logits(final_hidden.to(self.decoder.dtype))

    def logits_of(self, token_ids: Tensor) -> TargetLogits:
        """Return a function like `logits` that gives the columns of `token_ids` [I] only."""
        decoder = self.decoder
        head_rows = decoder.head_weight()[token_ids.to(decoder.device)]

        @torch.no_grad()
        def logits(final_hidden: Tensor) -> Tensor:
            return decoder.compute_logits_of(final_hidden.to(decoder.dtype), head_rows)

        return logits

    def load_dataset(self, paths: Sequence[str], *, max_length: int, hold_out_fraction: float) -> Dataset:
        """Read conversations for this target (`dataset.load_dataset`)."""
        return load_dataset(
            [Path(path) for path in paths],
            self.tokenizer,
            vocab_size=self.decoder.config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_length=min(max_length, self.decoder.config.max_position),
            hold_out_fraction=hold_out_fraction,
        )


def load_target(name: str, device: torch.device) -> Target:
    """Load the target `name` as `dspark serve --model` does. Raises `CheckpointError`."""
    folder = resolve_model(name).path
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Target(
        folder=folder,
        decoder=load_decoder(folder, dtype=dtype, device=device),
        tokenizer=load_tokenizer(folder),
        eos_token_ids=load_generation_defaults(folder).eos_token_ids,
    )


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes of one run: one, or those that torchrun started."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True in the process that writes files and speaks."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all processes."""
        if self.count > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()


def join_workers(device: str) -> Workers:
    """Join the processes that torchrun started, if it did; on GPUs each takes its own. Raises `ConfigError`."""
    # torchrun tells its processes their place this way and no other.
    rank, count = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = device
    if device == "cuda" and count > 1:
        place = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch_device = open_device(place)
    if count > 1:
        if torch_device.type == "cuda":
            torch.cuda.set_device(torch_device)
        dist.init_process_group("nccl" if torch_device.type == "cuda" else "gloo")
    return Workers(rank=rank, count=count, device=torch_device)
