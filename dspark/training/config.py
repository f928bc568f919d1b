"""The settings of a training run. Defaults suit a small CPU budget; the paper's values stand beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dspark.config import DEFAULT_MODEL
from dspark.errors import ConfigError

ARCHITECTURES = ("dspark", "autoregressive")
CACHE_DTYPES = ("float16", "bfloat16")
# Settings that may differ when a run goes on. What they name is compared by content (`identity`), or does not matter.
_FREE_ON_RESUME = frozenset(
    {"data", "target", "output", "cache", "device", "num_threads", "stop_at_step", "save_interval", "keep_checkpoints"}
    | {"eval_interval", "log_interval", "resume"}
)
_AT_LEAST_ONE = (
    *("num_layers", "num_taps", "block_size", "max_length", "num_anchors", "batch_size", "chunk_slots", "pack_tokens"),
    *("feature_chunk", "eval_interval", "num_eval_sequences", "save_interval", "keep_checkpoints", "log_interval"),
    *("draft_vocab_size", "window", "max_steps", "stop_at_step", "num_threads"),  # these may be None
)
_NOT_NEGATIVE = ("seed", "markov_rank", "weight_decay", "ce_weight", "l1_weight", "confidence_weight")


def _setting(default: Any, meaning: str) -> Any:
    """Declare a setting; `dspark train --help` shows its meaning."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a training run depends on. Raises `ConfigError` naming the setting that is wrong."""

    data: tuple[str, ...] = field(metadata={"help": "JSON-lines files"})
    output: str = field(metadata={"help": "folder of checkpoints, log and run record"})
    target: str = _setting(DEFAULT_MODEL, "as for `dspark serve --model`")
    cache: str | None = _setting(None, "folder for target features; None: computed on the fly")
    cache_dtype: str = _setting("float16", "bfloat16 where a feature exceeds 65504")
    seed: int = _setting(0, "of all draws and first weights")
    resume: bool = _setting(False, "go on from the newest checkpoint in `output`")

    architecture: str = _setting("dspark", "autoregressive: a baseline of one layer with EAGLE-3's inputs")
    num_layers: int = _setting(2, "draft layers (paper: 5)")
    num_taps: int = _setting(3, "tapped target layers, spread evenly (paper: 5)")
    tap_ids: tuple[int, ...] | None = _setting(
        None, "in place of num_taps: output of target layer k, -1 the embedding's"
    )
    block_size: int = _setting(5, "proposals of a block, gamma in the paper (paper: 7)")
    markov_rank: int = _setting(64, "0 trains the plain DFlash baseline (paper: 256)")
    markov_head_type: str = _setting("vanilla", "vanilla, gated or rnn")
    has_confidence_head: bool = _setting(True, "predict the acceptance of each slot")
    draft_vocab_size: int | None = _setting(None, "keep the ids that answers use most; None: all")
    window: int | None = _setting(None, "context positions a draft layer sees; None: all")
    mask_token_id: int | None = _setting(None, "None: a special id that the data never uses")
    init_from_target: bool = _setting(True, "draft layers start as the target's last ones")
    init_from: str | None = _setting(None, "folder of a drafter of the same shape to go on from, with new data")

    max_length: int = _setting(2048, "tokens of a conversation; longer ones are cut (paper: 4096)")
    hold_out_fraction: float = _setting(0.05, "of conversations, by hash of the prompt")
    num_anchors: int = _setting(64, "blocks per conversation and epoch (paper: 512)")
    batch_size: int = _setting(8, "conversations of one step, over all processes (paper: 512)")
    num_epochs: float = _setting(1.0, "(paper: 10)")
    max_steps: int | None = _setting(None, "in place of num_epochs")
    stop_at_step: int | None = _setting(None, "end early, with a checkpoint to go on from; the schedule stays")
    learning_rate: float = _setting(6e-4, "at the end of the warm-up")
    warmup_fraction: float = _setting(0.04, "of all steps")
    weight_decay: float = _setting(0.0, "of AdamW")
    max_grad_norm: float = _setting(1.0, "longer gradients are shortened to it")
    ce_weight: float = _setting(0.1, "factor of the cross entropy")
    l1_weight: float = _setting(0.9, "factor of the L1 distance to the target; 0 needs no target probabilities")
    confidence_weight: float = _setting(1.0, "factor of the confidence head's loss")
    loss_decay: float = _setting(4.0, "d in exp(-(k-1)/d); not tied to block_size")
    bf16: bool = _setting(False, "compute the drafter in bfloat16; weights and loss stay float32")

    chunk_slots: int = _setting(256, "slots whose logits exist at the same time")
    pack_tokens: int = _setting(512, "short conversations share a pass up to this length")
    feature_chunk: int = _setting(512, "tokens of one target pass")
    device: str = _setting("cpu", "torch device; cuda under torchrun: one for each process")
    num_threads: int | None = _setting(None, "None: torch's choice")
    eval_interval: int = _setting(200, "steps between looks at held-out conversations")
    num_eval_sequences: int = _setting(32, "held-out conversations that are looked at")
    save_interval: int = _setting(200, "steps between checkpoints")
    keep_checkpoints: int = _setting(3, "newest checkpoints that stay")
    log_interval: int = _setting(1, "steps between lines of log.jsonl")

    def __post_init__(self) -> None:
        if not self.data:
            raise ConfigError("data () names no file; give at least one file of JSON lines")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1; raise it")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} ({getattr(self, name)}) must not be negative; raise it")
        for name in ("learning_rate", "max_grad_norm", "loss_decay", "num_epochs"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be above 0; raise it")
        for name in ("warmup_fraction", "hold_out_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be at least 0 and below 1; change it")
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"architecture ({self.architecture!r}) must be {' or '.join(ARCHITECTURES)}; change it")
        has_more = self.num_layers > 1 or self.markov_rank or self.has_confidence_head or self.window is not None
        if self.architecture == "autoregressive" and has_more:
            raise ConfigError(
                f"the autoregressive baseline has one layer and no heads, not num_layers {self.num_layers}, "
                f"markov_rank {self.markov_rank}, has_confidence_head {self.has_confidence_head}, window {self.window};"
                " set them to 1, 0, false and None"
            )
        if self.ce_weight == self.l1_weight == 0:
            raise ConfigError("ce_weight (0) and l1_weight (0) leave nothing to learn; raise one of them")
        if self.cache_dtype not in CACHE_DTYPES:
            kinds = " or ".join(CACHE_DTYPES)
            raise ConfigError(f"cache_dtype ({self.cache_dtype!r}) must be {kinds}; change it")

    @property
    def needs_target_probs(self) -> bool:
        """True when a term of the loss compares with the target's distribution."""
        return self.l1_weight > 0 or (self.has_confidence_head and self.confidence_weight > 0)

    def learned_settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share, as JSON values."""
        learned = {name: value for name, value in self.to_json().items() if name not in _FREE_ON_RESUME}
        return learned | {"cached features": self.cache is not None}  # 16-bit features are other numbers

    def to_json(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
