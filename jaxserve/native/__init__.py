"""Kernels in C++ for CPUs, where XLA's own do worst: paged attention and products with weights.

They are compiled for this processor by its C++ compiler when an engine first needs them, kept in the cache, and called
by XLA (`jax.ffi`) on XLA's threads. Without a compiler everything is done in plain XLA, which the log says.

Owns the compiled libraries of the process and their names in XLA's registry; knows nothing of models or of the engine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

HERE = Path(__file__).parent
MULTIPLY, MULTIPLY_INT8 = "jaxserve_multiply", "jaxserve_multiply_int8"
"""XLA's names of them."""
COMPILERS = ("c++", "g++", "clang++")
# Sums stay in the order in which they are written.
MATHS = ("math-errno", "trapping-math", "signed-zeros")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-ffinite-math-only"),
    *(f"-fno-{name}" for name in MATHS),
)
TIMEOUT = 120
"""Seconds that the compiler may take."""
ALIGN = 64
"""Bytes: a product's depth must be a multiple of it."""
OUT = 16
"""A product's width must be a multiple of it."""


STRIP = 8
"""A head's number of elements must be a multiple of it."""


class NativeError(RuntimeError):
    """The kernels can not be made here; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """Names that XLA knows the kernels by, for models of one head dim and one number of query heads a KV head."""

    head_dim: int
    group: int
    rows: int
    """Most rows of a bfloat16 product that `multiply` takes less time for than XLA; 0: it cannot run here."""
    int8_rows: int
    """The same of an int8 product."""
    float32_rows: int

    @property
    def attend_name(self) -> str:
        return attend_name(self.head_dim, self.group)

    def attends(self, dtype: jnp.dtype) -> bool:
        """Whether `attend` takes a pool of this type."""
        return dtype in (jnp.float32, jnp.bfloat16)

    def multiplies(self, depth: int, out: int, dtype: jnp.dtype) -> int:
        """The most rows that `multiply` is for with weights [out, depth] of this type; 0: it does not take them."""
        if depth * jnp.dtype(dtype).itemsize % ALIGN or out % OUT:
            return 0
        rows = {jnp.bfloat16: self.rows, jnp.int8: self.int8_rows, jnp.float32: self.float32_rows}
        return next((most for taken, most in rows.items() if taken == dtype), 0)

    def attend(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv: Float[Array, "pages 2 K page H"],
        table: Int[Array, "S P"],
        starts: Int[Array, " S"],
        counts: Int[Array, " S"],
        lengths: Int[Array, " S"],
        slots: Int[Array, " T"],
        first: Int[Array, ""],
        window: int | Int[Array, ""] | None,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "pages 2 K page H"]]:
        """Writes the step's keys and values into the pool, in place, and attends to each token's sequence up to itself.

        Chunk s: tokens starts[s] .. starts[s] + counts[s] - 1, the last of the `lengths[s]` of the sequence whose pages
        are `table[s]`. `slots`: page * size + offset, the largest int32 for tokens of no chunk, which get zeros.
        `first` is added to every page number; `window` w: a token sees itself and the w - 1 before it. All arrays have
        the pool's type, sums are float32. A token's bits do not depend on how it comes in, or with whom.
        """
        where = jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, 0 if window is None else window)])
        results = jax.ShapeDtypeStruct(q.shape, kv.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype)
        call = jax.ffi.ffi_call(self.attend_name, results, input_output_aliases={3: 1})
        q, k, v = (x.astype(kv.dtype) for x in (q, k, v))
        ids = table, starts, counts, lengths, slots, where
        out, kv = call(q, k, v, kv, *ids, scale=np.float32(scale))
        return out, kv


def attend_name(head_dim: int, group: int) -> str:
    return f"jaxserve_attend_{group}x{head_dim}"


def multiply(
    x: Float[Array, "T D"],
    w: Float[Array, "layers out D"],
    layer: Int[Array, ""],
    dtype: jnp.dtype,
    *,
    gated: bool = False,
) -> Float[Array, "T out"]:
    """`x` times one layer of `w`, both float32 or both bfloat16, contracted over D, without a copy of the layer.

    Summed in float32; `dtype` is that or bfloat16. `gated`: silu of the product with the first half of the outputs,
    times the one with the second half.
    """
    call = jax.ffi.ffi_call(MULTIPLY, jax.ShapeDtypeStruct((len(x), w.shape[1] // (1 + gated)), dtype))
    return call(x, w, jnp.asarray(layer, jnp.int32)[None], gated=gated)


def multiply_int8(
    x: Float[Array, "T D"],
    w: Int8[Array, "layers out D"],
    scales: Float[Array, " out"],
    layer: Int[Array, ""],
    dtype: jnp.dtype,
    *,
    gated: bool = False,
) -> Float[Array, "T out"]:
    """`x` times one layer of `w * scales`: x becomes int8 a row at a time, the sums are exact, their results scaled.

    `x` and `dtype` are float32 or bfloat16, `scales` float32, the layer's. `gated`: silu of the product with every
    even output, times the one with the odd output after it.
    """
    call = jax.ffi.ffi_call(MULTIPLY_INT8, jax.ShapeDtypeStruct((len(x), w.shape[1] // (1 + gated)), dtype))
    return call(x, w, scales, jnp.asarray(layer, jnp.int32)[None], gated=gated)


def load(head_dim: int, group: int, folder: Path | None) -> Kernels:
    """Compiles the kernels, or finds them in `folder` or in this process, and makes them known to XLA.

    `folder` is kept private to this user, as what lies there is run; None: nothing is kept.

    Raises:
        NativeError: there is no compiler, or it fails, or others may write to `folder`, or no kernel takes such heads.
    """
    if head_dim % STRIP:
        raise NativeError(f"they take heads of a multiple of {STRIP} elements, not {head_dim}")
    compiler = next((path for name in COMPILERS if (path := shutil.which(os.environ.get("CXX", name)))), None)
    if compiler is None:
        raise NativeError("no C++ compiler was found (set CXX, or install g++ or clang)")
    sizes = (f"-DJAXSERVE_HEAD_DIM={head_dim}", f"-DJAXSERVE_GROUP={group}")
    with _lock:
        attention = _library("attention.cc", (compiler, *sizes), folder)
        matmul = _library("matmul.cc", (compiler,), folder)
        _register(attend_name(head_dim, group), attention.jaxserve_attend)
        _register(MULTIPLY, matmul.jaxserve_multiply)
        _register(MULTIPLY_INT8, matmul.jaxserve_multiply_int8)
    rows = matmul.jaxserve_multiply_rows
    rows.argtypes, rows.restype = [ctypes.c_int64], ctypes.c_int64
    return Kernels(head_dim, group, rows=rows(2), int8_rows=rows(1), float32_rows=rows(4))


_lock = threading.Lock()
_libraries: dict[tuple[str, ...], ctypes.CDLL] = {}
"""By source and command."""
_registered: set[str] = set()
"""XLA's own registry is one for the process, and takes a name once."""


