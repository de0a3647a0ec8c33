"""Pages of KV: who holds them, which ones remember a prefix, which one is given up next.

Owns page ids only; it never sees the memory behind them, a sequence, or a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

Parent = int | str
"""What a page's tokens follow: the serial number of the page before, or the salt where nothing comes before."""

Key = tuple[Parent, tuple[int, ...]]


class PagePool:
    """The pages 1..count-1 of one cache group (page 0 is scratch).

    A page is held (references > 0) or free. A free page that was published keeps its content until it is taken
    again, so it can still be found by its prefix. Free pages form a queue in the order in which they will be taken:
    first the ones that remember nothing, then the published ones, least recently released first. An ordered
    dictionary, because a found page leaves the queue from its middle, and each operation costs the same whatever
    the pool's size.

    A published page is keyed by the serial number of the page before it and by its own tokens. Serial numbers are
    never used twice, so equal keys mean equal text from the first token on: there is no digest that could collide.
    """

    def __init__(self, count: int, size: int, *, caching: bool = True) -> None:
        self.size = size
        self.total = count - 1
        self._caching = caching
        self._references = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self._published: dict[Key, int] = {}
        self._key: list[Key | None] = [None] * count
        self._serial = [0] * count
        self._next_serial = 1

    @property
    def free(self) -> int:
        """Pages that nobody holds, the remembered ones included."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that remember a prefix, held or free."""
        return len(self._published)

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these nobody holds: what `hold` would take from the free ones."""
        return sum(self._references[page] == 0 for page in pages)

    def take(self) -> int:
        """A page with nothing worth keeping in it, held once. The caller has checked `free`."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page that `match` found."""
        if self._references[page] == 0:
            del self._free[page]
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder fewer. Give a sequence's pages in order: its tail is then taken before its beginning."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if self._key[page] is None:
                    self._free.move_to_end(page, last=False)

    def match(self, salt: str, tokens: Sequence[int], end: int) -> list[int]:
        """The longest run of published pages that hold exactly the beginning of `tokens[:end]`.

        Costs as much as it finds, however long the text.
        """
        found: list[int] = []
        parent: Parent = salt
        for at in range(0, end - self.size + 1, self.size):
            page = self._published.get((parent, tuple(tokens[at : at + self.size])))
            if page is None:
                break
            found.append(page)
            parent = self._serial[page]
        return found

    def parent(self, salt: str, pages: Sequence[int]) -> Parent:
        """What a page after these follows."""
        return self._serial[pages[-1]] if pages else salt

    def publish(self, page: int, parent: Parent, tokens: tuple[int, ...]) -> Parent:
        """Lets later prompts find this full page; returns the parent of the page after it.

        Where the same text was published before, that page stays the one to be found.
        """
        if not self._caching:
            return parent
        key = (parent, tokens)
        known = self._published.setdefault(key, page)
        if known == page and self._key[page] is None:
            self._key[page] = key
            self._serial[page] = self._next_serial
            self._next_serial += 1
        return self._serial[known]

    def _forget(self, page: int) -> None:
        key = self._key[page]
        if key is not None:
            del self._published[key]
            self._key[page] = None
