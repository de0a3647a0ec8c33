"""Weights that the native kernels multiply where they lie: on a CPU, a layer of a stack without a copy of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from jaxserve import native
from jaxserve.weights import leaf
from jaxserve.weights.int8 import Int8Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeWeight:
    """A bfloat16 or float32 array in the place of itself. It takes its own layer out of a stack (`leaf.Stacked`)."""

    stack: Float[Array, "layers *out D"]
    """Or [*out, D] where there is no stack."""
    layer: Int[Array, ""] | None = None
    dims: int = field(default=2, metadata={"static": True})
    """Dimensions of one layer."""
    rows: int = field(default=0, metadata={"static": True})
    """Most rows of a product that the kernel is for."""

    def at_layer(self, layer: Int[Array, ""]) -> NativeWeight:
        return NativeWeight(self.stack, layer, self.dims, self.rows)

    def project(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]:
        return self._times(x, x.dtype) if len(x) <= self.rows else leaf.project(x, self._array())

    def project_gated(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]:
        if len(x) > self.rows or self.stack.shape[-2] % native.OUT:
            return leaf.gate(self.project(x))
        return native.multiply(x, *_stack(self.stack, self.layer), x.dtype, gated=True)

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return leaf.embed(ids, self._array())

    def unembed(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        return self._times(x, jnp.float32) if len(x) <= self.rows else leaf.unembed(x, self._array())

    def _times(self, x: Float[Array, "T D"], dtype: jnp.dtype) -> Float[Array, "T *out"]:
        y = native.multiply(x, *_stack(self.stack, self.layer), dtype)
        return y.reshape(-1, *self.stack.shape[-self.dims : -1])

    def _array(self) -> Float[Array, "*out D"]:
        return self.stack if self.layer is None else self.stack[self.layer]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeInt8Weight(Int8Weight):
    """An `Int8Weight` whose values stay in their stack; the scales are its layer's once it has one."""

    layer: Int[Array, ""] | None = None

    def at_layer(self, layer: Int[Array, ""]) -> NativeInt8Weight:
        return NativeInt8Weight(self.values, self.scales[layer], self.axes, self.dtype, layer)

    def project_gated(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]:
        """The kernel joins outputs that are stored beside each other, as those without a name are."""
        if self.scales.shape[-1] != 2 or len(self.scales) % native.OUT:
            return leaf.gate(self.project(x))
        return self._times(x, x.dtype, gated=True)

    def _multiply(self, x: Float[Array, "T D"], dtype: jnp.dtype) -> Float[Array, "T *out"]:
        return self._times(x, dtype).reshape(-1, *self.scales.shape)

    def _times(self, x: Float[Array, "T D"], dtype: jnp.dtype, *, gated: bool = False) -> Float[Array, "T out"]:
        stack, layer = _stack(self.values, self.layer)
        return native.multiply_int8(x, stack, self.scales.reshape(-1), layer, dtype, gated=gated)


def _stack(stack: Array, layer: Int[Array, ""] | None) -> tuple[Num[Array, "layers out D"], Int[Array, ""]]:
    """Of [layers, *out, D], or of [*out, D] where `layer` is None."""
    layers = 1 if layer is None else len(stack)
    return stack.reshape(layers, -1, stack.shape[-1]), jnp.int32(0) if layer is None else layer


def in_place[M: nnx.Module](model: M, kernels: native.Kernels) -> M:
    """The (abstract) model with a native leaf for every matrix that the kernels take; its arrays are the same."""

    def replaced(entry: nnx.Variable | jax.Array) -> nnx.Variable | jax.Array:
        if not isinstance(entry, nnx.Variable):
            return entry
        axes, value = entry.get_metadata().get("axes") or (), entry.get_value()
        if "embed" not in axes or len(axes) < 2:
            return entry
        stored = value.values if isinstance(value, Int8Weight) else value
        if isinstance(stored, leaf.Leaf):
            return entry
        *out, depth = stored.shape[-len(axes) :]
        rows = kernels.multiplies(depth, math.prod(out), stored.dtype)
        if not rows:
            return entry
        if isinstance(value, Int8Weight):
            return entry.replace(NativeInt8Weight(**{f.name: getattr(value, f.name) for f in fields(value)}))
        return entry.replace(NativeWeight(value, None, len(axes), rows))

    return jax.tree.map(replaced, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