def _library(source: str, command: tuple[str, ...], folder: Path | None) -> ctypes.CDLL:
    if (source, *command) not in _libraries:
        with nullcontext(folder) if folder else tempfile.TemporaryDirectory() as place:
            _libraries[source, *command] = ctypes.CDLL(str(_compiled(source, command, Path(place))))
    return _libraries[source, *command]


def _register(name: str, function: Callable[..., object]) -> None:
    if name not in _registered:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
        _registered.add(name)


def _compiled(source: str, command: tuple[str, ...], folder: Path) -> Path:
    """The library that `command`, with the flags for all, makes of a source: a file named after what it depends on."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    native = ("-march=native", "-mprefer-vector-width=512") if x86 else ("-mcpu=native",)
    command = (*command, *FLAGS, *native, "-isystem", jax.ffi.include_dir(), str(HERE / source))
    parts = [*((HERE / name).read_bytes() for name in (source, "share.h")), repr(command).encode(), _processor()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (found := folder.stat()).st_uid != os.getuid() or found.st_mode & 0o022:
        raise NativeError(f"{folder} must belong to this user, and nobody else may write there (chmod 700)")
    path = folder / f"{Path(source).stem}-{hashlib.sha256(b'\0'.join(parts)).hexdigest()[:32]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / path.name
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise NativeError(f"{command[0]} took more than {TIMEOUT} s") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise NativeError(f"{command[0]} failed: {errors[0]}")
        made.replace(path)
    return path


def _processor() -> bytes:
    """What the compiler's "native" depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})).encode()
