"""How large the KV pool may be, known before anything is allocated; and what the process does with freed memory.

Sizes in bytes per device.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from dataclasses import dataclass

import jax

log = logging.getLogger(__name__)

CPU_POOL = 2**30
"""KV pool on a CPU, unless told otherwise."""
RESERVE = 512 * 2**20
"""Kept free on a GPU for what XLA allocates by itself: command buffers, NCCL, autotuning."""
GRID = 64
"""Page counts are rounded down to a multiple of about 1/GRID, so that the same machine gets the same programs."""


@dataclass(frozen=True)
class Needs:
    """What the pool has to share the memory with, and what a page costs."""

    weights: int
    state: int
    """Rows and workspace."""
    temporary: int
    page: int
    """A page in every cache group."""
    tokens: int
    """Tokens in a page."""
    longest: int
    """The longest sequence, in tokens."""


@dataclass(frozen=True)
class Wishes:
    """What the configuration says of the pool. `pool` (bytes) and `count` (pages) beat the share of the device.

    `share` is of what this process's XLA may use: 1.0 where XLA was started with the configured fraction.
    """

    pool: int | None
    count: int | None
    share: float
    limit: int | None
    """Bytes of the device that XLA may use; None where the device has no memory of its own."""


def limit_of(device: jax.Device) -> int | None:
    """What XLA may use of a device, in bytes; None on a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


def check(needs: Needs, wishes: Wishes, ways: int) -> None:
    """Weights and rows of an engine on `ways` devices leave something free, before anything is compiled.

    Raises:
        ValueError: they do not; names the numbers and the settings that would do.
    """
    if wishes.limit is None:
        return
    free = int(wishes.limit * wishes.share)
    if used(needs) < free:
        return
    fit = ways
    while used(dataclasses.replace(needs, weights=needs.weights * ways // fit)) > 0.9 * free and fit < 1024:
        fit *= 2
    raise ValueError(
        f"{needs.weights / 2**30:.1f} GiB of weights and {needs.state / 2**30:.1f} GiB of rows do not fit into the "
        f"{free / 2**30:.1f} GiB that XLA may use of each of {ways} devices; set --tensor-parallel-size to {fit} or "
        "more, or raise --gpu-memory-utilization, or lower --max-num-seqs"
    )


def pages(needs: Needs, wishes: Wishes) -> int:
    """Pages per cache group, the scratch page included.

    Raises:
        ValueError: not even one sequence of the longest length fits; names the numbers and the settings that would.
    """
    count, how = _count(needs, wishes)
    least = -(-needs.longest // needs.tokens) + 1
    if count < least:
        fits = max(0, count - 1) * needs.tokens
        raise ValueError(
            f"max_model_len {needs.longest} needs {least * needs.page / 2**30:.2f} GiB of KV, but there are "
            f"{count * needs.page / 2**30:.2f} GiB ({how}); set --max-model-len to {fits} or less, or "
            f"--kv-cache-memory-bytes to {least * needs.page} or more (beside {needs.weights / 2**30:.2f} GiB of "
            "weights), or raise --gpu-memory-utilization"
        )
    log.info("KV pool: %d pages of %d tokens, %.2f GiB (%s)", count, needs.tokens, count * needs.page / 2**30, how)
    return count


def longest_that_fits(needs: Needs, wishes: Wishes) -> int:
    """For `max_model_len` auto: the smaller of `needs.longest` and what the pool holds, in tokens."""
    return min(needs.longest, (_count(needs, wishes)[0] - 1) * needs.tokens)


def _count(needs: Needs, wishes: Wishes) -> tuple[int, str]:
    """Pages, and what decided it."""
    if wishes.count is not None:
        return wishes.count, f"num_pages={wishes.count}"
    size, how = _pool_size(needs, wishes)
    return _round(max(size, 0) // needs.page), how


def _pool_size(needs: Needs, wishes: Wishes) -> tuple[int, str]:
    if wishes.pool is not None:
        return wishes.pool, "kv_cache_memory_bytes"
    if wishes.limit is None:
        return CPU_POOL, "the default of a CPU; --kv-cache-memory-bytes changes it"
    how = f"{wishes.share:.0%} of the {wishes.limit / 2**30:.1f} GiB that this process's XLA may use"
    return int(wishes.limit * wishes.share) - used(needs), how


def used(needs: Needs) -> int:
    """What a GPU holds beside the pool."""
    return needs.weights + needs.state + needs.temporary + RESERVE


def _round(count: int) -> int:
    grain = max(1, 2 ** (max(count // GRID, 1).bit_length() - 1))
    return count // grain * grain


def keep_freed_memory() -> None:
    """Has glibc keep freed memory in the process: on a CPU fresh pages cost more than the work of a step.

    The same as MALLOC_MMAP_MAX_=0, MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_ and MALLOC_ARENA_MAX=1 at start.
    """
    trim_threshold, top_pad, mmap_max, arena_max = -1, -2, -4, -8
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        log.info("no glibc here: freed memory goes back to the system, which slows steps on a CPU")
        return
    for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 * 2**20), (arena_max, 1)):
        mallopt(option, value)
    log.info("freed memory stays in the process (mallopt), which makes steps on a CPU faster")
