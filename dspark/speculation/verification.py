"""Lossless verification: which drafted tokens stay and which token follows, for a ragged batch of requests.

Three rules (`rejection`, `block`, `coupled`); greedy requests compare argmax under any. Plain decoding is a draft of
length 0. Legend: N rows of logits, M requests that draw a token, V vocabulary, l length of a request's draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dspark.request import SamplingParams, TokenLogprobs
from dspark.speculation.logit_processing import LogitProcessor
from dspark.speculation.noise import KeyedNoise, NoisePurpose
from dspark.speculation.proposal import Draft
from dspark.speculation.sampling import (
    INVALID_TOKEN,
    greedy_tokens,
    mask_token_ids,
    race,
    sample_tokens,
    target_probs,
)
from dspark.speculation.token_logprobs import token_logprobs

INVALID_LOGITS_ERROR = "the model returned logits without a finite maximum (NaN or infinity) for this request"
DEAD_END_ERROR = (
    "structure leaves no token that could come next: it is too complex to follow, or all that it allows here is banned "
    "or not in the vocabulary; simplify it or allow more"
)


@dataclass(frozen=True, kw_only=True)
class VerificationRow:
    """One request in a verification. It owns the next 1 + l rows of logits; row k judges drafted token k."""

    draft: Draft  # already trimmed to what the target has seen
    sampling: SamplingParams
    seed: int  # of the request's keyed noise
    method: str  # "rejection", "block" or "coupled"
    anchor_position: int  # absolute; logits row k speaks of position anchor_position + 1 + k
    min_tokens_left: int = 0  # in the first so many rows `masked_token_ids` are impossible
    masked_token_ids: Collection[int] = ()  # end-of-sequence and stop ids while min_tokens is not reached
    logit_processor: LogitProcessor | None = None  # has followed the text up to the anchor; None changes nothing


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """The accepted drafted tokens plus one corrected or bonus token; nothing but `error` if the logits are unusable."""

    num_accepted: int
    token_ids: list[int]  # num_accepted + 1
    error: str | None = None
    error_param: str | None = None  # the sampling parameter to blame
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, where the request asks for them


@dataclass(frozen=True, kw_only=True)
class Pick:
    """One token to be drawn after the accepted prefix of a request."""

    row: VerificationRow
    position: int  # absolute
    purpose: NoisePurpose


class Draws(Protocol):
    """Everything that chance decides in a verification."""

    def is_accepted(self, row: VerificationRow, position: int, probability: float) -> bool:
        """Flip the coin of the token drafted at `position`; a probability above 1 is certain."""
        ...

    def pick_tokens(self, picks: Sequence[Pick], weights: Tensor) -> list[int]:
        """Draw one token per pick from its row of [M, V] weights, which need not sum to 1."""
        ...

    def race_token(self, row: VerificationRow, position: int, probs: Tensor) -> int:
        """Draw the target's own token at `position` from probs [V] (coupled verification)."""
        ...


class KeyedDraws:
    """Draws from the keyed noise of each request."""

    def __init__(self) -> None:
        self._noises: dict[int, KeyedNoise] = {}

    def is_accepted(self, row: VerificationRow, position: int, probability: float) -> bool:
        """See `Draws`."""
        return self._uniform(row, position, NoisePurpose.ACCEPTANCE) < probability

    def pick_tokens(self, picks: Sequence[Pick], weights: Tensor) -> list[int]:
        """See `Draws`. Synchronises once."""
        return sample_tokens(weights, [self._uniform(pick.row, pick.position, pick.purpose) for pick in picks])

    def race_token(self, row: VerificationRow, position: int, probs: Tensor) -> int:
        """See `Draws`. Synchronises."""
        return race(probs, self._noise(row).exponential(position, probs.shape[0]))

    def _uniform(self, row: VerificationRow, position: int, purpose: NoisePurpose) -> float:
        return self._noise(row).uniform(purpose, anchor_position=row.anchor_position, position=position)

    def _noise(self, row: VerificationRow) -> KeyedNoise:
        noise = self._noises.get(row.seed)
        if noise is None:
            noise = self._noises[row.seed] = KeyedNoise(row.seed)
        return noise


