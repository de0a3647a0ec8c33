"""The methods by which a model's weights are quantised: what `--quantization` names, and the leaf type of each.

Applied to a whole model once, abstract or not; the loader then fills whatever leaves it finds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from jaxserve.weights.int8 import Int8Weight
from jaxserve.weights.leaf import Axes, Encoded

METHODS: dict[str, Callable[[jax.Array, Axes], Encoded]] = {"int8": Int8Weight.of}


def quantise[M](model: M, method: str | None) -> M:
    """The model with every matrix, projections and vocabularies, as a leaf of `method`; None: as it is.

    Under `jax.eval_shape` it gives the abstract model that `load` fills.
    """
    if method is None:
        return model
    make = METHODS[method]

    def replaced(entry: nnx.Variable | jax.Array) -> nnx.Variable | jax.Array:
        if not isinstance(entry, nnx.Variable):
            return entry
        axes: Axes = entry.get_metadata().get("axes") or ()
        is_matrix = "embed" in axes and len(axes) > 1
        return entry.replace(make(entry.get_value(), axes)) if is_matrix else entry

    return jax.tree.map(replaced, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
