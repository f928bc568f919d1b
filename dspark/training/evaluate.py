"""Offline simulated acceptance of a drafter on the target's own texts, and the quality of its confidence.

S supervised slots, K proposals of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.device import open_device
from dspark.models.drafter_calibration import load_temperatures
from dspark.models.drafter_config import check_target
from dspark.speculation.calibration import NUM_BINS, ReliabilityBin, calibration_error, reliability_bins
from dspark.speculation.round_counts import RoundCounts
from dspark.training.block_pass import run_blocks
from dspark.training.blocks import build_blocks, draw_anchors
from dspark.training.checkpoint import TrainedModule, load_module
from dspark.training.dataset import Conversation, Dataset
from dspark.training.features import FeatureSource, OnlineFeatures, check_delivered
from dspark.training.loss import DrafterLoss, LossWeights, TargetLogits
from dspark.training.setup import load_target
from dspark.training.simulated_rounds import GREEDY, SAMPLED, simulate_rounds

_EVALUATION_EPOCH = 2**31  # keys anchors that no epoch of training draws


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Acceptance along the target's own texts, each slot given the text before it.

    At temperature 1 a slot's acceptance is exact, 1 - l1 / 2; the accepted length multiplies them along the text. At
    temperature 0 a slot is accepted when both argmaxes agree. Lengths count blocks with all slots supervised and
    include the bonus token. Anchors are random here: good for comparing drafters, but what serving counts is `rounds`.
    """

    num_conversations: int
    num_blocks: int
    num_full_blocks: int
    num_slots: tuple[int, ...]  # [K]
    accepted_length: float | None  # temperature 1; None without a full block
    greedy_accepted_length: float | None
    acceptance: tuple[float | None, ...]  # [K] conditional, temperature 1; None without a slot
    greedy_acceptance: tuple[float | None, ...]  # [K]
    confidence_ece: float | None  # None without a confidence head
    confidence_auc: float | None
    is_calibrated: bool = False  # the confidences are those that serving uses, by the temperatures beside the drafter
    reliability: tuple[ReliabilityBin, ...] = ()  # bins that hold a slot
    rounds: Mapping[str, RoundCounts] | None = None  # by temperature, "0" and "1"; None: not simulated
    num_unanswered: int = 0  # records of the file left out, for they have no answer
    num_cut: int = 0  # conversations of the file that were too long

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        rounds = None if self.rounds is None else {key: counts.to_json() for key, counts in self.rounds.items()}
        return values | {"rounds": rounds}


def evaluate_drafter(
    module: TrainedModule,
    conversations: Sequence[Conversation],
    features: FeatureSource,
    target_logits: TargetLogits,
    *,
    num_anchors: int = 64,
    seed: int = 0,
    pack_tokens: int = 512,
    chunk_slots: int = 256,
    temperatures: Sequence[float] | None = None,  # [K] of the confidences (`load_temperatures`); None: not calibrated
) -> Evaluation:
    """Measure `module` on blocks at `num_anchors` random anchors of each conversation."""
    config = module.config
    device = module.lm_head.weight.device
    loss = DrafterLoss(module, target_logits, LossWeights(), chunk_slots=chunk_slots)
    scales = torch.tensor(temperatures or [1.0] * config.num_draft_tokens, dtype=torch.float64, device=device)
    num_blocks = 0
    parts: dict[str, list[Tensor]] = {
        name: [] for name in ("proposals", "acceptance", "matches", "confidence", "length", "greedy_length")
    }
    for pack in packs_of(conversations, pack_tokens):
        anchors = [draw_anchors(c, config, num_anchors=num_anchors, seed=seed, epoch=_EVALUATION_EPOCH) for c in pack]
        delivered = features(pack)
        check_delivered(delivered, needs_target_probs=True)
        batch = build_blocks(pack, delivered, anchors, config, device=device)
        with torch.no_grad():
            _, chosen, acceptance, matches = loss.measure(run_blocks(module, batch), batch)
        num_blocks += batch.num_blocks
        parts["proposals"].append(chosen.proposals)
        parts["acceptance"].append(acceptance.double())
        parts["matches"].append(matches.double())
        if chosen.confidence_logits is not None:
            parts["confidence"].append((chosen.confidence_logits.double() / scales[chosen.proposals]).sigmoid())
        is_full = batch.is_supervised[:, config.first_proposal_slot :].all(1)
        for name, values in (("length", acceptance), ("greedy_length", matches)):
            grid = torch.zeros((batch.num_blocks, config.num_draft_tokens), dtype=torch.float64, device=device)
            grid[chosen.blocks, chosen.proposals] = values.double()
            parts[name].append(1 + grid[is_full].cumprod(1).sum(1))
    joined = {name: torch.cat(values).cpu().numpy() for name, values in parts.items() if values}
    measured = _evaluation(joined, len(conversations), num_blocks, config.num_draft_tokens)
    return replace(measured, is_calibrated=temperatures is not None)


