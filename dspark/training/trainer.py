"""The training loop: a step takes a batch of conversations, all processes share it, and any step can be the last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.training.block_pass import run_blocks
from dspark.training.blocks import build_blocks, count_supervised, draw_anchors
from dspark.training.checkpoint import (
    TrainedModule,
    TrainingState,
    load_module,
    load_optimizer_state,
    load_record,
    save_checkpoint,
    step_folders,
)
from dspark.training.config import TrainConfig
from dspark.training.dataset import Conversation, Dataset
from dspark.training.evaluate import evaluate_drafter, packs_of
from dspark.training.feature_cache import FeatureCache
from dspark.training.features import FeatureSource, OnlineFeatures, check_delivered
from dspark.training.identity import check_same, data_identity
from dspark.training.initialise import new_drafter, spread_taps
from dspark.training.interrupt import interrupt_flag
from dspark.training.loss import DrafterLoss, LossSums, LossWeights
from dspark.training.run_log import RunLog, write_run_record
from dspark.training.schedule import items_of_step, learning_rate, num_steps
from dspark.training.setup import Target, Workers, join_workers, load_target

_BETAS = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Where a run ended."""

    checkpoint: Path  # the newest; a drafter that can be served
    step: int
    total_steps: int
    is_interrupted: bool  # by Ctrl-C


