"""Notices a drafter that is hardly ever right, which changes no text and so would go unseen. No torch."""

from __future__ import annotations

import logging
from collections import deque

logger = logging.getLogger(__name__)

WINDOW = 200  # first drafted tokens looked back on
MIN_ACCEPTED = 4  # of these: 2 %


class AcceptanceWatch:
    """Warns once of a drafter when of its last 200 drafts that were checked fewer than 2 % began with a right token."""

    def __init__(self) -> None:
        self._latest: dict[str, deque[bool]] = {}  # by drafter
        self._reported: set[str] = set()

    def observe(self, drafter_name: str, *, is_first_accepted: bool) -> None:
        """Count the first drafted token of one verification round."""
        if drafter_name in self._reported:
            return
        latest = self._latest.setdefault(drafter_name, deque(maxlen=WINDOW))
        latest.append(is_first_accepted)
        num_accepted = sum(latest)
        if len(latest) < WINDOW or num_accepted >= MIN_ACCEPTED:
            return
        self._reported.add(drafter_name)
        logger.warning(
            "the %s drafter is of no use here: of its last %d drafts %d began with a right token. A trained drafter "
            "that does this was made for another target or another prompt format, or its files are read with the wrong "
            "tapped layers or slots: check target_layer_ids in its config.json, and try --drafter-layout. "
            "--drafter none saves the cost of drafting",
            drafter_name,
            WINDOW,
            num_accepted,
        )
