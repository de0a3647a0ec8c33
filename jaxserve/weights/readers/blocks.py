"""GGUF's block formats as float32.

Three formats that common files are full of have a vectorised version here, bit for bit equal to the gguf package's
and several times as fast; the others go through the package. Knows no file and no model; never imports jax.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as Format

_SIZE = 32
"""Elements in a block of the formats below."""


def dequantize(rows: np.ndarray, fmt: Format) -> np.ndarray:
    """float32[R, C] from the bytes u8[R, B] of R rows.

    Raises:
        NotImplementedError: the gguf package cannot dequantise the format.
    """
    fast = _FAST.get(fmt)
    return fast(rows) if fast is not None else quants.dequantize(rows, fmt)


def _q8_0(rows: np.ndarray) -> np.ndarray:
    """Blocks of a float16 scale and 32 signed bytes."""
    blocks = rows.reshape(-1, 2 + _SIZE)
    scale = _float16(blocks, 0)
    return np.multiply(blocks[:, 2:].view(np.int8), scale, dtype=np.float32).reshape(len(rows), -1)


def _q4_0(rows: np.ndarray) -> np.ndarray:
    """Blocks of a float16 scale and 32 nibbles, of which 8 is zero; low nibbles come first."""
    blocks = rows.reshape(-1, 2 + _SIZE // 2)
    scale, nibbles = _float16(blocks, 0), blocks[:, 2:]
    out = np.empty((len(blocks), 2, _SIZE // 2), np.float32)
    np.multiply((nibbles & 15).view(np.int8) - np.int8(8), scale, out=out[:, 0])
    np.multiply((nibbles >> 4).view(np.int8) - np.int8(8), scale, out=out[:, 1])
    return out.reshape(len(rows), -1)


def _q4_1(rows: np.ndarray) -> np.ndarray:
    """Blocks of a float16 scale, a float16 minimum and 32 nibbles; low nibbles come first."""
    blocks = rows.reshape(-1, 4 + _SIZE // 2)
    scale, least, nibbles = _float16(blocks, 0), _float16(blocks, 2), blocks[:, 4:]
    out = np.empty((len(blocks), 2, _SIZE // 2), np.float32)
    np.multiply(nibbles & 15, scale, out=out[:, 0])
    np.multiply(nibbles >> 4, scale, out=out[:, 1])
    out += least[:, None]
    return out.reshape(len(rows), -1)


def _float16(blocks: np.ndarray, at: int) -> np.ndarray:
    """float32[N, 1]: the float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


_FAST: dict[Format, Callable[[np.ndarray], np.ndarray]] = {
    Format.Q8_0: _q8_0,
    Format.Q4_0: _q4_0,
    Format.Q4_1: _q4_1,
}
