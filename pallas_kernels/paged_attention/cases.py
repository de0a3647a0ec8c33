"""Named steps with their shapes, shared by tests, benchmarks and tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding


@dataclass(frozen=True)
class Case:
    """A step over a pool of two layers, of which the second one is read."""

    chunks: tuple[tuple[int, int], ...]
    """Tokens in the step and length of the sequence, of each chunk."""
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    page: int = 16
    dtype: str = "bfloat16"
    narrow: bool = False
    """The pool is in 8 bits, with scales."""
    longest: int = 128
    """Tokens that a row of the page table can hold."""
    idle: tuple[int, int] = (0, 0)
    """Tokens of no chunk, and chunks without a token."""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for count, _ in self.chunks) + self.idle[0]

    @property
    def rows(self) -> int:
        return len(self.chunks) + self.idle[1]

    @property
    def table_width(self) -> int:
        return self.longest // self.page

    @property
    def pages(self) -> int:
        """Of a layer: those that the sequences need, and page 0."""
        return 1 + sum(-(-length // self.page) for _, length in self.chunks)

    def options(self) -> dict[str, object]:
        """The keyword arguments of the op."""
        return {"window": self.window, "scale": self.size**-0.5, "soft_cap": self.soft_cap}

    def abstract(self, sharding: Sharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """The array arguments by name, as shapes."""
        shapes: dict[str, tuple[tuple[int, ...], object]] = {
            "q": ((self.tokens, self.heads, self.size), self.dtype),
            "kv": ((2 * self.pages, 2, self.kv_heads, self.page, self.size), "uint8" if self.narrow else self.dtype),
            "starts": ((self.rows,), "int32"),
            "counts": ((self.rows,), "int32"),
            "lengths": ((self.rows,), "int32"),
            "table": ((self.rows, self.table_width), "int32"),
            "first": ((), "int32"),
        }
        if self.sinks:
            shapes["sinks"] = ((self.heads,), "float32")
        if self.narrow:
            shapes["kv_scales"] = ((2, self.kv_heads), "float32")
        return {name: jax.ShapeDtypeStruct(*shape, sharding=sharding) for name, shape in shapes.items()}

    def arrays(self, seed: int = 0) -> dict[str, jax.Array]:
        """The array arguments by name. All that a token must not see is NaN."""
        random = np.random.default_rng(seed)
        counts = np.array([count for count, _ in self.chunks] + [0] * self.idle[1])
        lengths = np.array([length for _, length in self.chunks] + [0] * self.idle[1])
        order = random.permutation(np.arange(1, self.pages))
        table = np.zeros((self.rows, self.table_width), np.int64)
        kv = np.full((2 * self.pages, 2, self.kv_heads, self.page, self.size), np.nan, np.float32)
        for s, length in enumerate(lengths):
            need = -(-length // self.page)
            table[s, :need], order = order[:need], order[need:]
            low = 0 if self.window is None else max(0, length - counts[s] - self.window + 1)
            for at in range(low, length):
                page = self.pages + table[s, at // self.page]
                kv[page, :, :, at % self.page] = random.normal(size=(2, self.kv_heads, self.size))
        arrays = {
            "q": random.normal(size=(self.tokens, self.heads, self.size)),
            "kv": np.asarray(kv, jnp.float8_e4m3fn).view(np.uint8) if self.narrow else kv,
            "starts": np.cumsum(counts) - counts,
            "counts": counts,
            "lengths": lengths,
            "table": table,
            "first": self.pages,
            "sinks": random.normal(size=self.heads),
            "kv_scales": random.uniform(0.5, 2, size=(2, self.kv_heads)),
        }
        return {name: jnp.asarray(arrays[name], shape.dtype) for name, shape in self.abstract().items()}


SMALL: dict[str, Case] = {
    "one token, page - 1, page, page + 1": Case(((1, 1), (1, 15), (1, 16), (1, 17)), heads=2, kv_heads=1, idle=(2, 3)),
    "nothing": Case((), heads=1, kv_heads=1, idle=(3, 2)),
    "decoding beside two prompts": Case(((1, 50), (3, 20), (18, 40))),
    "a prompt on both lanes": Case(((70, 70),), heads=1, kv_heads=1),
    "two splits": Case(((1, 300), (1, 257), (1, 30)), heads=2, kv_heads=1, page=128, longest=384),
    "window": Case(((1, 100), (20, 90)), heads=4, kv_heads=1, window=20, page=32),
    "MQA, heads of 256": Case(((1, 70), (10, 20)), heads=8, kv_heads=1, size=256, page=32, idle=(1, 1)),
    "soft-cap and sinks, heads of 96, group of 7": Case(
        ((1, 33), (10, 50)), heads=7, kv_heads=1, size=96, page=64, soft_cap=3.0, sinks=True
    ),
    "MHA, float16, heads of 128": Case(((1, 65), (5, 6)), heads=1, kv_heads=1, size=128, page=64, dtype="float16"),
    "sinks over two splits": Case(((1, 300),), heads=2, kv_heads=1, longest=384, page=64, sinks=True),
    "float8, two splits and a prompt": Case(((1, 300), (10, 50)), longest=384, narrow=True),
    "float8, window, soft-cap and sinks, heads of 96": Case(
        ((1, 90), (20, 90)),
        heads=3,
        kv_heads=1,
        size=96,
        page=64,
        window=20,
        soft_cap=3.0,
        sinks=True,
        narrow=True,
    ),
    "float8, heads of 256": Case(((1, 70), (10, 20)), heads=2, kv_heads=1, size=256, page=32, narrow=True),
}
"""Small enough for jax's interpreter."""