def evaluate(
    folder: Path,
    data: Sequence[str],
    *,
    target: str,
    held_out_only: float | None = None,  # the hold_out_fraction of the training run; None: all conversations
    num_sequences: int | None = None,  # of each file; None: all
    num_anchors: int = 64,
    num_round_texts: int = 32,
    max_length: int = 2048,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Evaluation]:
    """Measure the drafter in `folder` on each file of conversations by itself; return the results by file.

    Serving is simulated along the first `num_round_texts` conversations of each temperature, at all their anchors.
    Confidences are calibrated as in serving where an `sts.json` lies beside the drafter. Raises `CheckpointError` for a
    drafter of another target, `ConfigError` for wrong data.
    """
    if seed < 0:
        raise ConfigError(f"seed ({seed}) must not be negative; raise it")
    loaded = load_target(target, open_device(device))
    module = load_module(folder, loaded.decoder)
    check_target(module.config, loaded.decoder.config, tokenizer_size=loaded.tokenizer.vocab_size)
    temperatures = None
    if module.config.has_confidence_head:
        temperatures = load_temperatures(folder, num_draft_tokens=module.config.num_draft_tokens)
    features = OnlineFeatures(loaded.decoder, module.config.tap_ids, chunk_tokens=512)
    results = {}
    for path in data:
        dataset = loaded.load_dataset([path], max_length=max_length, hold_out_fraction=held_out_only or 0.0)
        conversations = chosen_conversations(dataset, path, held_out_only)[:num_sequences]
        measured = evaluate_drafter(
            module, conversations, features, loaded.logits,
            num_anchors=num_anchors, seed=seed, temperatures=temperatures,
        )  # fmt: skip
        rounds = simulate_rounds(
            module, conversations, features, loaded.logits,
            num_texts=num_round_texts, eos_token_ids=loaded.eos_token_ids,
        )  # fmt: skip
        results[path] = replace(measured, rounds=rounds, num_unanswered=dataset.num_unanswered, num_cut=dataset.num_cut)
    return results


def chosen_conversations(dataset: Dataset, path: str, held_out_only: float | None) -> list[Conversation]:
    """Return all conversations of a file, or those that a training run with this hold_out_fraction held out.

    Raises `ConfigError` where there are none.
    """
    conversations = list(dataset.conversations) if held_out_only is None else dataset.held_out
    if not conversations:
        raise ConfigError(
            f"{path} has no held-out conversation at a fraction of {held_out_only}; use more data or measure all"
        )
    return conversations


def to_json(results: Mapping[str, Evaluation]) -> dict[str, Any]:
    """Return the results by file, simulated rounds by temperature as served ones are given, and the reliability."""
    temperatures = {}
    for temperature in (GREEDY, SAMPLED):
        counts = {name: one.rounds[temperature] for name, one in results.items() if one.rounds is not None}
        total = reduce(RoundCounts.plus, counts.values(), RoundCounts())
        if total.num_rounds:
            tasks = {name: own.to_json() for name, own in counts.items()}
            temperatures[temperature] = {"tasks": tasks, "all": total.to_json()}
    return {
        "temperatures": temperatures,
        "reliability": [asdict(one) for one in _joined_bins([b for r in results.values() for b in r.reliability])],
        "files": {name: result.to_json() for name, result in results.items()},
    }