@torch.inference_mode()  # runners hand out inference tensors, which only this mode may overwrite
def verify_batch(
    logits: Tensor,  # [N, V] float32, N = sum of 1 + l
    rows: Sequence[VerificationRow],
    *,
    draws: Draws | None = None,
) -> list[VerificationResult]:
    """Verify the drafts of all requests of a step and return one result each, in order.

    Every row of logits is first changed as its request asks, in place (the logits are taken over), so that all judging
    and drawing sees one and the same vector, whatever the rule. Log-probabilities speak of the logits before that.
    Synchronises a fixed number of times for greedy, rejection and block rows, once per emitted token for coupled ones.
    `draws` is keyed noise unless given.
    """
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + 1 + len(row.draft.token_ids))
    assert logits.dim() == 2 and logits.shape[0] == starts[-1], (logits.shape, starts)
    raw: dict[int, Tensor] = {}  # request -> its rows as the model gave them, where these will be reported
    dead_ends: dict[int, int] = {}  # request -> its first row that leaves no token
    for i, (row, start, end) in enumerate(zip(rows, starts, starts[1:], strict=False)):
        _check_draft(row, logits.shape[1])
        if row.sampling.logprobs is not None:
            raw[i] = logits[start:end].clone()
        if row.logit_processor is not None:
            row.logit_processor.apply_(logits[start:end], row.draft.token_ids)
        if row.min_tokens_left > 0:
            mask_token_ids(logits, slice(start, min(start + row.min_tokens_left, end)), row.masked_token_ids)
        if row.sampling.structure is not None and (first := _open_dead_ends_(logits[start:end])) is not None:
            dead_ends[i] = first

    results: dict[int, VerificationResult] = {}
    greedy = [i for i, row in enumerate(rows) if row.sampling.is_greedy]
    sampled = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if greedy:
        token_ids = greedy_tokens(_logits_of(logits, starts, greedy))
        results.update(zip(greedy, _verify_greedy(token_ids, [rows[i] for i in greedy]), strict=True))
    if sampled:
        subset = _logits_of(logits, starts, sampled)
        outcomes = _verify_sampled(subset, [rows[i] for i in sampled], draws or KeyedDraws())
        results.update(zip(sampled, outcomes, strict=True))
    for i, first in dead_ends.items():
        results[i] = _up_to_dead_end(results[i], first)
    if raw:
        _add_logprobs(results, raw, rows)
    return [results[i] for i in range(len(rows))]


def _open_dead_ends_(logits: Tensor) -> int | None:
    """Make rows of [1 + l, V] drawable in which nothing is possible, and return the first of them. Synchronises."""
    is_dead = logits.amax(dim=-1) == -torch.inf
    dead: list[int] = is_dead.nonzero().squeeze(-1).tolist()
    if not dead:
        return None
    logits[is_dead] = 0.0  # the prefix before it may be rejected, and then all is well
    return dead[0]


def _up_to_dead_end(result: VerificationResult, first: int) -> VerificationResult:
    """Return what came out before row `first`, from which nothing can; if that is nothing, the request cannot go on."""
    if result.error is not None or len(result.token_ids) <= first:
        return result
    if first == 0:
        return VerificationResult(num_accepted=0, token_ids=[], error=DEAD_END_ERROR, error_param="structure")
    return replace(result, num_accepted=min(result.num_accepted, first - 1), token_ids=result.token_ids[:first])


def _add_logprobs(
    results: dict[int, VerificationResult], raw: dict[int, Tensor], rows: Sequence[VerificationRow]
) -> None:
    """Say how likely the target found what came out, for the requests that `raw` holds the logits of."""
    reported = [i for i in raw if results[i].error is None]
    if not reported:
        return
    token_ids = [token_id for i in reported for token_id in results[i].token_ids]
    num_top = [rows[i].sampling.logprobs or 0 for i in reported for _ in results[i].token_ids]
    emitting = torch.cat([raw[i][: len(results[i].token_ids)] for i in reported])
    entries = iter(token_logprobs(emitting, token_ids, num_top))
    for i in reported:
        results[i] = replace(results[i], logprobs=[next(entries) for _ in results[i].token_ids])


@dataclass(frozen=True, kw_only=True)
class _Judged:
    """What judging one sampled request needs, as views and plain numbers."""

    row: VerificationRow
    probs: Tensor  # [l + 1, V] the target's distributions
    p: list[float]  # [l] target probability of each drafted token
    q: list[float]  # [l] draft probability of each drafted token
    is_usable: list[bool]  # [l + 1]

    def position(self, k: int) -> int:
        """Return the absolute position of the token that row k of the logits speaks of."""
        return self.row.anchor_position + 1 + k