def train(config: TrainConfig, *, show_progress: bool = True) -> TrainResult:
    """Train a drafter as `config` says, or go on with one, and leave checkpoints, log.jsonl and run.json in its output.

    Started by torchrun, its processes share every step. Ctrl-C ends after the step at hand, with a checkpoint; a
    second one ends at once. Raises `ConfigError` or `CheckpointError` for what the user can correct.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    output = Path(config.output)
    resumed = _resumed_folder(config, output)
    workers = join_workers(config.device)
    try:
        target = load_target(config.target, workers.device)
        dataset = target.load_dataset(
            config.data, max_length=config.max_length, hold_out_fraction=config.hold_out_fraction
        )
        tap_ids = config.tap_ids or spread_taps(config.num_taps, target.decoder.config.num_layers)
        identity = data_identity(
            [Path(path) for path in config.data],
            target.folder,
            tap_ids=tap_ids,
            seed=config.seed,
            max_length=config.max_length,
        )
        step = 0
        if resumed is not None:
            record = load_record(resumed)
            advice = "restore it, or train from the start in another output folder"
            check_same(record["identity"], identity, what=f"the checkpoint {resumed}", advice=advice)
            check_same(record["settings"], config.learned_settings(), what=f"the checkpoint {resumed}", advice=advice)
            step = record["step"]
            module = load_module(resumed, target.decoder)
        else:
            module = new_drafter(config, target, dataset, tap_ids)
        run = _Run(config, target, dataset, module, identity, workers, step)
        if resumed is not None:
            run.optimizer.load_state_dict(load_optimizer_state(resumed))
        result = run.execute(output, show_progress=show_progress)
        workers.wait()  # one that left the group while the first still writes would abort at its exit
        return result
    finally:
        workers.close()


def _resumed_folder(config: TrainConfig, output: Path) -> Path | None:
    folders = step_folders(output)
    if config.resume and not folders:
        raise ConfigError(f"{output} has no checkpoint to resume from; train without --resume")
    if folders and not config.resume:
        raise ConfigError(
            f"{output} holds a run with checkpoints up to {folders[-1].name}; resume it (--resume) or choose another "
            "output folder"
        )
    return folders[-1] if folders else None


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        dataset: Dataset,
        module: TrainedModule,
        identity: dict[str, str],
        workers: Workers,
        step: int,
    ) -> None:
        self.config = config
        self.target = target
        self.dataset = dataset
        self.module = module
        self.identity = identity
        self.workers = workers
        self.step = step
        self.training = dataset.training
        self.total_steps = num_steps(
            len(self.training), batch_size=config.batch_size, num_epochs=config.num_epochs, max_steps=config.max_steps
        )
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, betas=_BETAS, weight_decay=config.weight_decay, fused=True
        )
        weights = LossWeights(
            ce=config.ce_weight, l1=config.l1_weight, confidence=config.confidence_weight, decay=config.loss_decay
        )
        kept_ids = module.target_ids
        self.loss = DrafterLoss(
            module,
            target.logits,
            weights,
            chunk_slots=config.chunk_slots,
            kept_target_logits=None if kept_ids is None else target.logits_of(kept_ids),
        )
        online = OnlineFeatures(target.decoder, module.config.tap_ids, chunk_tokens=config.feature_chunk)
        self.features: FeatureSource = online
        self.cache = None if config.cache is None else self._open_cache(Path(config.cache))
        self.feature_s = 0.0  # of the steps since the last line of the log
        self.feature_tokens = 0

    def execute(self, output: Path, *, show_progress: bool) -> TrainResult:
        """Do the steps that are left."""
        config, first = self.config, self.workers.is_first
        if first:
            write_run_record(output, config, self.identity, self._facts(), first_step=self.step)
        log = RunLog(
            output if first else None, total_steps=self.total_steps, first_step=self.step, show_progress=show_progress
        )
        last = self.total_steps if config.stop_at_step is None else min(self.total_steps, config.stop_at_step)
        is_interrupted = False
        with log:
            self._introduce(log)
            self._fill_cache(log)
            with interrupt_flag() as interrupted:
                while self.step < last and not is_interrupted:
                    is_interrupted = self._one_step(log, wants_to_stop=interrupted.is_set)
                    is_end = self.step >= last or is_interrupted
                    if first and (self.step % config.eval_interval == 0 or is_end):
                        self._look_at_held_out(log)
                    if self.step % config.save_interval == 0 or is_end:
                        self._save(output)
        return TrainResult(
            checkpoint=output / f"step-{self.step:08d}",
            step=self.step,
            total_steps=self.total_steps,
            is_interrupted=is_interrupted,
        )

    def _one_step(self, log: RunLog, *, wants_to_stop: Callable[[], bool]) -> bool:
        """Do one step; return whether any of the processes wants to stop."""
        config = self.config
        start_s = time.perf_counter()
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        items = items_of_step(self.step, len(self.training), batch_size=config.batch_size, seed=config.seed)
        drawn = [(self.training[place], self._anchors(self.training[place], epoch)) for epoch, place in items]
        # Every process draws all anchors, so that all know by how much to divide.
        num_slots = sum(count_supervised(conversation, self.module.config, own) for conversation, own in drawn)
        own_items = drawn[self.workers.rank :: self.workers.count]
        sums = self._accumulate(own_items, scale=1 / max(1, num_slots))
        flat = torch.cat([sums.flat(), sums.cross_entropy.new_tensor([float(wants_to_stop())])])
        self.workers.add_up(flat)
        self._share_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
        if not math.isfinite(float(norm)):
            raise ConfigError(
                f"the gradient of step {self.step + 1} is not finite ({float(norm)}); lower learning_rate "
                f"({config.learning_rate:g}) or turn bf16 off, and resume"
            )
        rate = learning_rate(
            self.step, self.total_steps, peak=config.learning_rate, warmup_fraction=config.warmup_fraction
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.step += 1
        log.step_done(self.step)
        if self.step % config.log_interval == 0:
            num_blocks = sum(len(own) for _, own in drawn)
            log.write(
                self._line(
                    LossSums.from_flat(flat[:-1]),
                    num_slots,
                    num_blocks,
                    float(norm),
                    rate,
                    time.perf_counter() - start_s,
                )
            )
        return bool(flat[-1] > 0)

    def _anchors(self, conversation: Conversation, epoch: int) -> Any:
        config = self.config
        return draw_anchors(
            conversation, self.module.config, num_anchors=config.num_anchors, seed=config.seed, epoch=epoch
        )

    def _accumulate(self, items: Sequence[tuple[Conversation, Any]], *, scale: float) -> LossSums:
        config, device = self.config, self.workers.device
        sums = LossSums.zeros(self.module.config.num_draft_tokens, device).flat()
        start = 0
        for pack in packs_of([conversation for conversation, _ in items], config.pack_tokens):
            anchors = [own for _, own in items[start : start + len(pack)]]
            start += len(pack)
            begin_s = time.perf_counter()
            features = self.features(pack)
            self.feature_s += time.perf_counter() - begin_s
            self.feature_tokens += sum(conversation.num_tokens for conversation in pack)
            check_delivered(features, needs_target_probs=config.needs_target_probs)
            batch = build_blocks(pack, features, anchors, self.module.config, device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                blocks = run_blocks(self.module, batch)
                sums += self.loss.backward(blocks, batch, scale=scale).flat()
        return LossSums.from_flat(sums)

    def _share_gradients(self) -> None:
        """Add the gradients up over all processes, as one vector.

        Not `DistributedDataParallel`: its hooks expect one forward and one backward pass, and a step here has several,
        with the heads going backward chunk by chunk.
        """
        if self.workers.count == 1:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.workers.add_up(flat)
        parts: Sequence[Tensor] = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def _line(
        self, sums: LossSums, num_slots: int, num_blocks: int, norm: float, rate: float, seconds: float
    ) -> dict[str, Any]:
        config = self.config
        terms = {
            "ce": float(sums.cross_entropy) / max(1, num_slots),
            "l1": float(sums.l1) / max(1, num_slots),
            "confidence": float(sums.confidence) / max(1, num_slots),
        }
        loss = config.ce_weight * terms["ce"] + config.l1_weight * terms["l1"]
        loss += config.confidence_weight * terms["confidence"]
        acceptance = (sums.acceptance / sums.num_slots.clamp(min=1)).tolist()
        feature_rate = self.feature_tokens / self.feature_s if self.feature_s else None
        self.feature_s, self.feature_tokens = 0.0, 0
        return {
            "step": self.step,
            "loss": loss,
            **terms,
            "acceptance": acceptance,
            "grad_norm": norm,
            "learning_rate": rate,
            "blocks_per_s": num_blocks / seconds,
            "feature_tokens_per_s": feature_rate,
        }

    def _look_at_held_out(self, log: RunLog) -> None:
        config = self.config
        conversations = self.dataset.held_out[: config.num_eval_sequences]
        if not conversations:
            return
        evaluation = evaluate_drafter(
            self.module,
            conversations,
            self.features,
            self.target.logits,
            num_anchors=config.num_anchors,
            seed=config.seed,
            pack_tokens=config.pack_tokens,
            chunk_slots=config.chunk_slots,
        )
        log.write({"step": self.step, "held_out": evaluation.to_json()})
        if evaluation.accepted_length is not None:
            log.say(f"step {self.step}: held-out accepted length {evaluation.accepted_length:.2f} (temperature 1)")

    def _save(self, output: Path) -> None:
        if self.workers.is_first:
            state = TrainingState(
                step=self.step,
                optimizer=self.optimizer.state_dict(),
                identity=self.identity,
                settings=self.config.learned_settings(),
            )
            save_checkpoint(output, self.module, state, keep=self.config.keep_checkpoints)

    def _open_cache(self, folder: Path) -> FeatureCache:
        drafter = self.module.config
        return FeatureCache(
            folder,
            self.dataset.conversations,
            tap_width=drafter.feature_size,
            hidden_size=drafter.target_hidden_size,
            dtype=self.config.cache_dtype,
            identity=self.identity,
        )

    def _fill_cache(self, log: RunLog) -> None:
        if self.cache is None:
            return
        if self.workers.is_first:
            log.say(f"feature cache {self.config.cache}: {self.cache.num_bytes / 1e6:,.1f} MB in all")
            self.cache.check_space()
            self.cache.fill(self.features, report=log.meter("target features"))
        self.workers.wait()
        if self.module.config.has_pruned_vocab and self.config.needs_target_probs:
            if self.workers.is_first:
                self.cache.fill_log_normalizers(self.target.logits, report=log.meter("normalizers"))
            self.workers.wait()
            self.cache.open_log_normalizers()
        self.features = self.cache

    def _introduce(self, log: RunLog) -> None:
        data = self.dataset
        log.say(
            f"{len(self.training)} conversations to train on, {len(data.held_out)} held out, {data.num_tokens} tokens; "
            f"{data.num_unanswered} records without an answer left out, {data.num_cut} cut at {self.config.max_length} "
            f"tokens; {sum(p.numel() for p in self.parameters) / 1e6:.1f} M weights to train; "
            f"steps {self.step}..{self.total_steps}"
        )

    def _facts(self) -> dict[str, Any]:
        return {
            "num_conversations": len(self.training),
            "num_held_out": len(self.dataset.held_out),
            "num_tokens": self.dataset.num_tokens,
            "num_unanswered": self.dataset.num_unanswered,
            "num_cut": self.dataset.num_cut,
            "num_processes": self.workers.count,
            "total_steps": self.total_steps,
        }