def print_evaluations(results: Mapping[str, Evaluation], console: Console) -> None:
    """Print a table of results by file."""
    table = Table(title="offline acceptance, bonus token included; served: simulated rounds along the texts")
    is_calibrated = any(result.is_calibrated for result in results.values())
    for column in (
        "data", "served T=0", "served T=1", "blocks", "length T=1", "length T=0", "acceptance T=1", "acceptance T=0",
        "ECE calibrated" if is_calibrated else "ECE raw", "AUC",
    ):  # fmt: skip
        table.add_column(column)
    for name, result in results.items():
        rounds = result.rounds or {}
        table.add_row(
            name,
            *(_number(rounds[t].accepted_length if t in rounds else None) for t in (GREEDY, SAMPLED)),
            str(result.num_blocks),
            _number(result.accepted_length),
            _number(result.greedy_accepted_length),
            " ".join(_number(value) for value in result.acceptance),
            " ".join(_number(value) for value in result.greedy_acceptance),
            _number(result.confidence_ece, 3),
            _number(result.confidence_auc, 3),
        )
    console.print(table)
    for name, result in results.items():
        if result.num_unanswered or result.num_cut:
            console.print(
                f"{name}: {result.num_unanswered} records without an answer left out, {result.num_cut} cut",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def packs_of(conversations: Sequence[Conversation], pack_tokens: int) -> Iterator[list[Conversation]]:
    """Yield runs of conversations of at most `pack_tokens` tokens together; a longer one comes alone."""
    pack: list[Conversation] = []
    for conversation in conversations:
        if pack and sum(c.num_tokens for c in pack) + conversation.num_tokens > pack_tokens:
            yield pack
            pack = []
        pack.append(conversation)
    if pack:
        yield pack


def expected_auc(confidence: np.ndarray, acceptance: np.ndarray) -> float | None:
    """Return the chance that an accepted slot has the higher confidence than a rejected one; ties count half.

    Each slot is accepted with its own probability `acceptance` [S], so this is the exact expectation over outcomes,
    without drawing any. None when nothing is ever accepted, or nothing rejected.
    """
    _, inverse = np.unique(confidence, return_inverse=True)
    accepted = np.bincount(inverse, weights=acceptance)
    rejected = np.bincount(inverse, weights=1 - acceptance)
    pairs = accepted.sum() * rejected.sum()
    if pairs <= 0:
        return None
    below = np.cumsum(rejected) - rejected
    return float((accepted * (below + 0.5 * rejected)).sum() / pairs)


def _evaluation(
    joined: dict[str, np.ndarray], num_conversations: int, num_blocks: int, num_proposals: int
) -> Evaluation:
    of_proposal = [joined["proposals"] == k for k in range(num_proposals)]

    def mean(values: np.ndarray) -> float | None:
        return float(values.mean()) if len(values) else None

    confidence = joined.get("confidence")
    acceptance = joined["acceptance"].clip(0, 1)
    bins = () if confidence is None else reliability_bins(confidence, acceptance)
    return Evaluation(
        num_conversations=num_conversations,
        num_blocks=num_blocks,
        num_full_blocks=len(joined["length"]),
        num_slots=tuple(int(own.sum()) for own in of_proposal),
        accepted_length=mean(joined["length"]),
        greedy_accepted_length=mean(joined["greedy_length"]),
        acceptance=tuple(mean(acceptance[own]) for own in of_proposal),
        greedy_acceptance=tuple(mean(joined["matches"][own]) for own in of_proposal),
        confidence_ece=calibration_error(confidence, acceptance) if confidence is not None and bins else None,
        confidence_auc=None if confidence is None else expected_auc(confidence, acceptance),
        reliability=bins,
    )


def _joined_bins(bins: Sequence[ReliabilityBin]) -> list[ReliabilityBin]:
    """Return the bins of several files as those of all their slots."""
    if not bins:
        return []
    weights = np.array([one.num_slots for one in bins], dtype=np.float64)
    index = np.minimum([int(one.confidence * NUM_BINS) for one in bins], NUM_BINS - 1)
    num_slots = np.bincount(index, weights=weights)
    confidence = np.bincount(index, weights=weights * [one.confidence for one in bins])
    acceptance = np.bincount(index, weights=weights * [one.acceptance for one in bins])
    return [
        ReliabilityBin(confidence=float(c / n), acceptance=float(a / n), num_slots=int(n))
        for c, a, n in zip(confidence, acceptance, num_slots, strict=True)
        if n
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
