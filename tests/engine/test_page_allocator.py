"""The allocator: ownership, prefix cache, eviction, failure without side effects."""

from __future__ import annotations

import random

from dspark.engine.page_allocator import ROOT_HASH, PageAllocator, page_hash


def test_a_failed_allocation_changes_nothing():
    """H8: one free page, two wanted; the request that could not be served keeps what it had."""
    allocator = PageAllocator(3, 4)
    held = allocator.allocate(2)
    assert held is not None
    assert allocator.allocate(2) is None
    allocator.check_integrity([held])
    assert allocator.num_available == 1


def test_a_released_prefix_is_found_again_and_a_plain_page_is_not():
    allocator = PageAllocator(4, 2)
    pages = allocator.allocate(2)
    first = page_hash(ROOT_HASH, [1, 2])
    allocator.register(pages[0], first)
    allocator.release(pages)
    assert allocator.num_cached == 1
    assert allocator.acquire_prefix([first, page_hash(first, [3, 4])]) == [pages[0]]


def test_the_hash_of_a_page_depends_on_all_tokens_before_it():
    assert page_hash(page_hash(ROOT_HASH, [1, 2]), [5, 6]) != page_hash(page_hash(ROOT_HASH, [1, 3]), [5, 6])


def test_the_end_of_a_prefix_is_evicted_before_its_start():
    allocator = PageAllocator(3, 1)
    pages = allocator.allocate(3)
    hashes = [page_hash(ROOT_HASH, [i]) for i in range(3)]
    for page, content in zip(pages, hashes, strict=True):
        allocator.register(page, content)
    allocator.release(pages)
    assert allocator.allocate(1) == [pages[2]]
    assert allocator.acquire_prefix(hashes) == pages[:2]


def test_a_shared_page_stays_until_its_last_owner_leaves():
    allocator = PageAllocator(2, 1)
    page = allocator.allocate(1)
    content = page_hash(ROOT_HASH, [7])
    allocator.register(page[0], content)
    assert allocator.acquire_prefix([content]) == page
    allocator.release(page)
    allocator.check_integrity([page])
    allocator.release(page)
    allocator.check_integrity([])


def test_a_page_gets_a_new_serial_with_each_new_owner_but_not_when_its_content_is_reused():
    allocator = PageAllocator(1, 1)
    (page,) = allocator.allocate(1)
    first = allocator.serial(page)
    content = page_hash(ROOT_HASH, [7])
    allocator.register(page, content)
    allocator.release([page])
    allocator.acquire_prefix([content])
    assert allocator.serial(page) == first
    allocator.release([page])
    allocator.allocate(1)
    assert allocator.serial(page) != first


def test_the_first_of_two_equal_pages_stays_in_the_index():
    allocator = PageAllocator(2, 1)
    pages = allocator.allocate(2)
    content = page_hash(ROOT_HASH, [7])
    for page in pages:
        allocator.register(page, content)
    allocator.release(pages)
    assert allocator.acquire_prefix([content]) == [pages[0]]
    assert allocator.num_cached == 0


def test_without_prefix_caching_nothing_is_cached():
    allocator = PageAllocator(1, 1, prefix_caching=False)
    page = allocator.allocate(1)
    allocator.register(page[0], page_hash(ROOT_HASH, [7]))
    allocator.release(page)
    assert allocator.num_cached == 0


def test_integrity_holds_over_random_use():
    random.seed(1)
    allocator = PageAllocator(12, 2)
    tables: list[list[int]] = []
    for _ in range(2000):
        action = random.random()
        if action < 0.4:
            hashes = [page_hash(ROOT_HASH, [random.randrange(4)])]
            table = allocator.acquire_prefix(hashes)
            more = allocator.allocate(random.randrange(1, 4))
            if more is None:
                allocator.release(table)
                continue
            if not table:
                allocator.register(more[0], hashes[0])
            tables.append(table + more)
        elif tables:
            allocator.release(tables.pop(random.randrange(len(tables))))
        allocator.check_integrity(tables)
    for table in tables:
        allocator.release(table)
    allocator.check_integrity([])
    assert allocator.num_used == 0
