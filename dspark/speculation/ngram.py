"""Drafts by looking up the latest earlier occurrence of the text's last tokens and copying what followed it.

How likely a copy is right is known before anything is drawn: repetitions of its kind were right so often.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.speculation.acceptance_rates import restore_parts
from dspark.speculation.match_rates import MatchKind, MatchRates, match_kind
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext, Forecast, Proposer

MAX_MATCHED = 16  # matched tokens counted; beyond it nearly all drafts are right


@dataclass(frozen=True, kw_only=True)
class NgramMatch:
    """A repetition found in a text, and what makes its continuation more or less likely."""

    token_ids: list[int]  # what would follow
    num_matched: int  # of the last tokens, counted up to `MAX_MATCHED`
    period: int  # tokens from the earlier occurrence to the text's end
    is_contested: bool  # a shorter suffix occurred later and went on with another token

    @property
    def is_periodic(self) -> bool:
        """A whole period was repeated already, and not by chance of one or two tokens."""
        return self.num_matched >= max(self.period, 4)

    @property
    def kind(self) -> MatchKind:
        """The repetitions it is counted with."""
        evidence = "periodic" if self.is_periodic else "contested" if self.is_contested else "plain"
        return match_kind(self.num_matched, evidence)


@dataclass(frozen=True, kw_only=True)
class _Foretold:
    """What was said would follow a text; the text itself tells later how far that was right."""

    text: Sequence[int]  # the request's list, which grows
    num_tokens: int  # of it then
    kind: MatchKind
    draft: Draft


class NgramProposer(Proposer):
    """Proposes from the request's own prompt and output; free of any model, so drafts are deterministic.

    The longest suffix of at most `max_ngram` and at least `min_ngram` tokens that occurred before wins, and its most
    recent occurrence. A continuation that reaches the end of the text goes on through itself, so periodic text is
    drafted to full length. Memory grows with the text of a request and is freed by `release`.

    Confidences are running acceptance rates by kind of match (`match_rates`), learned from every text that could have
    been continued, whoever drafted: the tokens that are committed say what would have been accepted.
    """

    name = "ngram"

    # Replaying 85,000 answer tokens of a small chat model, 5 drafts a round: 2 to 4 gave 1.35 tokens a round with 33 %
    # of the drafts accepted; a minimum of 1 gave 1.46 with 17 %, of 3 gave 1.26 with 42 %, both slower where a verified
    # token costs a tenth of a step. A maximum above 4 changed nothing.
    def __init__(self, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, (min_ngram, max_ngram)
        self._ngram_lens = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[str, _History] = {}
        self._foretold: dict[str, _Foretold] = {}
        self._rates = MatchRates()

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        """Return the survivals of the very drafts that `propose` gives."""
        return [Forecast(free=survivals_of(draft.confidences or ())) for draft in self.propose(contexts)]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, in order; the same drafts again while nothing was committed."""
        for context in contexts:  # all before any, so that no promise depends on the order of requests
            self._judge(context)
        return [self._draft(context) for context in contexts]

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are harmless. What it taught about all requests stays."""
        self._histories.pop(request_id, None)
        self._foretold.pop(request_id, None)
        self._rates.release(request_id)

    def export_state(self) -> dict[str, Any]:
        """See `Proposer`."""
        return {"matches": self._rates.export()}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See `Proposer`."""
        restore_parts(self.name, state, {"matches": self._rates.restore})

    @property
    def num_requests(self) -> int:
        """Requests of which anything is held."""
        return max(len(self._histories), len(self._foretold), self._rates.num_requests)

    def _draft(self, context: DraftContext) -> Draft:
        foretold, num_tokens = self._foretold.get(context.request_id), len(context.token_ids)
        if (
            foretold is not None
            and foretold.text is context.token_ids
            and (foretold.num_tokens, len(foretold.draft.token_ids)) == (num_tokens, context.num_draft_tokens)
        ):
            return foretold.draft
        match = self.find_match(context)
        if match is None:
            self._foretold.pop(context.request_id, None)
            return NO_DRAFT
        confidences = self._rates.confidences(context.request_id, match.kind, len(match.token_ids))
        draft = Draft(token_ids=match.token_ids, confidences=confidences)
        self._foretold[context.request_id] = _Foretold(
            text=context.token_ids, num_tokens=num_tokens, kind=match.kind, draft=draft
        )
        return draft

    def _judge(self, context: DraftContext) -> None:
        """Compare what was foretold with the tokens that were committed since; those not yet committed don't count."""
        foretold = self._foretold.get(context.request_id)
        if foretold is None or len(context.token_ids) <= foretold.num_tokens:
            return
        del self._foretold[context.request_id]
        expected, start = foretold.draft.token_ids, foretold.num_tokens
        committed = context.token_ids[start : start + len(expected)]
        num_accepted = 0
        while num_accepted < len(committed) and committed[num_accepted] == expected[num_accepted]:
            num_accepted += 1
        num_judged = min(num_accepted + 1, len(committed))
        self._rates.observe(context.request_id, foretold.kind, num_judged=num_judged, num_accepted=num_accepted)

    def find_match(self, context: DraftContext) -> NgramMatch | None:
        """Return what the text's last tokens were found to repeat and its continuation; None if they are new."""
        history = self._histories.get(context.request_id)
        if history is None or not history.is_prefix_of(context.token_ids):
            history = self._histories[context.request_id] = _History(self._ngram_lens)
        history.extend(context.token_ids)
        starts = history.find_continuations()
        if not starts:
            return None
        start, token_ids = starts[0], history.token_ids
        period = len(token_ids) - start
        return NgramMatch(
            token_ids=[token_ids[start + k % period] for k in range(context.num_draft_tokens)],
            num_matched=history.num_matched(start, MAX_MATCHED),
            period=period,
            is_contested=any(token_ids[other] != token_ids[start] for other in starts),
        )


