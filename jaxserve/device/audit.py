"""What a program for a GPU must not do, read from what the compiler made of it: each rule gives the faults it finds.

Nothing runs and no GPU is needed, so a change that would copy the weights or break a CUDA graph shows on any machine.
Knows arrays and programs; never a model by name.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.device import thunks
from jaxserve.device.hlo import MATMUL_CALLS, Module, Op, Ran, Shape
from jaxserve.device.programs import Shapes
from jaxserve.device.thunks import Thunk
from jaxserve.sampling import truncate

WORKSPACE = 2**25
"""What cuBLASLt takes as scratch on a Hopper GPU, in bytes."""
PROJECTION = 2**20
"""A leaf whose part of one layer has as many bytes is a projection; norms and biases have fewer."""
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
GOOD_PRODUCTS = (*MATMUL_CALLS[:1], "mosaic_gpu")
"""Beginnings of the names of calls that multiply as fast as cuBLASLt."""
_HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
_LISTS = ("sequence_after_thunk_passes", "metadata")
_IN_PLACE = {"parameter", "while", "conditional", "tuple", "get-tuple-element", "bitcast", "call", "constant"}


@dataclass(frozen=True)
class Program:
    """A compiled program as evidence. Bytes are per device."""

    name: str
    module: Module
    thunks: tuple[Thunk, ...]
    """Empty for other platforms than a GPU."""
    temporary: int
    """Beside arguments and results."""
    held: int
    """While it runs, beside its arguments: temporary memory and results that take over nobody's memory."""
    aliased: int
    """Of results that take over the memory of an argument."""
    seconds: float
    """It took to compile."""


