"""Work on wide arrays that is only done where some row wants it."""

from __future__ import annotations

from collections.abc import Callable

from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool


def where_wanted(
    wanted: Bool[Array, ""], edit: Callable[[Array], Array], x: Array, columns: NamedSharding | None
) -> Array:
    """`edit(x)`, of the same shape, or x as it is.

    `columns` says how the second dimension is split. XLA for GPUs doesn't find out for itself what it is beyond a
    branch, and would gather x on every device. Where the ways don't divide the dimension that is what it does.
    """
    x = lax.cond(wanted, edit, lambda x: x, x)
    if columns is None or x.shape[1] % columns.num_devices:
        return x
    return lax.with_sharding_constraint(x, columns)
