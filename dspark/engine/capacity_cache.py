"""Where the measured times of an engine come from: a file the user names, the user's cache folder, or measuring.

A file in the cache says what it was made for; one made for anything else is measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark import __version__
from dspark.config import EngineConfig
from dspark.engine.bandwidth import measure_peak_bytes_per_s
from dspark.engine.drafter_choice import DrafterChoice
from dspark.engine.profile_rows import ROW_TOKENS, TOKENS_PER_MORE_ROW, ProfileLimits
from dspark.engine.profiler import Progress, measure_draft_times, measure_times
from dspark.engine.runner import TargetRunner
from dspark.errors import ConfigError
from dspark.models.kernels import dtype_name, instruction_set
from dspark.models.model_source import user_cache_folder
from dspark.speculation.capacity import MeasuredTimes, read_measured_times, write_measured_times
from dspark.speculation.proposal import Proposer

if TYPE_CHECKING:  # building an engine asks for its times
    from dspark.engine.build import LoadedModel

logger = logging.getLogger(__name__)

MADE_FOR = "made_for"  # key of the SPS file
PEAK = "peak_bytes_per_s"  # key of the SPS file: how fast memory is read at best


@dataclass(frozen=True, kw_only=True)
class MachineTimes:
    """What was measured, and the file that holds it; None where there is none, for it could not be written."""

    times: MeasuredTimes
    path: Path | None
    is_new: bool = field(default=False, compare=False)  # target passes of all sizes ran just now


def machine_times(
    model: LoadedModel,
    choice: DrafterChoice,
    config: EngineConfig,
    *,
    runner: TargetRunner,
    proposer: Proposer | None,
    limits: ProfileLimits,
    capacity_file: Path | None = None,
    anew: bool = False,
    cache_dir: Path | None = None,
) -> MachineTimes:
    """Return the times of this engine on this machine, measured with a line of progress where no file has them.

    All pages of the runner must be free. `capacity_file` (an SPS file, of another engine too) is taken as it is; what
    it does not say of drafting passes is measured. `anew` measures whatever is in the cache. Raises `ConfigError` for a
    capacity file that cannot be used; the cache is never a reason to fail.
    """
    device = model.decoder.device
    if capacity_file is not None:
        given = read_measured_times(capacity_file)
        if given.draft is None and proposer is not None and proposer.has_pass:
            with progress_line() as progress:
                draft = measure_draft_times(runner, proposer, limits=limits, progress=progress)
            given = replace(given, draft=draft)
        return MachineTimes(times=given, path=capacity_file)

    def measure() -> MeasuredTimes:
        with progress_line() as progress:
            details = {PEAK: measure_peak_bytes_per_s(device)}
            return measure_times(runner, proposer, limits=limits, details=details, progress=progress)

    return load_or_measure(capacity_key(model, choice, config, limits), measure, anew=anew, cache_dir=cache_dir)


def load_or_measure(
    key: Mapping[str, Any],
    measure: Callable[[], MeasuredTimes],
    *,
    anew: bool = False,
    cache_dir: Path | None = None,
) -> MachineTimes:
    """Return what the cache holds for `key` (JSON values), else what `measure` returns, which the cache then holds.

    A file that cannot be used, and a folder that cannot be written, are warnings. Several processes may start at once:
    each file is whole at any time, and the last one stays.
    """
    path = capacity_path(key, cache_dir)
    if not anew and path.exists():
        cached = _cached_times(path, key)
        if cached is not None:
            return MachineTimes(times=cached, path=path)
    measured = measure()
    measured = replace(measured, details={MADE_FOR: dict(key), **measured.details})
    try:
        write_measured_times(path, measured)
    except ConfigError as error:
        logger.warning("%s; this machine is measured again at each start until then", error)
        return MachineTimes(times=measured, path=None, is_new=True)
    return MachineTimes(times=measured, path=path, is_new=True)


def capacity_key(
    model: LoadedModel, choice: DrafterChoice, config: EngineConfig, limits: ProfileLimits
) -> dict[str, Any]:
    """Return, as JSON values, everything that the times depend on. Not the values of weights: all take as long."""
    decoder = model.decoder
    return {
        **weights_identity(model, choice),
        "row_shapes": [ROW_TOKENS, TOKENS_PER_MORE_ROW],
        "torch": torch.__version__,
        "hardware": device_name(decoder.device),
        "num_threads": torch.get_num_threads(),
        "kernels": instruction_set(),
        "dtype": dtype_name(decoder.dtype),
        "num_draft_tokens": limits.num_draft_tokens if choice.source is not None else None,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_size": limits.max_size,
        "max_model_len": limits.max_model_len,
        "num_touched_pages": limits.num_touched_pages,
        "page_size": config.cache.page_size,
    }


def weights_identity(model: LoadedModel, choice: DrafterChoice) -> dict[str, Any]:
    """Return, as JSON values, which model and drafter these are, by name and configuration, and who runs them."""
    return {
        "dspark": __version__,
        "model": model.folder.name,
        "weight_bytes": model.decoder.num_weight_bytes,
        "model_hash": model.folder.gguf_sha256 or _config_hash(model.folder.path),
        "drafter": choice.source,
        "drafter_hash": None if choice.source is None else _config_hash(Path(choice.source).expanduser()),
    }


def capacity_path(key: Mapping[str, Any], cache_dir: Path | None = None) -> Path:
    """Return the file of measured times for `key` in `cache_dir` (default: the user's cache folder)."""
    return cache_path("capacity", key, cache_dir)


def cache_path(kind: str, key: Mapping[str, Any], cache_dir: Path | None = None) -> Path:
    """Return the file of `key` (JSON values) in the folder `kind` of `cache_dir` (default: the user's cache folder)."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    stem = re.sub(r"[^\w.-]+", "-", str(key.get("model", "model")))[:60]
    return (cache_dir or user_cache_folder()) / kind / f"{stem}-{digest}.json"


def device_name(device: torch.device) -> str:
    """Return what computes, as its maker calls it, and how many cores the process sees of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return str(device)
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"


def cpu_name() -> str:
    """Return what the processor is called."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@contextmanager
def progress_line() -> Iterator[Progress]:
    """Show on a terminal how far measuring is, and say once elsewhere that it goes on; yields what to report to."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    if not sys.stderr.isatty():
        logger.info("measuring this machine, which takes some seconds and is done once")
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring this machine: seconds of a pass by its size", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _cached_times(path: Path, key: Mapping[str, Any]) -> MeasuredTimes | None:
    try:
        measured = read_measured_times(path)
    except ConfigError as error:
        logger.warning("%s: this is done now", error)
        return None
    if measured.details.get(MADE_FOR) != dict(key):
        logger.warning("the capacity file %s was made for something else; this machine is measured again", path)
        return None
    return measured


def _config_hash(folder: Path) -> str | None:
    """Return the hash of a model's configuration, which says how large all of it is; None for what is no folder."""
    try:
        return hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    except OSError:
        return None
