"""Fills an abstract model with a checkpoint's tensors, each array made once and where it belongs.

Leaves of equal layers are stacked; a layer is read, cast, built and encoded in a thread, then written into its place
in the stack. So the host holds a few layers at a time, and on a CPU the stack itself. Knows no file format, no
architecture and no method of quantisation.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.weights.checkpoint import Checkpoint, LoadError
from jaxserve.weights.leaf import Encoded, Source
from jaxserve.weights.placement import Place, Slot, places, shardings

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from the thread that called `load`."""

WORKERS = min(4, os.cpu_count() or 1)
ALIGNMENT = 64
"""XLA takes host memory as it is only from such addresses."""

_HARMLESS = re.compile(r"(\.|^)(rotary_emb\.inv_freq|attn\.masked_bias|attention\.masked_bias)$|^lm_head\.weight$")
"""Tensors nobody needs: tables computed anew, and a head whose model uses the embedding instead."""

_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class _Job:
    """One leaf to make. `zero`: the checkpoint has nothing for it."""

    place: Place
    shardings: tuple[NamedSharding, ...]
    """One for each slot of the place."""
    source: Source
    zero: bool

    @property
    def stacked(self) -> bool:
        return self.source.layers is not None

    @property
    def layers(self) -> Sequence[int | None]:
        """The model's layer numbers, or one None for a leaf that is not stacked."""
        return (None,) if self.source.layers is None else self.source.layers

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Of what `source` builds."""
        return self.place.leaf.shape[self.stacked :]

    @property
    def layer_bytes(self) -> int:
        """Of all arrays of the leaf."""
        return sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in self.place.slots) // len(self.layers)


def load[M: nnx.Module](
    model: M, sources: Sequence[Source], checkpoint: Checkpoint, *, mesh: Mesh, progress: Progress | None = None
) -> M:
    """The abstract `model` with arrays in place of its ShapeDtypeStructs, of the same dtypes, split over `mesh`.

    Raises:
        LoadError: a tensor is missing, of the wrong shape or type, or read by no source; names file and tensor.
        ValueError: a dimension does not divide by the mesh, or sources and leaves do not match one to one.
    """
    jobs = _jobs(model, sources, checkpoint, mesh)
    total = sum(job.layer_bytes * len(job.layers) for job in jobs)
    tell = _Tally(total, progress)
    put = _on_host if _is_one_cpu(mesh) else _on_devices
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="weights") as pool:
        leaves = [array for job in jobs for array in put(job, checkpoint, pool, tell)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def make[M: nnx.Module](build: Callable[[], object], model: M, *, mesh: Mesh) -> M:
    """What `build` gives, of which `model` is the abstract form, made on the devices and split over `mesh`."""
    log.warning("the weights are random, as the model's initialisers make them: answers mean nothing")
    leaves = jax.jit(lambda: jax.tree.leaves(build()), out_shardings=shardings(model, mesh))()
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def head_is_tied(
    config: Mapping[str, object],
    checkpoint: Checkpoint,
    *,
    head: str = "lm_head.weight",
    embedding: str = "model.embed_tokens.weight",
) -> bool:
    """Whether the logits come from the embedding. What the file holds beats the flag `tie_word_embeddings`.

    Where there are no tensors at all the flag decides.
    """
    flag, names = config.get("tie_word_embeddings"), checkpoint.names()
    if not names:
        return bool(flag)
    if head not in names:
        if flag is False:
            log.warning("the checkpoint has no %s though its config says untied: using %s", head, embedding)
        return True
    if not flag:
        return False
    if embedding not in names or _equal(checkpoint, head, embedding):
        return True
    log.info("%s differs from %s though the config says tied: using the file's head", head, embedding)
    return False


def _equal(checkpoint: Checkpoint, a: str, b: str) -> bool:
    if checkpoint.dtype(a) != checkpoint.dtype(b) or checkpoint.shape(a) != checkpoint.shape(b):
        return False
    return bool(np.array_equal(checkpoint.read(a), checkpoint.read(b)))


def _jobs(model: nnx.Module, sources: Sequence[Source], checkpoint: Checkpoint, mesh: Mesh) -> list[_Job]:
    """One job a leaf, in the order of the model's leaves."""
    by_path = {source.path: source for source in sources}
    found = places(model)
    unmatched = by_path.keys() ^ {place.path for place in found}
    if unmatched or len(by_path) != len(sources):
        raise ValueError(f"every leaf needs exactly one source; without a partner: {sorted(unmatched)}")
    present = _present(sources, checkpoint)
    split = iter(shardings(model, mesh))
    return [
        _Job(place, tuple(islice(split, len(place.slots))), by_path[place.path], zero=place.path not in present)
        for place in found
    ]


def _present(sources: Sequence[Source], checkpoint: Checkpoint) -> set[str]:
    """Paths of the leaves that the checkpoint can fill; optional ones may be missing.

    Raises:
        LoadError: a tensor is missing, or no source reads it.
    """
    names, read, found = set(checkpoint.names()), set(), set()
    for source in sources:
        wanted = {name.format(layer=layer) for name in source.names for layer in source.layers or (None,)}
        missing = wanted - names
        read |= wanted
        if not missing:
            found.add(source.path)
        elif not source.optional or len(missing) < len(wanted):
            raise LoadError(f"{_files(checkpoint)}: no tensor {_some(missing)}, needed for {source.path}")
    extra = {name for name in names - read if not _HARMLESS.search(name)}
    if extra:
        where = checkpoint.where(min(extra))
        raise LoadError(f"{where}: the model has no use for tensor {_some(extra)}; is this another architecture?")
    return found


