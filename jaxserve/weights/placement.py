"""Which device holds which part of a weight: one table from logical axes to mesh axes.

A model names the axes of its weights and never a mesh; whoever places them asks here. Padding a vocabulary or
repeating KV heads so that they divide is the model configuration's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.weights.leaf import Axes, Encoded

RULES: dict[str | None, str | None] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": None,
    None: None,
}


@dataclass(frozen=True)
class Slot:
    """A place for one array in a model: its leaf's path, as `Source.path` has it, its shape, dtype and logical axes."""

    path: str
    shape: tuple[int, ...]
    dtype: jax.numpy.dtype
    axes: Axes


@dataclass(frozen=True)
class Place:
    """A place for one leaf in a model, with a slot for each of its arrays: several if it is `Encoded`."""

    path: str
    leaf: jax.ShapeDtypeStruct | Encoded
    slots: tuple[Slot, ...]


def places(model: nnx.Module) -> list[Place]:
    """The leaves of an (abstract) model; their slots, one after the other, are in the order of `jax.tree.leaves`."""
    found = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [_place(jax.tree_util.keystr(path), entry) for path, entry in found]


def _place(path: str, entry: nnx.Variable | jax.ShapeDtypeStruct) -> Place:
    value, named = (entry.get_value(), entry.get_metadata()) if isinstance(entry, nnx.Variable) else (entry, {})
    if isinstance(value, Encoded):
        axes = value.axes_of_arrays()
    else:
        axes = (named.get("axes") or (None,) * len(value.shape),)
    arrays = jax.tree.leaves(value)
    slots = tuple(Slot(path, array.shape, array.dtype, own) for array, own in zip(arrays, axes, strict=True))
    return Place(path, value, slots)


def slots(model: nnx.Module) -> list[Slot]:
    """The arrays of an (abstract) model, in the order of `jax.tree.leaves`."""
    return [slot for place in places(model) for slot in place.slots]


def spec(axes: Axes, ndim: int) -> P:
    """How an array of `ndim` dimensions is split; one dimension more than `axes` names is the stack of layers.

    Raises:
        ValueError: an axis that the table lacks, or a number of dimensions that does not fit.
    """
    unknown = [a for a in axes if a not in RULES]
    if unknown:
        raise ValueError(f"axis {unknown[0]!r} is not in the rule table; known: {', '.join(str(a) for a in RULES)}")
    if ndim - len(axes) not in (0, 1):
        raise ValueError(f"axes {axes} do not fit an array of {ndim} dimensions")
    return P(*(None,) * (ndim - len(axes)), *(RULES[a] for a in axes))


def sharding(slot: Slot, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec(slot.axes, len(slot.shape)))


def shardings(model: nnx.Module, mesh: Mesh) -> list[NamedSharding]:
    """One for each of `jax.tree.leaves(model)`.

    Raises:
        ValueError: a dimension does not divide by its mesh axis; the message says which sizes would.
    """
    found = slots(model)
    for axis, ways in mesh.shape.items():
        check_divides(found, axis, ways)
    return [sharding(slot, mesh) for slot in found]


def check_divides(found: list[Slot], axis: str, ways: int) -> None:
    """Every dimension that is split over mesh axis `axis` must be a multiple of `ways`.

    Raises:
        ValueError: one is not; the message says which numbers of ways would do for the whole model.
    """
    split = [(slot, name, size) for slot in found for name, size in _split(slot, axis)]
    common = math.gcd(*(size for _, _, size in split))
    for slot, name, size in split:
        if size % ways:
            fit = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ValueError(
                f"{ways} devices cannot share {name} of {slot.path}, which is {size}; tensor_parallel_size may be {fit}"
            )


def _split(slot: Slot, axis: str) -> Iterator[tuple[str, int]]:
    """Names and sizes of the dimensions of a slot that are split over a mesh axis."""
    dims = slot.shape[len(slot.shape) - len(slot.axes) :]
    for name, size in zip(slot.axes, dims, strict=True):
        if name is not None and RULES.get(name) == axis:
            yield name, size
