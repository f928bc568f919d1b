"""Notices a drafter that is hardly ever right, which changes no text and so would go unseen. No torch."""

from __future__ import annotations

import logging
from collections import deque

logger = logging.getLogger(__name__)

WINDOW = 200  # first drafted tokens looked back on
MIN_ACCEPTED = 4  # of these: 2 %


class AcceptanceWatch:
    """Warns once when of the last 200 drafts that were checked fewer than 2 % began with a right token."""

    def __init__(self, drafter_name: str) -> None:
        self._drafter_name = drafter_name
        self._latest: deque[bool] = deque(maxlen=WINDOW)
        self._has_warned = False

    def observe(self, *, is_first_accepted: bool) -> None:
        """Count the first drafted token of one verification round."""
        if self._has_warned:
            return
        self._latest.append(is_first_accepted)
        num_accepted = sum(self._latest)
        if len(self._latest) < WINDOW or num_accepted >= MIN_ACCEPTED:
            return
        self._has_warned = True
        logger.warning(
            "the %s drafter is of no use here: of its last %d drafts %d began with a right token. A trained drafter "
            "that does this was made for another target or another prompt format, or its files are read with the wrong "
            "tapped layers or slots: check target_layer_ids in its config.json, and try --drafter-layout. "
            "--drafter none saves the cost of drafting",
            self._drafter_name,
            WINDOW,
            num_accepted,
        )
