"""The devices an engine runs on, as a mesh with the one axis that tensor parallelism needs."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.device.step import AXIS


def make(ways: int) -> Mesh:
    """The first `ways` devices.

    Raises:
        ValueError: there are fewer.
    """
    devices = jax.devices()
    if ways > len(devices):
        raise ValueError(
            f"tensor_parallel_size {ways} needs as many devices, but there are {len(devices)} "
            f"({devices[0].platform}); lower --tensor-parallel-size"
        )
    return Mesh(np.array(devices[:ways]), (AXIS,))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def split_heads(mesh: Mesh) -> NamedSharding:
    """Of a KV pool [pages, 2, K, page, H]."""
    return NamedSharding(mesh, P(None, None, AXIS))


def split_columns(mesh: Mesh) -> NamedSharding:
    """Of an array [R, V]."""
    return NamedSharding(mesh, P(None, AXIS))