MODELS: dict[str, Case] = {
    "Llama-3.1-8B": Case((), heads=32, kv_heads=8, size=128, longest=8192),
    "Qwen2.5-7B": Case((), heads=28, kv_heads=4, size=128, longest=8192),
    "Llama-3.1-70B, 4 ways": Case((), heads=16, kv_heads=2, size=128, longest=8192),
}
"""Heads of one device, without a step yet."""
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    **{f"decode {batch} at 1k": ((1, 1024),) * batch for batch in (1, 32, 128)},
    "prefill 2k": ((2048, 2048),),
}

FULL: dict[str, Case] = {
    f"{model}: {step}": replace(case, chunks=chunks) for model, case in MODELS.items() for step, chunks in STEPS.items()
}
"""What a server computes."""

WIDE: dict[str, Case] = {
    "heads of 64, group of 8, window and sinks": Case(
        ((1, 4096), (512, 4096)), heads=64, kv_heads=8, size=64, longest=8192, window=128, sinks=True
    ),
    "heads of 96, MHA": Case(((1, 4096), (512, 4096)), heads=32, kv_heads=32, size=96, page=32, longest=8192),
    "heads of 256, soft-cap": Case(
        ((1, 4096), (512, 4096)), heads=16, kv_heads=8, size=256, page=64, longest=8192, soft_cap=50.0, window=4096
    ),
    "float8, heads of 128": Case(((1, 4096), (512, 4096)), heads=32, kv_heads=8, size=128, longest=8192, narrow=True),
    "float8, heads of 64, window and sinks": Case(
        ((1, 4096), (512, 4096)),
        heads=64,
        kv_heads=8,
        size=64,
        longest=8192,
        window=128,
        sinks=True,
        narrow=True,
    ),
    "float8, heads of 96, MHA": Case(
        ((1, 4096), (512, 4096)), heads=32, kv_heads=32, size=96, page=32, longest=8192, narrow=True
    ),
    "float8, heads of 256, soft-cap": Case(
        ((1, 4096), (512, 4096)),
        heads=16,
        kv_heads=8,
        size=256,
        page=64,
        longest=8192,
        soft_cap=50.0,
        narrow=True,
    ),
    "float16 over float8, pages of 128": Case(
        ((1, 4096), (512, 4096)),
        heads=32,
        kv_heads=8,
        size=128,
        page=128,
        longest=8192,
        dtype="float16",
        narrow=True,
    ),
    "float16, pages of 128": Case(
        ((1, 4096), (512, 4096)), heads=32, kv_heads=8, size=128, page=128, longest=8192, dtype="float16"
    ),
}
"""What else the kernel serves: each head size, page size and option once."""
