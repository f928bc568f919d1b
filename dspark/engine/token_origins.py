"""How the tokens of a verified round came to be. No torch."""

from __future__ import annotations

from dspark.request import OriginKind, TokenOrigin
from dspark.speculation.proposal import Draft

PLAIN = TokenOrigin(kind=OriginKind.PLAIN)


def token_origins(draft: Draft, num_accepted: int, *, proposer_name: str | None) -> list[TokenOrigin]:
    """Return the origins of the `num_accepted` + 1 tokens that a round gives which verified `draft`.

    `proposer_name` is whose draft it is where the draft does not say so itself.
    """
    if not draft.token_ids:
        return [PLAIN]
    name = draft.proposer_name or proposer_name
    is_whole = num_accepted == len(draft.token_ids)
    last = OriginKind.BONUS if is_whole else OriginKind.CORRECTED
    accepted = TokenOrigin(kind=OriginKind.ACCEPTED, proposer=name)
    return [accepted] * num_accepted + [TokenOrigin(kind=last, proposer=name)]
