"""Kernels in C++ for CPUs, where XLA's own do worst: paged attention of single tokens, bfloat16 products.

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HERE = Path(__file__).parent
SOURCES = ("attention.cc", "matmul.cc")
COMPILERS = ("c++", "g++", "clang++")
# Of what -ffast-math stands for, all but the part that changes how the whole process treats small numbers.
MATHS = ("math-errno", "trapping-math", "signed-zeros")
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=fast", "-fassociative-math", "-ffinite-math-only"),
    *(f"-fno-{name}" for name in MATHS),
)
TIMEOUT = 120
"""Seconds that the compiler may take."""
ALIGN = 32
"""Elements: a product's depth must be a multiple of it."""
OUT = 16
"""Elements: a product's width must be a multiple of it."""


class NativeError(RuntimeError):
    """The kernels can not be made here; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """Names that XLA knows the kernels by, for models of one head dim and one number of query heads a KV head."""

    head_dim: int
    group: int
    rows: int
    """Most rows of a bfloat16 product that `multiply` takes less time for than XLA; 0: it cannot run here."""

    @property
    def attend_name(self) -> str:
        return f"jaxserve_attend_{self.group}x{self.head_dim}"

    def attends(self, dtype: jnp.dtype) -> bool:
        """Whether `attend` takes a pool of this type."""
        return dtype in (jnp.float32, jnp.bfloat16)

    def multiplies(self, depth: int, out: int, dtype: jnp.dtype) -> bool:
        """Whether `multiply` takes weights [out, depth] of this type, for up to `rows` rows."""
        return self.rows > 0 and dtype == jnp.bfloat16 and depth % ALIGN == 0 and out % OUT == 0

    def attend(
        self,
        q: Float[Array, "T N H"],
        kv: Float[Array, "pages 2 K page H"],
        table: Int[Array, "S P"],
        chunk: Int[Array, " T"],
        at: Int[Array, " T"],
        first: Int[Array, ""],
        window: int | Int[Array, ""] | None,
        scale: float,
    ) -> Float[Array, "T N H"]:
        """Attention of tokens at positions `at` over the sequences `table[chunk]` up to themselves, in float32.

        A token at a position below 0 costs nothing; its row of the result is undefined. `first` is added to every
        page number; `window` w: a token sees itself and the w - 1 before it.
        """
        where = jnp.stack([jnp.asarray(x, jnp.int32) for x in (first, 0 if window is None else window)])
        call = jax.ffi.ffi_call(self.attend_name, jax.ShapeDtypeStruct(q.shape, jnp.float32))
        return call(q.astype(jnp.float32) * scale, kv, table, chunk, at, where)


def multiply(
    x: Float[Array, "T D"], w: Float[Array, "layers out D"], layer: Int[Array, ""], dtype: jnp.dtype
) -> Float[Array, "T out"]:
    """`x` times one layer of `w`, contracted over D and summed in float32, without a copy of the layer."""
    call = jax.ffi.ffi_call("jaxserve_multiply", jax.ShapeDtypeStruct((len(x), w.shape[1]), dtype))
    return call(x, w, jnp.asarray(layer, jnp.int32)[None])


@cache
def load(head_dim: int, group: int, folder: Path) -> Kernels:
    """Compiles the kernels, or finds them in `folder`, and makes them known to XLA.

    Raises:
        NativeError: there is no compiler, or it fails.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(os.environ.get("CXX", name)))), None)
    if compiler is None:
        raise NativeError("no C++ compiler was found (set CXX, or install g++ or clang)")
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    given = (f"-DJAXSERVE_HEAD_DIM={head_dim}", f"-DJAXSERVE_GROUP={group}")
    command = (compiler, *FLAGS, native, *given, "-isystem", jax.ffi.include_dir())
    library = ctypes.CDLL(str(_compiled(command, folder)))
    library.jaxserve_multiply_rows.restype = ctypes.c_int64
    kernels = Kernels(head_dim, group, library.jaxserve_multiply_rows())
    jax.ffi.register_ffi_target(kernels.attend_name, jax.ffi.pycapsule(library.jaxserve_attend), platform="cpu")
    jax.ffi.register_ffi_target("jaxserve_multiply", jax.ffi.pycapsule(library.jaxserve_multiply), platform="cpu")
    return kernels


def _compiled(command: tuple[str, ...], folder: Path) -> Path:
    """The library that `command` makes, in a file named after everything that it depends on."""
    parts = [*(path.read_bytes() for path in sorted(HERE.glob("*.[ch]*"))), repr(command).encode(), _processor()]
    path = folder / f"kernels-{hashlib.sha256(b'\0'.join(parts)).hexdigest()[:32]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / path.name
        try:
            done = subprocess.run(
                [*command, *(str(HERE / name) for name in SOURCES), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
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
