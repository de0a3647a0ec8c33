"""The page pool: which page is taken next, what is remembered, and that equal keys mean equal text."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.host.pages import PagePool, Parent


def fill(pool: PagePool, text: list[int], salt: str = "") -> list[int]:
    """Takes and publishes the full pages of a text, as a sequence that finds nothing cached would."""
    parent: Parent = salt
    pages: list[int] = []
    for at in range(0, len(text) - pool.size + 1, pool.size):
        pages.append(pool.take())
        parent = pool.publish(pages[-1], parent, tuple(text[at : at + pool.size]))
    return pages


def match(pool: PagePool, text: list[int], salt: str = "") -> list[int]:
    return pool.match(salt, text, len(text))


def test_page_zero_is_never_given() -> None:
    pool = PagePool(4, 2)
    assert pool.total == pool.free == 3
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.free == 0


def test_pages_that_remember_nothing_are_taken_first() -> None:
    pool = PagePool(5, 2)
    kept = fill(pool, [1, 2, 3, 4])
    blank = [pool.take(), pool.take()]
    pool.release(kept)
    pool.release(blank)
    assert {pool.take(), pool.take()} == set(blank)
    assert match(pool, [1, 2, 3, 4]) == kept
    pool.take()
    assert match(pool, [1, 2, 3, 4]) == kept[:1], "the tail of a text is given up before its beginning"


def test_the_least_recently_released_text_is_given_up_first() -> None:
    pool = PagePool(5, 2)
    old, new = fill(pool, [1, 2, 3, 4]), fill(pool, [5, 6, 7, 8])
    pool.release(new)
    pool.release(old)
    for page in match(pool, [5, 6, 7, 8]):
        pool.hold(page)
    pool.release(new)
    pool.take(), pool.take()
    assert match(pool, [1, 2, 3, 4]) == []
    assert match(pool, [5, 6, 7, 8]) == new


def test_a_held_page_is_found_but_not_taken() -> None:
    pool = PagePool(4, 2)
    (page,) = fill(pool, [1, 2])
    assert match(pool, [1, 2, 9, 9]) == [page] and pool.idle([page]) == 0
    pool.hold(page)
    pool.release([page])
    assert pool.free == 2 and pool.idle([page]) == 0
    pool.release([page])
    assert pool.free == 3 and pool.idle([page]) == 1
    pool.hold(page)
    assert pool.free == 2 and page not in (pool.take(), pool.take())


def test_only_whole_pages_within_the_end_are_found() -> None:
    pool = PagePool(9, 4)
    pages = fill(pool, list(range(12)))
    assert [len(pool.match("", list(range(12)), end)) for end in (0, 3, 4, 7, 8, 11, 12)] == [0, 0, 1, 1, 2, 2, 3]
    assert match(pool, [*range(4), 0, 0, 0, 0]) == pages[:1]
    assert match(pool, [0, 0, 0, 0, *range(4, 8)]) == []
    assert match(pool, list(range(4, 12))) == [], "a page is found after its own beginning only"


def test_the_same_text_published_twice_stays_the_first_ones() -> None:
    pool = PagePool(9, 2)
    first, second = fill(pool, [1, 2, 3, 4]), fill(pool, [1, 2, 3, 4])
    assert match(pool, [1, 2, 3, 4]) == first and pool.cached == 2
    pool.release(second)
    assert pool.take() in second, "a double remembers nothing"


def test_salts_and_caching_off_keep_pages_apart() -> None:
    pool = PagePool(9, 2)
    pages = fill(pool, [1, 2], salt="a")
    assert match(pool, [1, 2], "a") == pages and match(pool, [1, 2], "b") == [] == match(pool, [1, 2])
    off = PagePool(9, 2, caching=False)
    fill(off, [1, 2])
    assert match(off, [1, 2]) == [] and off.cached == 0


def test_what_followed_a_forgotten_page_is_not_found_after_another_text() -> None:
    """The page's number is the same again, its serial is not."""
    pool = PagePool(3, 2)
    head, tail = fill(pool, [1, 2, 3, 4])
    pool.release([head])
    assert pool.take() == head
    pool.publish(head, "", (9, 9))
    assert match(pool, [9, 9]) == [head]
    assert match(pool, [9, 9, 3, 4]) == [head]
    assert match(pool, [1, 2, 3, 4]) == [] and pool.idle([tail]) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_a_match_is_the_beginning_of_the_text(seed: int) -> None:
    """Random texts come and go; a page is known to hold a text from its first token on, and is found for it alone."""
    rng = random.Random(seed)
    pool = PagePool(rng.randint(6, 20), 2)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    held: list[list[int]] = []
    for _ in range(60):
        text, salt = [rng.randrange(2) for _ in range(rng.randint(1, 8))], rng.choice("ab")
        pages = match(pool, text, salt)
        for i, page in enumerate(pages):
            assert content[page] == (salt, tuple(text[: 2 * i + 2]))
        for page in pages:
            pool.hold(page)
        parent = pool.parent(salt, pages)
        for i in range(len(pages), len(text) // 2):
            if not pool.free:
                break
            pages.append(pool.take())
            content[pages[-1]] = (salt, tuple(text[: 2 * i + 2]))
            parent = pool.publish(pages[-1], parent, tuple(text[2 * i : 2 * i + 2]))
        held.append(pages)
        while len(held) > rng.randint(0, 3):
            pool.release(held.pop(rng.randrange(len(held))))
        assert pool.free + len({page for pages in held for page in pages}) == pool.total
