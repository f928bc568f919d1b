"""Drafting now and then for requests that are declined, so that a gain that has come back is seen. No torch.

Probes pay for themselves or stay within a small share of the time: the account holds that share of all time, each probe
takes from it what it makes the step longer, and each accepted token of one gives back what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

PROBE_SHARE = 0.01  # of all time may be lost to probes
MAX_SAVED_S = 2.0  # seconds whose share can be saved up; a debt has no bound
FIRST_WAIT = 8  # rounds from being declined to the first probe; after each that fails twice as many, up to the last
LONGEST_WAIT = 32  # where a probe is dear the account makes waits longer; where it is cheap nothing else should
MAX_WAIT_S = 1.0  # nobody who can pay waits longer, however many rounds that is
# Requests that share a probing pass: one pass for four is cheaper than four passes. While more than half do well, twice
# as many each time: where a larger step is dear in itself, only many requests together can show that it pays.
PROBES_PER_ROUND = 4


@dataclass(kw_only=True)
class _Wait:
    """Where a declined request stands between two probes."""

    since_round: int
    since_s: float
    num_rounds: int = FIRST_WAIT
    length: int = 1  # tokens of the next probe that are verified whatever their confidence
    saved_s: float = 0.0  # what an accepted token of the latest probe saves

    @property
    def did_well(self) -> bool:
        """Whether a token of the last probe was accepted: the next one may come at once."""
        return self.num_rounds == 1


class Probes:
    """Says whose turn it is, among the requests that `due` was told of lately."""

    def __init__(self) -> None:
        self.account_s = 0.0
        self._clock_s = 0.0
        self._round = 0
        self._waits: dict[str, _Wait] = {}
        self._probed: set[str] = set()  # whose probe is on the way

    def pass_time(self, seconds: float) -> None:
        """Count the time of a step."""
        self._clock_s += seconds
        self.account_s = min(self.account_s + PROBE_SHARE * seconds, PROBE_SHARE * MAX_SAVED_S)

    def due(self, declined: Sequence[str]) -> list[str]:
        """Return those of the requests declined in this round who may be probed, in the order of their turn.

        Call it once a round. Their wait is over and the account is not empty; who did well in the last probe comes
        first, then who waits longest.
        """
        self._round += 1
        for request_id in list(self._probed):  # nothing of it was verified: it says nothing, and is no reason to hurry
            self._settle(request_id, was_accepted=False)
        for request_id in declined:
            if request_id not in self._waits:
                self._waits[request_id] = _Wait(since_round=self._round, since_s=self._clock_s)
        if self.account_s <= 0.0:
            return []
        turns = []
        for request_id in declined:
            wait = self._waits[request_id]
            num_rounds = self._round - wait.since_round
            if num_rounds >= wait.num_rounds or self._clock_s - wait.since_s >= MAX_WAIT_S:
                turns.append((not wait.did_well, wait.since_round, request_id))
        return [request_id for _, _, request_id in sorted(turns)]

    def start(self, request_ids: Sequence[str], *, cost_s: Callable[[int, int], float], saved_s: float) -> list[str]:
        """Probe the first few of those who are due, of whom there are some; return them.

        `cost_s` is what the step takes longer with so many requests more in the pass and so many verified tokens more;
        `saved_s` is what a token takes without them.
        """
        num_well = sum(self._waits[request_id].did_well for request_id in request_ids)
        probed = list(request_ids[: max(PROBES_PER_ROUND, 2 * num_well)])
        num_tokens = 0
        for request_id in probed:
            wait = self._waits[request_id]
            wait.saved_s = saved_s
            wait.since_round, wait.since_s = self._round, self._clock_s
            num_tokens += wait.length
        self._probed.update(probed)
        self.account_s -= cost_s(len(probed), num_tokens)
        return probed

    @property
    def is_any_on_the_way(self) -> bool:
        """Whether a probe was started whose verdict is not known."""
        return bool(self._probed)

    def length(self, request_id: str) -> int:
        """Return how many drafted tokens of the request are to be verified whatever their confidence."""
        return self._waits[request_id].length if request_id in self._probed else 0

    def observe_verdict(self, request_id: str, num_accepted: int) -> None:
        """Take how many tokens of a verified draft were accepted; only those of probes count here."""
        if request_id not in self._probed:
            return
        wait = self._waits[request_id]
        # Tokens beyond the probe's own length were verified because they pay for themselves; they are not in its cost.
        gain_s = min(num_accepted, wait.length) * wait.saved_s
        self.account_s = min(self.account_s + gain_s, PROBE_SHARE * MAX_SAVED_S)
        if num_accepted >= wait.length:
            wait.length *= 2  # what lies deeper has to be seen as well before drafting can pay again
        self._settle(request_id, was_accepted=num_accepted > 0)

    def forget(self, request_id: str) -> None:
        """Forget a request that ended or joins again by itself; unknown ids are harmless."""
        self._waits.pop(request_id, None)
        self._probed.discard(request_id)

    def _settle(self, request_id: str, *, was_accepted: bool) -> None:
        self._probed.discard(request_id)
        wait = self._waits[request_id]
        if was_accepted:
            wait.num_rounds = 1
        else:
            wait.num_rounds, wait.length = min(max(FIRST_WAIT, 2 * wait.num_rounds), LONGEST_WAIT), 1
