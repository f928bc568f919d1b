"""Pages of the KV pools: who owns which, and which hold a committed prefix that can be reused. No torch.

A page is free, in use (one or more owners) or cached (no owner, its content findable by hash, evicted oldest first).
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

ROOT_HASH = b""


def page_hash(parent_hash: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the identity of a full page: its tokens and, through the parent's hash, all tokens before it."""
    # A cryptographic digest, so that no prompt can be made to collide with another one's page.
    return hashlib.blake2b(parent_hash + np.asarray(token_ids, dtype=np.int64).tobytes(), digest_size=16).digest()


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1 by reference count, and finds cached prefixes."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True) -> None:
        assert num_pages > 0, num_pages
        assert page_size > 0, page_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._free = list(range(num_pages - 1, -1, -1))  # stack; low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # no owner, hash known; oldest first
        self._num_owners = [0] * num_pages
        self._serials = [0] * num_pages
        self._last_serial = 0
        self._hash_of_page: dict[int, bytes] = {}
        self._page_of_hash: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    def serial(self, page_id: int) -> int:
        """Return a number that changes whenever the page is handed out anew, so that stale content is known."""
        return self._serials[page_id]

    def allocate(self, num_pages: int) -> list[int] | None:
        """Return `num_pages` pages with one owner each, or None (and nothing changed) when there are too few."""
        if num_pages > self.num_available:
            return None
        return [self._take() for _ in range(num_pages)]

    def _take(self) -> int:
        if self._free:
            page_id = self._free.pop()
        else:
            page_id, _ = self._cached.popitem(last=False)
            del self._page_of_hash[self._hash_of_page.pop(page_id)]
        self._num_owners[page_id] = 1
        self._last_serial += 1
        self._serials[page_id] = self._last_serial
        return page_id

    def release(self, page_ids: Sequence[int]) -> None:
        """Give up one ownership of each page. The last pages of a prefix become the first to be evicted."""
        for page_id in reversed(page_ids):
            assert self._num_owners[page_id] > 0, f"page {page_id} is released but has no owner"
            self._num_owners[page_id] -= 1
            if self._num_owners[page_id]:
                continue
            if page_id in self._hash_of_page:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)

    def register(self, page_id: int, content_hash: bytes) -> None:
        """Make a full page of committed tokens findable; a page with the same content that came first stays."""
        assert self._num_owners[page_id] > 0, f"page {page_id} is registered but has no owner"
        if self.prefix_caching and content_hash not in self._page_of_hash and page_id not in self._hash_of_page:
            self._page_of_hash[content_hash] = page_id
            self._hash_of_page[page_id] = content_hash

    def acquire_prefix(self, content_hashes: Iterable[bytes]) -> list[int]:
        """Take ownership of the longest run of cached pages that matches `content_hashes` from the start."""
        page_ids: list[int] = []
        for content_hash in content_hashes:
            page_id = self._page_of_hash.get(content_hash)
            if page_id is None:
                break
            self._cached.pop(page_id, None)
            self._num_owners[page_id] += 1
            page_ids.append(page_id)
        return page_ids

    def check_integrity(self, page_tables: Iterable[Sequence[int]]) -> None:
        """Assert that free + used + cached == total and that owners equal the page tables in use."""
        owners = Counter(page_id for table in page_tables for page_id in table)
        used = {page_id for page_id, count in enumerate(self._num_owners) if count}
        assert {p: self._num_owners[p] for p in used} == dict(owners), (used, owners)
        assert len(self._free) + len(used) + len(self._cached) == self.num_pages
        assert not (set(self._free) & used or set(self._free) & set(self._cached) or set(self._cached) & used)
        assert all(p in self._hash_of_page for p in self._cached)
        assert {h: p for p, h in self._hash_of_page.items()} == self._page_of_hash
