"""Fills an abstract model with a checkpoint's tensors, each array made once and where it belongs.

Leaves of equal layers are stacked; a layer is read, cast and built in a thread, then written into its place in the
stack. So the host holds a few layers at a time, and on a CPU the stack itself. Knows no file format, no architecture
and no quantisation.
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

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.weights.checkpoint import Checkpoint, LoadError
from jaxserve.weights.leaf import Source
from jaxserve.weights.placement import Slot, shardings, slots

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

    slot: Slot
    sharding: NamedSharding
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
        return self.slot.shape[1:] if self.stacked else self.slot.shape

    @property
    def layer_bytes(self) -> int:
        return math.prod(self.layer_shape) * self.slot.dtype.itemsize


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
    place = _on_host if _is_one_cpu(mesh) else _on_devices
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="weights") as pool:
        leaves = [place(job, checkpoint, pool, tell) for job in jobs]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def head_is_tied(
    config: Mapping[str, object],
    checkpoint: Checkpoint,
    *,
    head: str = "lm_head.weight",
    embedding: str = "model.embed_tokens.weight",
) -> bool:
    """Whether the logits come from the embedding. What the file holds beats the flag `tie_word_embeddings`."""
    flag, names = config.get("tie_word_embeddings"), checkpoint.names()
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
    places = slots(model)
    unmatched = by_path.keys() ^ {slot.path for slot in places}
    if unmatched or len(by_path) != len(sources):
        raise ValueError(f"every leaf needs exactly one source; without a partner: {sorted(unmatched)}")
    present = _present(sources, checkpoint)
    return [
        _Job(slot, sharding, by_path[slot.path], zero=slot.path not in present)
        for slot, sharding in zip(places, shardings(model, mesh), strict=True)
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


def _on_host(job: _Job, checkpoint: Checkpoint, pool: ThreadPoolExecutor, tell: _Tally) -> jax.Array:
    """The whole stack in host memory that XLA takes over without a copy."""
    stack = _aligned_zeros(job.slot.shape, job.slot.dtype)
    parts = stack if job.stacked else stack[None]

    def write(index: int) -> None:
        parts[index] = _layer(job, job.layers[index], checkpoint)

    for _ in pool.map(write, range(len(job.layers))):
        tell(job.layer_bytes)
    return jax.device_put(stack, job.sharding)


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _on_devices(job: _Job, checkpoint: Checkpoint, pool: ThreadPoolExecutor, tell: _Tally) -> jax.Array:
    """A stack of zeros on the devices, into which one layer after the other is written in place."""
    stack = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=job.sharding)(job.slot.shape, job.slot.dtype)
    one = NamedSharding(job.sharding.mesh, P(*job.sharding.spec[1:])) if job.stacked else job.sharding
    write = jax.jit(jax.lax.dynamic_update_index_in_dim, static_argnums=3, donate_argnums=0, out_shardings=job.sharding)
    read = [partial(_layer, job, layer, checkpoint) for layer in job.layers]
    for index, array in enumerate(_ahead(pool, read)):
        part = jax.device_put(array if job.stacked else _own(array), one)
        stack = write(stack, part, index, 0) if job.stacked else part
        part.block_until_ready()
        tell(job.layer_bytes)
    return stack


def _own(array: np.ndarray) -> np.ndarray:
    """A CPU device may take host memory as it is, so it must not be the checkpoint's mapped file."""
    return array if array.flags.owndata else array.copy()


def _ahead(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """The results in order, at most `WORKERS` of them made before they are asked for."""
    pending: deque[Future[np.ndarray]] = deque()
    for call in calls:
        pending.append(pool.submit(call))
        if len(pending) > WORKERS:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _layer(job: _Job, layer: int | None, checkpoint: Checkpoint) -> np.ndarray:
    """One layer's leaf, in the leaf's dtype."""
    if job.zero:
        return np.zeros(job.layer_shape, job.slot.dtype)
    names = [name.format(layer=layer) for name in job.source.names]
    arrays = [_read(checkpoint, name, job.slot.dtype) for name in names]
    try:
        built = job.source.build(*arrays)
    except (ValueError, IndexError, TypeError) as e:
        raise _misshapen(checkpoint, names, job, str(e)) from None
    if built.shape != job.layer_shape:
        raise _misshapen(checkpoint, names, job, f"made {built.shape}")
    return built.astype(job.slot.dtype, copy=False)


def _read(checkpoint: Checkpoint, name: str, dtype: np.dtype) -> np.ndarray:
    """A tensor; matrices are cast before they are rearranged, which moves half the bytes."""
    array = checkpoint.read(name)
    if array.dtype.name not in _FLOATS:
        found = f"{checkpoint.where(name)}: tensor {name} is {array.dtype.name}"
        raise LoadError(f"{found}, one of {', '.join(_FLOATS)} is needed: is the checkpoint quantised?")
    return array.astype(dtype, copy=False) if array.ndim > 1 else array


def _misshapen(checkpoint: Checkpoint, names: Sequence[str], job: _Job, why: str) -> LoadError:
    found = ", ".join(f"{name} {checkpoint.shape(name)}" for name in names)
    files = _some({checkpoint.where(name) for name in names})
    want = f"{job.slot.path} of shape {job.layer_shape}"
    return LoadError(f"{files}: {found} cannot become {want} ({why}); the config and the weights disagree")


class _Tally:
    """Bytes done so far, told to whoever wants to know."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(self._done, self._total)
