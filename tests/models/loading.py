"""A checkpoint of `cases` as a model, by the project's own reader and loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.layers.stack import Decoder
from jaxserve.models import registry
from jaxserve.models.config import DecoderConfig
from jaxserve.weights.load import head_is_tied, load
from jaxserve.weights.readers.safetensors import SafetensorsCheckpoint


def read_config(directory: Path, *, ways: int = 1) -> DecoderConfig:
    checkpoint = SafetensorsCheckpoint(directory)
    return DecoderConfig.from_hf(checkpoint.config, ways=ways, tied=head_is_tied(checkpoint.config, checkpoint))


def load_model(
    directory: Path,
    *,
    ways: int = 1,
    dtype: jnp.dtype = jnp.float32,
    change: Callable[[DecoderConfig], DecoderConfig] = lambda c: c,
) -> Decoder:
    """The model, split over the first `ways` devices."""
    c = change(read_config(directory, ways=ways))
    family = registry.family(c.architecture)
    abstract = jax.eval_shape(lambda: family.model(c, rngs=nnx.Rngs(0), dtype=dtype))
    mesh = Mesh(np.array(jax.devices()[:ways]), ("tensor",))
    return load(abstract, family.tensors(c), SafetensorsCheckpoint(directory), mesh=mesh)