def compiled(
    name: str, lower: Callable[[], jax.stages.Lowered], options: Mapping[str, object], *, listed: bool = True
) -> Program:
    """Lowers and compiles a program; `listed`: with the list of its thunks, where it is for a GPU.

    Raises:
        jax.errors.JaxRuntimeError: it does not compile.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxserve-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} if listed else {}
        made = lower().compile(compiler_options={**options, **dump})
        seconds = time.monotonic() - began
        files = [sorted(Path(folder).glob(f"*.thunk_{what}.txt")) for what in _LISTS]
        texts = [found[-1].read_text() for found in files if found]
    memory, text = made.memory_analysis(), made.as_text()
    assert memory is not None and text is not None, "this backend tells nothing of its programs"
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(
        name=name,
        module=Module.read(text),
        thunks=thunks.read(*texts) if len(texts) == 2 else (),
        temporary=memory.temp_size_in_bytes,
        held=memory.temp_size_in_bytes + results,
        aliased=memory.alias_size_in_bytes,
        seconds=seconds,
    )


@dataclass(frozen=True)
class Expected:
    """What is known of a program's arrays before it is compiled. Bytes are per device."""

    weights: Mapping[tuple[int, ...], int]
    """Dims of the leaves that hold projections or the vocabulary, and bytes of one layer's part of them."""
    pools: frozenset[tuple[int, ...]]
    pool_bytes: int
    """Of the pools that the program takes."""
    activation: int
    """The largest array that holds something of each token or sampled row."""
    flops: int
    """Of all products with weights."""
    all_reduces: int
    """Over all layers."""

    @property
    def smallest(self) -> int:
        """Bytes of the smallest projection."""
        return min(self.weights.values())

    @staticmethod
    def of_forward(s: Shapes, tokens: int, layers: int) -> Expected:
        stacks = [a for a in _local(s) if _is_stack(a, layers)]
        width = max(math.prod(a.dims[1:-1]) for a in stacks)
        return Expected(
            weights={a.dims: a.nbytes // a.dims[0] for a in stacks},
            pools=frozenset(_dims(a) for a in s.kv),
            pool_bytes=sum(math.prod(_dims(a)) * a.dtype.itemsize for a in s.kv),
            activation=tokens * width * s.work.hidden.dtype.itemsize,
            flops=2 * tokens * sum(a.size for a in stacks),
            all_reduces=2 * layers if s.mesh.size > 1 else 0,
        )

    @staticmethod
    def of_sample(s: Shapes, rows: int, *, full: bool = False) -> Expected:
        """Where the vocabulary is split, each pass of the searches for top_k and for top_p adds up its parts."""
        head = max((a for a in _local(s) if len(a.dims) == 2), key=lambda a: a.nbytes)
        searches = 2 * truncate.BITS if full and s.mesh.size > 1 else 0
        return Expected(
            {head.dims: head.nbytes}, frozenset(), 0, 4 * rows * head.dims[0], 2 * rows * head.size, searches
        )


def _local(s: Shapes) -> list[Shape]:
    """The leaves as one device holds them."""
    return [Shape(f"u{8 * a.dtype.itemsize}", _dims(a), "") for a in s.leaves]


def _dims(a: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return tuple(a.sharding.shard_shape(a.shape))


def _is_stack(a: Shape, layers: int) -> bool:
    return len(a.dims) > 2 and a.dims[0] <= layers and a.nbytes // a.dims[0] >= PROJECTION


# The rules


def no_weight_copies(p: Program, e: Expected) -> list[str]:
    """Nothing but a product reads a weight and writes as much; nothing in a loop writes more than its activations."""
    faults = []
    for ran in p.module.runs():
        if ran.op.kind in _IN_PLACE or not ran.times or _updates_pool(ran.op, e) or _multiplies(ran, p.module):
            continue
        started = ran.op.kind.endswith("-start")  # has its operands among its results
        size = ran.op.results[-1].nbytes if started else ran.op.nbytes
        weights = [e.weights[s.dims] for s in p.module.operands(ran.computation, ran.op) if s.dims in e.weights]
        if weights and size >= min(e.smallest, *weights):
            faults.append(f"{ran.op.name} copies a weight: it writes {size} bytes, {ran.times} times")
        elif ran.loops and size >= max(e.smallest, e.activation + 1):
            faults.append(f"{ran.op.name} writes {size} bytes in a loop, {ran.times} times")
    return faults


def little_temporary(p: Program, e: Expected, *, allowed: int = 0) -> list[str]:
    """Temporary memory is cuBLASLt's workspace and few activations. `allowed`: bytes that something else may take."""
    most = WORKSPACE + 4 * max(e.activation, 2**20) + 2**20 + allowed
    return [f"temporary memory is {p.temporary} bytes, more than {most}"] if p.temporary > most else []


def pool_in_place(p: Program, e: Expected) -> list[str]:
    """The KV pool is updated where it is."""
    taken = {n for n, op in p.module.parameters().items() if op.results[0].dims in e.pools}
    faults = [f"the pool in parameter {n} is not updated in place" for n in taken - p.module.aliased]
    if e.pools and not taken:
        faults.append("no parameter is a pool")
    if p.aliased < e.pool_bytes:
        faults.append(f"results take over {p.aliased} bytes, fewer than the pool's {e.pool_bytes}")
    copies = [ran.op.name for ran in p.module.runs() if ran.op.kind.startswith("copy") and _is_pool(ran.op, e)]
    return faults + [f"{name} copies the pool" for name in copies]


def fast_products(p: Program, e: Expected) -> list[str]:
    """Every product with a weight is a call of cuBLASLt (or of a kernel that is as good) on 16-bit floats."""
    faults = []
    for ran in p.module.runs():
        for product in p.module.products(ran.op, ran.computation) if ran.times else ():
            if max(s.nbytes for s in product.inputs) < e.smallest:
                continue
            if not product.by.startswith(GOOD_PRODUCTS):
                faults.append(f"{ran.op.name} is multiplied by {product.by}")
            if {s.dtype for s in product.inputs} - {"bf16", "f16"}:
                faults.append(f"{ran.op.name} multiplies {' by '.join(s.dtype for s in product.inputs)}")
    if (found := p.module.flops()) < e.flops:
        faults.append(f"products of {found} operations are found, {e.flops} are needed: some are no products any more")
    return faults


def no_host(p: Program, e: Expected) -> list[str]:
    """Nothing goes to the host or comes from it while the program runs."""
    return [
        f"{ran.op.name} ({ran.op.target or ran.op.kind}) talks to the host"
        for ran in p.module.runs()
        if _to_host(ran.op)
    ]


def no_open_control(p: Program, e: Expected) -> list[str]:
    """Outside of CUDA graphs is no branch and no loop of unknown length: the host would have to wait for it."""
    unknown = {ran.op.name for ran in p.module.runs() if ran.op.kind == "while" and ran.op.trips is None}
    outside = [t for t in p.thunks if not t.in_graph]
    loops = [f"loop {t.name} of unknown length" for t in outside if t.kind == "kWhile" and t.name in unknown]
    return loops + [f"branch {t.name}" for t in outside if t.kind == "kConditional"]


def planned_collectives(p: Program, e: Expected) -> list[str]:
    """In the layers devices talk as often as planned: an all-reduce behind attention and one behind the mlp."""
    found: Counter[str] = Counter()
    for ran in p.module.runs():
        kind = ran.op.kind.removesuffix("-start")
        if kind in COLLECTIVES and ran.loops:
            found[kind] += ran.times
    planned = Counter({"all-reduce": e.all_reduces} if e.all_reduces else {})
    return [] if found == planned else [f"collectives in loops: {dict(found)}, planned: {dict(planned)}"]


RULES: tuple[Callable[[Program, Expected], list[str]], ...] = (
    no_weight_copies,
    little_temporary,
    pool_in_place,
    fast_products,
    no_host,
    no_open_control,
    planned_collectives,
)


@dataclass(frozen=True)
class Launches:
    """How often a run starts something on the device; loops of unknown length and branches count once."""

    layer: int
    """In a layer, beside what turns in loops of its own."""
    graphs: int
    """CUDA graphs of a layer."""
    rest: int
    """Outside of the layers."""

    @staticmethod
    def of(p: Program) -> Launches:
        loop = max(
            (r.op for r in p.module.runs() if r.op.trips and not r.loops), key=lambda op: op.trips or 0, default=None
        )
        name = loop.name if loop else ""
        inside = [t for t in p.thunks if t.inside(name)]
        rest = [t for t in p.thunks if t.launches and not any(o.name == name and o.kind == "kWhile" for o in t.around)]
        graphs = sum(t.kind == thunks.COMMAND_BUFFER for t in inside)
        return Launches(sum(t.launches for t in inside), graphs, len(rest))


def _updates_pool(op: Op, e: Expected) -> bool:
    """It writes a pool, and is no copy of one: XLA updates it in place, which `pool_in_place` makes sure of."""
    return _is_pool(op, e) and not op.kind.startswith("copy")


def _is_pool(op: Op, e: Expected) -> bool:
    sizes = {math.prod(dims) for dims in e.pools}
    return any(s.size in sizes for s in op.results)


def _multiplies(ran: Ran, module: Module) -> bool:
    return any(True for _ in module.products(ran.op, ran.computation))


def _to_host(op: Op) -> bool:
    target = (op.target or "").lower()
    return op.kind in _HOST or "callback" in target or "host" in target or any("S(5)" in s.layout for s in op.results)
