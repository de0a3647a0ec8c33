"""Weights as models see them: what a leaf is made of, and how it multiplies.

Model code calls `project`, `embed` and `unembed` and never touches an array, so that a leaf of another type (int8,
AWQ, LoRA ...) can take an array's place: any object with the methods of `Leaf`. A leaf knows its logical axes
("embed", "mlp" ...), never a mesh, a file or a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

Axes = tuple[str | None, ...]
Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


@dataclass(frozen=True)
class Source:
    """Where one leaf of a model comes from."""

    path: str
    """As `jax.tree_util.keystr` gives it, without the Param's own ".value": ".segments[0].blocks[0].attn.qkv"."""
    names: tuple[str, ...]
    """Hugging Face tensor names; "{layer}" in them stands for the model's layer number."""
    build: Callable[..., np.ndarray]
    """Takes one array per name, in Hugging Face layout ([out, in]), and returns one layer's leaf."""
    layers: tuple[int, ...] | None = None
    """The model's layer numbers in stack order; None for a leaf that is not stacked."""
    optional: bool = False
    """The file may lack it; the leaf then keeps zeros."""


@runtime_checkable
class Leaf(Protocol):
    """What replaces an array under a Param. Every method is pure and returns the dtype of `x` unless it says so."""

    def project(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]: ...

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]: ...

    def unembed(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Logits in float32."""
        ...


@runtime_checkable
class Encoded(Leaf, Protocol):
    """A leaf that is made of a float array and kept as several others, its pytree leaves."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the float array."""
        ...

    def axes_of_arrays(self) -> tuple[Axes, ...]:
        """One for each of its arrays, a stack's dimension left out."""
        ...

    def encode(self, w: np.ndarray) -> tuple[np.ndarray, ...]:
        """What its arrays hold where the float array, or one layer of its stack, is `w`. Reads nothing but shapes."""
        ...


@runtime_checkable
class Stacked(Leaf, Protocol):
    """A leaf that is handed over whole, as a stack of layers, and takes its own layer out when it is used."""

    def at_layer(self, layer: Int[Array, ""]) -> Leaf: ...


@runtime_checkable
class Gated(Leaf, Protocol):
    """A leaf that multiplies by two matrices [2, F, D] and joins the results at once."""

    def project_gated(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        """`gate(self.project(x))`"""
        ...


Weight = nnx.Param | jax.Array | Leaf


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: Axes,
    dtype: jnp.dtype,
    init: Initializer | None = None,
) -> nnx.Param:
    """A weight of random normal values with variance 1/shape[-1], or what `init` gives for (key, shape, dtype).

    Raises:
        ValueError: `axes` does not name every dimension.
    """
    if len(axes) != len(shape):
        raise ValueError(f"axes {axes} must name the {len(shape)} dimensions of {shape}")
    key = rngs.params()
    if init is not None:
        return nnx.Param(init(key, shape, dtype), axes=axes)
    return nnx.Param((jax.random.normal(key, shape) / math.sqrt(shape[-1])).astype(dtype), axes=axes)


def gain(size: int, dtype: jnp.dtype, axes: Axes = (None,)) -> nnx.Param:
    """A vector of ones, for norms."""
    return nnx.Param(jnp.ones((size,), dtype), axes=axes)


def bias(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param:
    """Zeros."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def project(x: Float[Array, "T D"], w: Weight) -> Float[Array, "T ..."]:
    """`x` contracted with the last dimension of `w [..., D]`, in the dtype of `x`."""
    value = _value(w)
    if isinstance(value, Leaf):
        return value.project(x)
    return jax.lax.dot_general(x, value, (((x.ndim - 1,), (value.ndim - 1,)), ((), ())), preferred_element_type=x.dtype)


def project_gated(x: Float[Array, "T D"], w: Weight) -> Float[Array, "T F"]:
    """`gate` of `project` with `w [2, F, D]`."""
    value = _value(w)
    return value.project_gated(x) if isinstance(value, Gated) else gate(project(x, w))


def gate(y: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
    """silu(y[:, 0]) * y[:, 1]"""
    return jax.nn.silu(y[:, 0]) * y[:, 1]


def embed(ids: Int[Array, " T"], w: Weight) -> Float[Array, "T D"]:
    """The rows `ids` of `w [V, D]`; ids out of range give the nearest row."""
    value = _value(w)
    if isinstance(value, Leaf):
        return value.embed(ids)
    return jnp.take(value, ids, axis=0, mode="clip")


def unembed(x: Float[Array, "T D"], w: Weight) -> Float[Array, "T V"]:
    """Float32 logits: `x` contracted with the last dimension of `w [V, D]`, accumulated in float32."""
    value = _value(w)
    if isinstance(value, Leaf):
        return value.unembed(x)
    if x.shape[:-1] == (1,):
        return _unembed_as_two_rows(x, value)
    return _unembed(x, value)


def _unembed(x: Float[Array, "T D"], w: Float[Array, "V D"]) -> Float[Array, "T V"]:
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, w, contract, preferred_element_type=jnp.float32)


def _unembed_as_two_rows(x: Float[Array, "1 D"], w: Float[Array, "V D"]) -> Float[Array, "1 V"]:
    """XLA takes a single row for a vector, and upcasts all of a bfloat16 `w` before a product with a float32 result.

    On a CPU that made the demo's head 55-120 ms instead of 4; on an H200 it is a copy of 2 GB for Llama 3.1's.
    """
    return _unembed(jnp.pad(x, ((0, 1), (0, 0))), w)[:1]


def _value(w: Weight) -> jax.Array | Leaf:
    return w.get_value() if isinstance(w, nnx.Variable) else w
