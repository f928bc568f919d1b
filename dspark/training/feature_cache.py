"""Target features on disk in 16 bits: one flat file of rows, written once, resumed where it was left, read by mapping.

A row is one token: m * D tapped values, then D of the final hidden state. Conversations stand in dataset order. Beside
it may stand the logsumexp of the target's logits, a float32 a row, which spares a pruned vocabulary the full head.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.durable_file import write_durably
from dspark.errors import CheckpointError, ConfigError
from dspark.training.dataset import Conversation
from dspark.training.features import Features, FeatureSource
from dspark.training.identity import check_same
from dspark.training.loss import TargetLogits

FORMAT_VERSION = 1
_ROWS = "features.bin"
_NORMALIZERS = "log_normalizers.bin"
_RECORD = "cache.json"
_GROUP_TOKENS = 4096  # features computed between two records of progress
_GROUP_LOGITS = 256  # rows whose logits over the whole vocabulary exist at the same time


class FeatureCache:
    """The features of a dataset in `folder`; `fill` computes what is missing, calling gives them back in float32."""

    def __init__(
        self,
        folder: Path,
        conversations: Sequence[Conversation],
        *,
        tap_width: int,  # m * D
        hidden_size: int,  # D
        dtype: str,  # "float16" or "bfloat16"
        identity: Mapping[str, str],
    ) -> None:
        """Open or begin a cache. Raises `ConfigError` when the one in `folder` was made from something else."""
        self._folder = folder
        self._conversations = conversations
        self._tap_width = tap_width
        self._width = tap_width + hidden_size
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._offsets = np.concatenate([[0], np.cumsum([c.num_tokens for c in conversations])]).astype(np.int64)
        # The seed orders the training and shapes no feature.
        self._identity: dict[str, object] = {key: value for key, value in identity.items() if key != "seed"}
        self._identity |= {"format version": FORMAT_VERSION, "cache_dtype": dtype, "row width": self._width}
        self._identity |= {"number of tokens": int(self._offsets[-1])}
        self._mapped: np.ndarray | None = None
        self._log_normalizers: np.ndarray | None = None
        record = self._record()
        if record is not None:
            check_same(
                record[0],
                self._identity,
                what=f"the feature cache {folder}",
                advice="name another --cache folder or remove this one",
            )

    @property
    def num_bytes(self) -> int:
        """Size of the full cache."""
        return int(self._offsets[-1]) * self._width * 2 + len(self._record_text(len(self._conversations)))

    @property
    def num_done(self) -> int:
        """Conversations whose features are stored."""
        record = self._record()
        return 0 if record is None else record[1]

    def check_space(self) -> None:
        """Raise `ConfigError` when the disk cannot take what is still missing."""
        folder = self._folder
        while not folder.exists():
            folder = folder.parent
        missing = self.num_bytes - int(self._offsets[self.num_done]) * self._width * 2
        free = shutil.disk_usage(folder).free
        if missing > free:
            raise ConfigError(
                f"the feature cache needs {missing / 1e6:,.0f} MB more and {self._folder} has {free / 1e6:,.0f} MB "
                "free; use another disk, fewer conversations or taps, or train without --cache"
            )

    def fill(self, compute: FeatureSource, *, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compute and store the missing features, `report`ing tokens done and in all.

        Interrupted at any point, the next call goes on where the record of progress stands. Raises `CheckpointError`
        when the disk does not take it.
        """
        done = self.num_done
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not done:
                (self._folder / _NORMALIZERS).unlink(missing_ok=True)  # of rows that are gone
            with (self._folder / _ROWS).open("ab") as file:
                # Rows past the record may be half written.
                file.truncate(int(self._offsets[done]) * self._width * 2)
                while done < len(self._conversations):
                    end = self._group_end(done)
                    for conversation, features in zip(
                        self._conversations[done:end], compute(self._conversations[done:end]), strict=True
                    ):
                        file.write(self._row_bytes(features, conversation))
                    file.flush()
                    os.fsync(file.fileno())
                    done = end
                    self._write_record(done)
                    report(int(self._offsets[done]), int(self._offsets[-1]))
        except OSError as error:
            raise CheckpointError(
                f"the feature cache {self._folder} cannot be written: {error}; free space and run again, it goes on "
                f"after {done} of {len(self._conversations)} conversations"
            ) from error

    def fill_log_normalizers(
        self, target_logits: TargetLogits, *, report: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Compute and store the missing normalizers of the filled cache, from its own rows.

        They depend on the target alone, not on the drafter's vocabulary. Interrupted, the next call goes on. Raises
        `CheckpointError` when the disk does not take it.
        """
        path, num_rows = self._folder / _NORMALIZERS, int(self._offsets[-1])
        try:
            if path.exists() and path.stat().st_size == num_rows * 4:
                return  # complete: other runs may be reading it
            with path.open("ab") as file:
                # Whole groups: which rows share a product must not depend on where a run was interrupted.
                done = min(path.stat().st_size // 4, num_rows) // _GROUP_LOGITS * _GROUP_LOGITS
                file.truncate(done * 4)
                for start in range(done, num_rows, _GROUP_LOGITS):
                    end = min(start + _GROUP_LOGITS, num_rows)
                    logits = target_logits(self._rows(start, end)[:, self._tap_width :])
                    file.write(logits.logsumexp(-1).float().cpu().numpy().tobytes())
                    report(end, num_rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"the feature cache {self._folder} cannot be written: {error}; free space and run again, it goes on"
            ) from error

    def open_log_normalizers(self) -> None:
        """Let the features carry the normalizers that `fill_log_normalizers` stored."""
        self._log_normalizers = np.fromfile(self._folder / _NORMALIZERS, dtype=np.float32)
        num_rows = int(self._offsets[-1])
        assert len(self._log_normalizers) == num_rows, (len(self._log_normalizers), num_rows)

    def __call__(self, conversations: Sequence[Conversation]) -> list[Features]:
        """Return the stored features of `conversations`, float32 on the CPU."""
        features = []
        for conversation in conversations:
            start, end = (int(offset) for offset in self._offsets[conversation.index : conversation.index + 2])
            rows, normalizers = self._rows(start, end), self._log_normalizers
            features.append(
                Features(
                    taps=rows[:, : self._tap_width],
                    final_hidden=rows[:, self._tap_width :],
                    log_normalizers=None if normalizers is None else torch.from_numpy(normalizers[start:end]),
                )
            )
        return features

    def _rows(self, start: int, end: int) -> Tensor:  # [end - start, (m + 1) * D] float32
        if self._mapped is None:
            shape = (int(self._offsets[-1]), self._width)
            self._mapped = np.memmap(self._folder / _ROWS, dtype=np.int16, mode="r", shape=shape)
        return torch.from_numpy(self._mapped[start:end].copy()).view(self._dtype).float()

    def _group_end(self, begin: int) -> int:
        limit = self._offsets[begin] + _GROUP_TOKENS
        return max(begin + 1, int(np.searchsorted(self._offsets, limit, side="right")) - 1)

    def _row_bytes(self, features: Features, conversation: Conversation) -> bytes:
        assert features.final_hidden is not None, "the cache keeps final hidden states too"
        rows: Tensor = torch.cat([features.taps, features.final_hidden], dim=1).to(self._dtype).cpu()
        assert rows.shape == (conversation.num_tokens, self._width), (rows.shape, conversation.num_tokens, self._width)
        if not bool(rows.isfinite().all()):
            raise ConfigError(
                f"target features of conversation {conversation.index} do not fit {self._dtype} "
                f"(largest: {float(features.taps.abs().max()):.3g}); set cache_dtype to bfloat16"
            )
        return rows.view(torch.int16).numpy().tobytes()

    def _record(self) -> tuple[dict[str, object], int] | None:  # identity, conversations done
        path = self._folder / _RECORD
        if not path.exists():
            return None
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            return dict(record["identity"]), int(record["num_done"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; remove the folder {self._folder}") from error

    def _record_text(self, num_done: int) -> str:
        return json.dumps({"identity": self._identity, "num_done": num_done}, indent=2, sort_keys=True) + "\n"

    def _write_record(self, num_done: int) -> None:
        write_durably(self._folder / _RECORD, self._record_text(num_done))
