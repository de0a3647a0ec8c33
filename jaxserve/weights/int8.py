"""int8 weights: one scale an output channel, activations quantised a token at a time, products of int8 by int8.

Made of any float weight, while it is loaded or on a device. Both factors are int8 because then no weight is ever
widened in memory: YNNPACK multiplies them so on a CPU, cuBLASLt on a GPU. Sums are exact in int32, so a token's
result depends neither on its company nor on how the contracted axis is split over devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int8, Int32

from jaxserve.weights.leaf import Axes

LARGEST = 127
"""Symmetric: -128 is not used."""
ROWS = 1024
"""Output channels that are encoded at once: their float32 copy stays in the cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """A weight as `values * scales`. A `Leaf` that the loader makes (`leaf.Encoded`).

    The contracted axis is the last, as in every weight and as cuBLASLt's int8 wants it. The output axes before it have
    those without a name last: so they can be taken for one without regard to how a named one is split.
    """

    values: Int8[Array, "*out D"]
    scales: Float[Array, "*out"]
    axes: Axes = field(metadata={"static": True})
    """Of the float array: [*out, D]. A stack of layers has one dimension more."""
    dtype: jnp.dtype = field(metadata={"static": True})
    """Of the float array, and of what `embed` gives."""

    @staticmethod
    def of(w: Float[Array, "*shape"], axes: Axes) -> Int8Weight:
        """On the device of `w`, which may be a stack of layers."""
        values, scales = _encode(w.transpose(_stored_order(axes, w.ndim)))
        return Int8Weight(values, scales, axes, w.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the float array."""
        order = _stored_order(self.axes, self.values.ndim)
        return tuple(self.values.shape[order.index(i)] for i in range(len(order)))

    def axes_of_arrays(self) -> tuple[Axes, Axes]:
        stored = tuple(self.axes[i] for i in _stored_order(self.axes, len(self.axes)))
        return stored, stored[:-1]

    def encode(self, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values and scales of one layer of the float array, on the host."""
        stored = w.transpose(_stored_order(self.axes, w.ndim))
        rows = stored.reshape(-1, stored.shape[-1])
        values, scales = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
        for at in range(0, len(rows), ROWS):
            some = slice(at, at + ROWS)
            values[some], scales[some] = _encode(rows[some])
        return values.reshape(stored.shape), scales.reshape(stored.shape[:-1])

    def project(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]:
        y = self._multiply(x, x.dtype)
        outputs = _stored_order(self.axes, len(self.axes))[:-1]
        return y.transpose(0, *(1 + outputs.index(i) for i in sorted(outputs)))

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        values, scales = (jnp.take(a, ids, axis=0, mode="clip") for a in (self.values, self.scales))
        return (values * scales[:, None]).astype(self.dtype)

    def unembed(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        return self._multiply(x, jnp.float32)

    def _multiply(self, x: Float[Array, "T D"], dtype: jnp.dtype) -> Float[Array, "T *out"]:
        """A sum over an axis that is split is one of integers, its token's scale one of all devices."""
        rows, scale = _encode(x)
        sums = self._product(rows).reshape(len(x), *self.scales.shape)
        return (sums * (scale.reshape(-1, *(1,) * self.scales.ndim) * self.scales)).astype(dtype)

    def _product(self, x: Int8[Array, "T D"]) -> Int32[Array, "T out"]:
        w = self.values.reshape(-1, self.values.shape[-1])
        if len(x) == 1:
            return lax.platform_dependent(x, w, cpu=_product_as_two_rows, default=_product)
        return _product(x, w)


def _stored_order(axes: Axes, ndim: int) -> tuple[int, ...]:
    """For each stored dimension the float array's, the layers' first where there is a stack."""
    stack = ndim - len(axes)
    outputs = sorted(range(len(axes) - 1), key=lambda i: axes[i] is None)
    return (*range(stack), *(stack + i for i in outputs), ndim - 1)


def _encode[A: (np.ndarray, jax.Array)](x: A) -> tuple[A, A]:
    """int8[*rows, D] and f32[*rows], whose product is `x` to half a scale; a row of zeros has scale 1.

    What is not finite stays so in the scale.
    """
    xp = x.__array_namespace__()
    wide = xp.astype(x, xp.float32)
    largest = xp.max(xp.abs(wide), axis=-1)
    scales = xp.where(largest == 0, xp.float32(1), largest / LARGEST)
    return xp.astype(xp.round(wide / scales[..., None]), xp.int8), scales


def _product(x: Int8[Array, "T D"], w: Int8[Array, "out D"]) -> Int32[Array, "T out"]:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def _product_as_two_rows(x: Int8[Array, "1 D"], w: Int8[Array, "out D"]) -> Int32[Array, "1 out"]:
    """On a CPU a product with a single row widens all of `w` first."""
    return _product(jnp.pad(x, ((0, 1), (0, 0))), w)[:1]