def _check_draft(row: VerificationRow, vocab_size: int) -> None:
    draft = row.draft
    assert all(0 <= token_id < vocab_size for token_id in draft.token_ids), (draft.token_ids, vocab_size)
    if draft.probs is not None:
        assert draft.probs.shape == (len(draft.token_ids), vocab_size), (draft.probs.shape, vocab_size)


def _logits_of(logits: Tensor, starts: Sequence[int], which: Sequence[int]) -> Tensor:
    if len(which) == len(starts) - 1:
        return logits
    return logits[[k for i in which for k in range(starts[i], starts[i + 1])]]


def _failed() -> VerificationResult:
    return VerificationResult(num_accepted=0, token_ids=[], error=INVALID_LOGITS_ERROR)


def _emitted(row: VerificationRow, num_accepted: int, last_token_id: int) -> VerificationResult:
    return VerificationResult(num_accepted=num_accepted, token_ids=[*row.draft.token_ids[:num_accepted], last_token_id])


def _verify_greedy(target_token_ids: list[int], rows: Sequence[VerificationRow]) -> list[VerificationResult]:
    results = []
    start = 0
    for row in rows:
        num_accepted = 0
        for k, token_id in enumerate(row.draft.token_ids):
            if target_token_ids[start + k] != token_id:
                break
            num_accepted = k + 1
        last = target_token_ids[start + num_accepted]
        results.append(_failed() if last == INVALID_TOKEN else _emitted(row, num_accepted, last))
        start += 1 + len(row.draft.token_ids)
    return results


def _verify_sampled(logits: Tensor, rows: Sequence[VerificationRow], draws: Draws) -> list[VerificationResult]:
    results: dict[int, VerificationResult] = {}
    picks: dict[int, tuple[int, Pick, Tensor]] = {}  # request -> accepted length, what to draw, from which weights
    for i, judged in enumerate(_judge_all(logits, rows)):
        if judged.row.method == "coupled":
            results[i] = _verify_coupled(judged, draws)
            continue
        assert judged.row.method in ("rejection", "block"), judged.row.method
        judge = _judge_block if judged.row.method == "block" else _judge_rejection
        outcome = judge(judged, draws)
        if outcome is None:
            results[i] = _failed()
            continue
        num_accepted, weights = outcome
        is_bonus = num_accepted == len(judged.p)
        purpose = NoisePurpose.BONUS if is_bonus else NoisePurpose.RESIDUAL
        picks[i] = (
            num_accepted,
            Pick(row=judged.row, position=judged.position(num_accepted), purpose=purpose),
            weights,
        )
    if picks:
        last_token_ids = draws.pick_tokens(
            [pick for _, pick, _ in picks.values()], torch.stack([weights for _, _, weights in picks.values()])
        )
        for (i, (num_accepted, pick, _)), last in zip(picks.items(), last_token_ids, strict=True):
            results[i] = _emitted(pick.row, num_accepted, last)
    return [results[i] for i in range(len(rows))]


def _judge_all(logits: Tensor, rows: Sequence[VerificationRow]) -> list[_Judged]:
    """Compute the target's distributions and fetch the probabilities of all drafted tokens, in three transfers."""
    params = [row.sampling for row in rows for _ in range(1 + len(row.draft.token_ids))]
    probs, is_usable = target_probs(logits, params)
    logits_rows: list[int] = []  # the rows that judge a drafted token
    drafted: list[int] = []
    starts: list[int] = []
    start = 0
    for row in rows:
        starts.append(start)
        logits_rows.extend(range(start, start + len(row.draft.token_ids)))
        drafted.extend(row.draft.token_ids)
        start += 1 + len(row.draft.token_ids)
    p: list[float] = _gather(probs, logits_rows, drafted).tolist()
    q = _draft_probabilities(rows, probs.device)
    usable: list[bool] = is_usable.tolist()
    judged = []
    offset = 0
    for row, start in zip(rows, starts, strict=True):
        length = len(row.draft.token_ids)
        own, end = slice(offset, offset + length), start + length + 1
        judged.append(_Judged(row=row, probs=probs[start:end], p=p[own], q=q[own], is_usable=usable[start:end]))
        offset += length
    return judged


