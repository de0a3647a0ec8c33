"""What this machine can do, in the units of the floors: bytes read a second, and operations a second by precision.

    python -m benchmarks.peers.probe jax|torch THREADS BYTES

Prints a JSON object. Each number is the best of several tries, over several shapes: a floor is what nothing can be
faster than. An engine may bring its own kernels, so the libraries of several are asked and the best of all counts.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

SHAPES = ((64, 576, 1536), (512, 576, 1536), (512, 1536, 576), (64, 576, 49152), (1024, 2048, 2048))
"""Rows, inner dimension, columns: a model's own, and one that suits a library."""
LEAST_TRIES, SECONDS = 5, 0.5
"""Each work is tried for so long."""


def bandwidth(threads: int, size: int) -> float:
    """Bytes a second that `threads` threads read together of an array of `size` bytes."""
    parts = np.array_split(np.ones(size // 4, np.float32), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / _best(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))


def jax_products() -> Iterable[tuple[str, float]]:
    jax = importlib.import_module("jax")
    jnp = jax.numpy
    kinds = {"bf16": (jnp.bfloat16, jnp.bfloat16), "f32": (jnp.float32, jnp.float32), "int8": (jnp.int8, jnp.int32)}
    for name, (dtype, result) in kinds.items():
        for m, k, n in SHAPES:
            product = jax.jit(lambda a, b, result=result: jax.lax.dot(a, b, preferred_element_type=result))
            a, b = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
            yield name, 2 * m * k * n / _best(lambda product=product, a=a, b=b: product(a, b).block_until_ready())


def torch_products() -> Iterable[tuple[str, float]]:
    torch = importlib.import_module("torch")
    for name, dtype in {"bf16": torch.bfloat16, "f32": torch.float32}.items():
        for m, k, n in SHAPES:
            a, b = torch.ones(m, k, dtype=dtype), torch.ones(n, k, dtype=dtype)
            yield name, 2 * m * k * n / _best(lambda a=a, b=b: torch.nn.functional.linear(a, b))


def _best(work: Callable[[], object]) -> float:
    """Seconds."""
    work()
    found: list[float] = []
    while len(found) < LEAST_TRIES or sum(found) < SECONDS:
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


def main() -> None:
    library, threads, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = {"bandwidth": bandwidth(threads, size)}
    for name, speed in {"jax": jax_products, "torch": torch_products}[library]():
        found[name] = max(found.get(name, 0.0), speed)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
