"""bfloat16 weights that the native kernel multiplies where they lie, a layer of a stack without a copy of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve import native
from jaxserve.weights import leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NativeWeight:
    """An array as it is, in the place of itself. A `Leaf` that takes its own layer out of a stack (`leaf.Stacked`)."""

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
        return self._times(x, x.dtype)

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return leaf.embed(ids, self._array())

    def unembed(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        return self._times(x, jnp.float32)

    def _times(self, x: Float[Array, "T D"], dtype: jnp.dtype) -> Float[Array, "T ..."]:
        if len(x) > self.rows:
            return leaf.project(x, self._array()) if dtype == x.dtype else leaf.unembed(x, self._array())
        out = self.stack.shape[-self.dims : -1]
        stack = self.stack.reshape(1 if self.layer is None else len(self.stack), -1, x.shape[-1])
        return native.multiply(x, stack, jnp.int32(0) if self.layer is None else self.layer, dtype).reshape(-1, *out)

    def _array(self) -> Float[Array, "*out D"]:
        return self.stack if self.layer is None else self.stack[self.layer]


def in_place[M: nnx.Module](model: M, kernels: native.Kernels) -> M:
    """The (abstract) model with a `NativeWeight` around every matrix that the kernel takes; its leaves are the same."""

    def replaced(entry: nnx.Variable | jax.Array) -> nnx.Variable | jax.Array:
        if not isinstance(entry, nnx.Variable):
            return entry
        axes, value = entry.get_metadata().get("axes") or (), entry.get_value()
        if "embed" not in axes or len(axes) < 2 or isinstance(value, leaf.Leaf):
            return entry
        *out, depth = value.shape[-len(axes) :]
        if not kernels.multiplies(depth, math.prod(out), value.dtype):
            return entry
        return entry.replace(NativeWeight(value, None, len(axes), kernels.rows))

    return jax.tree.map(replaced, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
