"""The calibration of a drafter: rounds along held-out texts, what is fitted to them, and the files it goes into."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark.durable_file import write_durably
from dspark.errors import CheckpointError, ConfigError
from dspark.models.device import open_device
from dspark.models.drafter_calibration import CALIBRATION, ConfidenceHead, load_confidence_head, replace_confidence_head
from dspark.models.drafter_config import check_target
from dspark.models.drafter_module import DrafterModule
from dspark.speculation.calibration import TEMPERATURES, Calibration, calibrate
from dspark.training.checkpoint import load_module, load_record
from dspark.training.evaluate import chosen_conversations
from dspark.training.features import OnlineFeatures
from dspark.training.judged_rounds import Rounds, collect_rounds
from dspark.training.refit_head import HeadRefit
from dspark.training.setup import load_target
from dspark.training.simulated_rounds import GREEDY, SAMPLED

FEW_ROUNDS = 1000  # a calibration of fewer follows their chance
_KINDS = {0.0: GREEDY, 1.0: SAMPLED}


@dataclass(frozen=True, kw_only=True)
class FittedCalibration:
    """What `calibrate_drafter` found; `store` makes it the drafter's."""

    calibration: Calibration
    head: ConfidenceHead | None  # the refitted one
    head_record: Mapping[str, float | None]  # how it was refitted; empty: it was not

    def store(self, folder: Path, output: Path, made_by: Mapping[str, Any]) -> None:
        """Write the calibration file `output`, and a refitted head into the drafter in `folder` before.

        Raises `CheckpointError` when the disk does not take it. Temperatures belong to the head they were fitted for:
        an interruption leaves the new head without any, never with those of the old one.
        """
        content = self.calibration.to_json() | ({"refitted_head": dict(self.head_record)} if self.head_record else {})
        if self.head is not None:
            _remove(folder / CALIBRATION)
            replace_confidence_head(folder, self.head)
        write_calibration(output, content | dict(made_by))


def calibrate_drafter(
    folder: Path,
    data: Sequence[str],
    *,
    target: str,
    held_out_only: float | None = None,  # the hold_out_fraction of the training run; None: all conversations
    temperatures: Sequence[float] = (0.0, 1.0),  # of the texts to use
    num_sequences: int | None = None,  # of each file; None: all
    max_length: int = 2048,
    refit_head: bool = False,  # fit the confidence head anew before the temperatures
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FittedCalibration:
    """Fit the drafter in `folder` to rounds along the conversations in `data`; it should not have been trained on them.

    Nothing is written. Raises `CheckpointError` for a drafter without a confidence head or of another target,
    `ConfigError` for wrong data.
    """
    kinds = _kinds_of(temperatures)
    if seed < 0:
        raise ConfigError(f"seed ({seed}) must not be negative; raise it")
    _check_held_out(folder, held_out_only)
    loaded = load_target(target, open_device(device))
    module = load_module(folder, loaded.decoder)
    if not isinstance(module, DrafterModule) or not module.config.has_confidence_head:
        raise CheckpointError(
            f"the drafter in {folder} has no confidence head, so there is nothing to calibrate; train one with it"
        )
    check_target(module.config, loaded.decoder.config, tokenizer_size=loaded.tokenizer.vocab_size)
    conversations = []
    for path in data:
        dataset = loaded.load_dataset([path], max_length=max_length, hold_out_fraction=held_out_only or 0.0)
        conversations += chosen_conversations(dataset, path, held_out_only)[:num_sequences]
    features = OnlineFeatures(loaded.decoder, module.config.tap_ids, chunk_tokens=512)
    rounds = collect_rounds(
        module, conversations, features, loaded.logits,
        kinds=kinds, seed=seed, keeps_inputs=refit_head, progress=progress,
    )  # fmt: skip
    if not len(rounds.acceptance):
        raise ConfigError(
            f"no text of temperature {' or '.join(kinds)} among {len(conversations)} conversations has an answer "
            f"longer than {module.config.num_draft_tokens} tokens, which a round takes; use other --temperatures, or "
            "more and longer texts of the target"
        )
    return fit_rounds(rounds, load_confidence_head(folder))


def fit_rounds(rounds: Rounds, head: ConfidenceHead) -> FittedCalibration:
    """Fit temperatures to `rounds`; before them the `head` that stated their confidences, if they hold its inputs."""
    judged = (rounds.confidence_logits, rounds.acceptance)
    if rounds.head_inputs is None:
        return FittedCalibration(calibration=calibrate(*judged, rounds.text_ids), head=None, head_record={})
    refit = HeadRefit(
        confidence_logits=rounds.confidence_logits,
        inputs=rounds.head_inputs,
        acceptance=rounds.acceptance,
        num_accepted=rounds.num_accepted,
        text_ids=rounds.text_ids,
    )
    calibration = calibrate(*judged, rounds.text_ids, refit=refit)
    change = refit.change(np.ones(len(rounds.acceptance), dtype=bool))
    return FittedCalibration(calibration=calibration, head=change.head(head), head_record=change.to_json())


def write_calibration(path: Path, content: Mapping[str, Any]) -> None:
    """Write or replace a calibration file: complete or not at all. Raises `CheckpointError` when it cannot be."""
    try:
        write_durably(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; free space or name another --output") from error


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Print temperatures and calibration errors by position, and what is doubtful about them."""
    table = Table(title=f"calibration of the survival c_1 .. c_k on {calibration.num_rounds} rounds")
    errors = {
        "ECE before": calibration.ece_before,
        "refitted head": calibration.ece_refitted,
        "ECE after": calibration.ece_after,
        "cross-validated": calibration.ece_cross_validated,
    }
    if calibration.ece_refitted is None:
        del errors["refitted head"]
    for column in ("position", "temperature", *errors):
        table.add_column(column, justify="right")
    for k, temperature in enumerate(calibration.temperatures):
        cells = ("-" if values is None else f"{values[k]:.3f}" for values in errors.values())
        table.add_row(str(k + 1), f"{temperature:.2f}", *cells)
    console.print(table)
    if calibration.num_rounds < FEW_ROUNDS:
        console.print(f"{calibration.num_rounds} rounds are few: use at least {FEW_ROUNDS} for temperatures to trust")
    if {TEMPERATURES[0], TEMPERATURES[-1]} & set(calibration.temperatures):
        console.print(f"a temperature is at the end of the grid ({TEMPERATURES[0]} .. {TEMPERATURES[-1]})")


def _check_held_out(folder: Path, held_out_only: float | None) -> None:
    """Refuse a fraction that takes in what the drafter was trained on, where its run is recorded beside it."""
    if held_out_only is None or not (folder / "training.json").is_file():
        return
    trained = load_record(folder)["settings"].get("hold_out_fraction")
    if isinstance(trained, int | float) and held_out_only > trained:
        raise ConfigError(
            f"--held-out ({held_out_only:g}) is more than the training run of {folder} held out ({trained:g}), so it "
            f"would take in texts that the drafter was trained on; use {trained:g}, or files it was not trained on"
        )


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be replaced: {error}; copy the drafter to a folder of yours") from error


def _kinds_of(temperatures: Sequence[float]) -> list[str]:
    kinds = [_KINDS[t] for t in temperatures if t in _KINDS]
    if len(kinds) < max(len(temperatures), 1):
        raise ConfigError(
            f"temperatures ({', '.join(f'{t:g}' for t in temperatures)}) must be 0, 1 or both, at which rounds can be "
            "simulated; leave the others out"
        )
    return kinds