class _History:
    """The text of one request and where each of its n-grams occurred last."""

    def __init__(self, ngram_lens: Sequence[int]) -> None:
        self.token_ids = array("i")
        self._ngram_lens = ngram_lens  # descending
        self._source: Sequence[int] = ()
        # n -> bytes of an n-gram -> index of the token after its last occurrence
        self._next_index: dict[int, dict[bytes, int]] = {n: {} for n in ngram_lens}

    def is_prefix_of(self, token_ids: Sequence[int]) -> bool:
        num_known = len(self.token_ids)
        # The engine only appends to the list of a request: seeing the same list again, the tail tells enough.
        start = max(0, num_known - self._ngram_lens[0]) if token_ids is self._source else 0
        return array("i", token_ids[start:num_known]) == self.token_ids[start:]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what was committed since the last call, in time proportional to that."""
        first_new = len(self.token_ids)
        self._source = token_ids
        self.token_ids.extend(token_ids[first_new:])
        # An n-gram is entered once its continuation is known: so the text's own suffix is never its own match.
        for n in self._ngram_lens:
            next_index = self._next_index[n]
            for end in range(max(first_new, n), len(self.token_ids)):
                next_index[self.token_ids[end - n : end].tobytes()] = end

    def find_continuations(self) -> list[int]:
        """Return the index of the token that followed each known suffix when it last occurred, longest suffix first."""
        num_tokens = len(self.token_ids)
        found = (self._next_index[n].get(self.token_ids[-n:].tobytes()) for n in self._ngram_lens if n < num_tokens)
        return [start for start in found if start is not None]

    def num_matched(self, start: int, limit: int) -> int:
        """Return how many of the last tokens equal those before `start`, up to `limit`."""
        token_ids, limit = self.token_ids, min(start, limit)
        num_matched = 0
        while num_matched < limit and token_ids[start - 1 - num_matched] == token_ids[-1 - num_matched]:
            num_matched += 1
        return num_matched