def _draft_probabilities(rows: Sequence[VerificationRow], device: torch.device) -> list[float]:
    """Return q of every drafted token, over all requests; 1 where the draft is deterministic."""
    gathered = []
    for row in rows:
        token_ids, probs = row.draft.token_ids, row.draft.probs
        if probs is None:
            gathered.append(torch.ones(len(token_ids), device=device))
        else:
            gathered.append(_gather(probs, range(len(token_ids)), token_ids).to(device))
    q: list[float] = torch.cat(gathered).tolist()
    assert all(value > 0.0 for value in q), f"a drafted token has probability 0 in its own distribution: {q}"
    return q


def _gather(probs: Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> Tensor:
    index = torch.tensor([list(rows), list(token_ids)], dtype=torch.int64, device=probs.device)
    return probs[index[0], index[1]]


def _verify_coupled(judged: _Judged, draws: Draws) -> VerificationResult:
    """Emit the target's own draws while the draft agrees (Daliri et al. 2024); later positions get no noise."""
    drafted = judged.row.draft.token_ids
    for k in range(len(drafted) + 1):
        if not judged.is_usable[k]:
            return _failed()
        token_id = draws.race_token(judged.row, judged.position(k), judged.probs[k])
        if k == len(drafted) or token_id != drafted[k]:
            return _emitted(judged.row, k, token_id)
    raise AssertionError("unreachable")


def _judge_rejection(judged: _Judged, draws: Draws) -> tuple[int, Tensor] | None:
    """Accept x with probability min(1, p/q), left to right (Leviathan et al. 2023, Alg. 1).

    Returns the accepted length and the weights of the next token; None if a row it needs is unusable.
    """
    for k, (p, q) in enumerate(zip(judged.p, judged.q, strict=True)):
        if not judged.is_usable[k]:
            return None
        if not draws.is_accepted(judged.row, judged.position(k), p / q):
            return k, _residual(judged, k, 1.0)
    if not judged.is_usable[-1]:
        return None
    return len(judged.p), judged.probs[-1]


def _judge_block(judged: _Judged, draws: Draws) -> tuple[int, Tensor] | None:
    """Accept the longest prefix whose coin succeeds (block verification, Sun et al. 2024, Alg. 2).

    Returns the accepted length and the weights of the next token; None if a row is unusable.
    """
    if not all(judged.is_usable):
        return None
    length = len(judged.p)
    prefix_p = [1.0]  # p_i of the paper: how much of the target's mass the first i tokens carry
    for p, q in zip(judged.p, judged.q, strict=True):
        prefix_p.append(min(1.0, prefix_p[-1] * p / q))
    residual_mass = _residual_masses(judged, prefix_p)
    for i in range(length, 0, -1):  # coins are independent: the last success is found first, the others stay unflipped
        coin = prefix_p[i]
        if i < length:
            denominator = residual_mass[i] + 1.0 - prefix_p[i]
            coin = residual_mass[i] / denominator if denominator > 0.0 else 1.0
        # the coin of the prefix of length i belongs to its last token
        if draws.is_accepted(judged.row, judged.position(i - 1), coin):
            return i, judged.probs[-1] if i == length else _residual(judged, i, prefix_p[i])
    return 0, judged.probs[0] if length == 0 else _residual(judged, 0, 1.0)


def _residual_masses(judged: _Judged, prefix_p: Sequence[float]) -> list[float]:
    """Return S_i, the mass of max(p_i * p - q, 0) at row i, for i < l; entry 0 is not used."""
    length = len(judged.p)
    if length < 2:
        return [0.0] * length
    if judged.row.draft.probs is None:
        # q is all on the drafted token, where p_i * p never exceeds it: what remains is the rest of p
        return [max(0.0, prefix_p[i] * (1.0 - judged.p[i])) for i in range(length)]
    draft_probs = judged.row.draft.probs[1:length].to(judged.probs.device)
    scale = torch.tensor(prefix_p[1:length], dtype=torch.float32, device=judged.probs.device).unsqueeze(-1)
    excess = torch.clamp_min_(judged.probs[1:length] * scale - draft_probs, 0.0)
    masses: list[float] = excess.sum(dim=-1, dtype=torch.float64).tolist()
    return [0.0, *masses]


def _residual(judged: _Judged, k: int, scale: float) -> Tensor:
    """Return max(scale * p - q, 0) at row k as weights [V]; p itself where rounding leaves nothing."""
    probs = judged.probs[k]
    residual = probs * scale
    draft = judged.row.draft
    if draft.probs is None:
        residual[draft.token_ids[k]] = 0.0
    else:
        residual = torch.clamp_min_(residual - draft.probs[k].to(residual.device), 0.0)
    return torch.where(residual.sum() > 0.0, residual, probs)