def _files(checkpoint: Checkpoint) -> str:
    return _some({checkpoint.where(name) for name in checkpoint.names()})


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _is_one_cpu(mesh: Mesh) -> bool:
    return mesh.devices.size == 1 and mesh.devices.flat[0].platform == "cpu"


def _on_host(job: _Job, checkpoint: Checkpoint, pool: ThreadPoolExecutor, tell: _Tally) -> list[jax.Array]:
    """The whole stacks in host memory that XLA takes over without a copy."""
    stacks = [_aligned_zeros(slot.shape, slot.dtype) for slot in job.place.slots]
    parts = [stack if job.stacked else stack[None] for stack in stacks]

    def write(index: int) -> None:
        for part, array in zip(parts, _layer(job, job.layers[index], checkpoint), strict=True):
            part[index] = array

    for _ in pool.map(write, range(len(job.layers))):
        tell(job.layer_bytes)
    return [jax.device_put(stack, to) for stack, to in zip(stacks, job.shardings, strict=True)]


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _on_devices(job: _Job, checkpoint: Checkpoint, pool: ThreadPoolExecutor, tell: _Tally) -> list[jax.Array]:
    """Stacks of zeros on the devices, into which one layer after the other is written in place."""
    stacks = [_Stack(slot, to, job.stacked) for slot, to in zip(job.place.slots, job.shardings, strict=True)]
    read = [partial(_layer, job, layer, checkpoint) for layer in job.layers]
    for index, arrays in enumerate(_ahead(pool, read)):
        for stack, array in zip(stacks, arrays, strict=True):
            stack.write(array, index)
        tell(job.layer_bytes)
    return [stack.value for stack in stacks]


class _Stack:
    """One array on the devices in the making."""

    def __init__(self, slot: Slot, sharding: NamedSharding, stacked: bool) -> None:
        self._stacked = stacked
        self._one = NamedSharding(sharding.mesh, P(*sharding.spec[1:])) if stacked else sharding
        self._write = jax.jit(
            jax.lax.dynamic_update_index_in_dim, static_argnums=3, donate_argnums=0, out_shardings=sharding
        )
        self.value = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(slot.shape, slot.dtype)

    def write(self, array: np.ndarray, index: int) -> None:
        """Returns when `array` may be forgotten."""
        part = jax.device_put(array if self._stacked else _own(array), self._one)
        self.value = self._write(self.value, part, index, 0) if self._stacked else part
        part.block_until_ready()


def _own(array: np.ndarray) -> np.ndarray:
    """A CPU device may take host memory as it is, so it must not be the checkpoint's mapped file."""
    return array if array.flags.owndata else array.copy()


def _ahead[T](pool: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
    """The results in order, at most `WORKERS` of them made before they are asked for."""
    pending: deque[Future[T]] = deque()
    for call in calls:
        pending.append(pool.submit(call))
        if len(pending) > WORKERS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _layer(job: _Job, layer: int | None, checkpoint: Checkpoint) -> tuple[np.ndarray, ...]:
    """The arrays of one layer's leaf, in their dtypes."""
    leaf = job.place.leaf
    if job.zero:
        return tuple(np.zeros(slot.shape[job.stacked :], slot.dtype) for slot in job.place.slots)
    names = [name.format(layer=layer) for name in job.source.names]
    arrays = [_read(checkpoint, name, leaf) for name in names]
    try:
        built = job.source.build(*arrays)
    except (ValueError, IndexError, TypeError) as e:
        raise _misshapen(checkpoint, names, job, str(e)) from None
    if built.shape != job.layer_shape:
        raise _misshapen(checkpoint, names, job, f"made {built.shape}")
    return leaf.encode(built) if isinstance(leaf, Encoded) else (built.astype(leaf.dtype, copy=False),)


def _read(checkpoint: Checkpoint, name: str, leaf: jax.ShapeDtypeStruct | Encoded) -> np.ndarray:
    """A tensor; matrices are cast before they are rearranged, which moves half the bytes, or encoded as they are."""
    array = checkpoint.read(name)
    if array.dtype.name not in _FLOATS:
        found = f"{checkpoint.where(name)}: tensor {name} is {array.dtype.name}"
        raise LoadError(f"{found}, one of {', '.join(_FLOATS)} is needed: is the checkpoint quantised?")
    return array if isinstance(leaf, Encoded) or array.ndim < 2 else array.astype(leaf.dtype, copy=False)


def _misshapen(checkpoint: Checkpoint, names: Sequence[str], job: _Job, why: str) -> LoadError:
    found = ", ".join(f"{name} {checkpoint.shape(name)}" for name in names)
    files = _some({checkpoint.where(name) for name in names})
    want = f"{job.place.path} of shape {job.layer_shape}"
    return LoadError(f"{files}: {found} cannot become {want} ({why}); the config and the weights disagree")


class _Tally:
    """Bytes done so far, told to whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)
