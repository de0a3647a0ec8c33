"""Reads what XLA made of a program: the text of its optimised HLO, as data, and what a run of it moves and multiplies.

Knows the text format and nothing of models. Bytes and products are counted per run and device, in loops as often as
they turn. What a loop of unknown length does follows from data, so it counts nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_OP = re.compile(r"\s*(ROOT )?%([\w.-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%([\w.-]+) \(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_WIDTHS = {"pred": 1, "token": 0, "c64": 8, "c128": 16, "s4": 1, "u4": 1}
_VIEWS = {"bitcast", "copy-done", "get-tuple-element", "reshape", "optimization-barrier"}
_FREE = {"parameter", "constant", "tuple", "after-all", "partition-id", "replica-id", *_VIEWS}
_PICKS = {"dynamic-slice", "slice", "gather"}
MATMUL_CALLS = ("__cublas$lt$matmul", "__cublas$gemm", "__onednn$matmul")


@dataclass(frozen=True)
class Shape:
    """One array."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        width = _WIDTHS.get(self.dtype)
        if width is None:
            width = int(re.sub(r"\D", " ", self.dtype).split()[0]) // 8
        return self.size * width


@dataclass(frozen=True)
class Op:
    """One instruction."""

    name: str
    kind: str
    """`fusion`, `while`, `custom-call` ..."""
    results: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def target(self) -> str | None:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found and found[1]

    @property
    def trips(self) -> int | None:
        """Of a loop; None where the compiler does not know."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(found[1]) if found else None

    @property
    def nbytes(self) -> int:
        """Of the results, without the scratch memory that a call of a library takes, which is bytes."""
        called = self.kind == "custom-call" or "kind=kCustom" in self.attributes
        return sum(s.nbytes for s in self.results if not (called and s.dtype == "s8"))

    def called(self, role: str) -> str | None:
        """The computation named as `body`, `calls` ..."""
        found = re.search(rf"\b{role}=%([\w.-]+)", self.attributes)
        return found and found[1]

    @property
    def branches(self) -> tuple[str, ...]:
        """Of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(re.findall(r"%([\w.-]+)", listed[1]))
        return tuple(name for role in ("true_computation", "false_computation") if (name := self.called(role)))


@dataclass(frozen=True)
class Ran:
    """An instruction that runs by itself, not inside of a fusion."""

    op: Op
    computation: str
    loops: tuple[Op, ...]
    """Those around it, from outside in."""

    @property
    def times(self) -> int:
        """In a run; 0 in a loop of unknown length."""
        return math.prod(loop.trips or 0 for loop in self.loops)


@dataclass(frozen=True)
class Module:
    """The instructions of a program by computation, in their order."""

    computations: Mapping[str, tuple[Op, ...]]
    entry: str
    aliased: frozenset[int]
    """Parameters whose memory a result takes over."""

    @staticmethod
    def read(text: str) -> Module:
        """From `Compiled.as_text()`.

        Raises:
            ValueError: it is no such text.
        """
        found: dict[str, tuple[Op, ...]] = {}
        entry, name, ops = None, None, []
        lines = text.splitlines()
        for line in lines:
            if header := _HEADER.match(line):
                name, ops = header[2], []
                entry = name if header[1] else entry
            elif line.startswith("}") and name is not None:
                found[name], name = tuple(ops), None
            elif name is not None and (match := _OP.match(line)):
                ops.append(_op(match[2], match[3], bool(match[1])))
        if entry is None:
            raise ValueError("this is not the text of a compiled program")
        alias = re.search(r"input_output_alias=\{(.*?)\}(?:, \w+=|$)", lines[0])
        taken = re.findall(r"\{[\d, ]*\}: \((\d+),", alias[1]) if alias else []
        return Module(found, entry, frozenset(int(number) for number in taken))

    def runs(self) -> Iterator[Ran]:
        """Every instruction that runs, and those inside of loops and branches after them."""
        yield from self._runs(self.entry, ())

    def _runs(self, computation: str, loops: tuple[Op, ...]) -> Iterator[Ran]:
        for op in self.computations[computation]:
            yield Ran(op, computation, loops)
            if op.kind == "while":
                for role in ("condition", "body"):
                    yield from self._runs(op.called(role) or "", (*loops, op))
            for inner in op.branches:
                yield from self._runs(inner, loops)
            inner = op.called("to_apply") if op.kind == "call" else op.called("calls") if "async" in op.kind else None
            if inner:
                yield from self._runs(inner, loops)

    @cached_property
    def _by_name(self) -> dict[str, dict[str, Op]]:
        return {name: {op.name: op for op in ops} for name, ops in self.computations.items()}

    def operands(self, computation: str, op: Op) -> list[Shape]:
        """The shapes of its operands, those of a tuple's elements one by one."""
        ops = self._by_name[computation]
        return [shape for name in op.operands for shape in ops[name].results]

    def parameters(self) -> dict[int, Op]:
        """What the program takes, by position."""
        return {int(op.operands[0]): op for op in self.computations[self.entry] if op.kind == "parameter"}

    def products(self, op: Op, computation: str) -> Iterator[Product]:
        """The matrix products that an instruction is or holds."""
        if op.kind == "dot" or (op.kind == "custom-call" and op.target in MATMUL_CALLS):
            yield _product(op, self.operands(computation, op))
        elif op.kind == "fusion" and (inner := op.called("calls")):
            for one in self.computations[inner]:
                yield from self.products(one, inner)

    def flops(self) -> int:
        """Multiplications and additions of all matrix products of a run."""
        return sum(
            ran.times * p.flops for ran in self.runs() if ran.times for p in self.products(ran.op, ran.computation)
        )

    def moved(self, *, without: frozenset[tuple[int, ...]] = frozenset()) -> int:
        """Bytes that a run reads and writes in the device's memory; nothing of arrays with the dims in `without`."""
        return sum(ran.times * self._traffic(ran, without) for ran in self.runs() if ran.times)

    def _traffic(self, ran: Ran, without: frozenset[tuple[int, ...]]) -> int:
        op = ran.op
        if op.kind in _FREE or op.kind in ("while", "conditional", "call") or op.kind.endswith("-done"):
            return 0
        if op.kind == "fusion" and (inner := op.called("calls")):
            return self._inside(inner, without)
        read = sum(s.nbytes for s in self.operands(ran.computation, op) if s.dims not in without)
        if op.kind in _PICKS:
            read = op.nbytes
        if op.kind == "dynamic-update-slice":
            return 2 * self.operands(ran.computation, op)[1].nbytes
        return read + (0 if any(s.dims in without for s in op.results) else op.nbytes)

    def _inside(self, computation: str, without: frozenset[tuple[int, ...]]) -> int:
        """Of a fusion: of parameters only what is picked, of results that are updated in place only the update."""
        ops = self.computations[computation]
        users: dict[str, list[Op]] = {op.name: [] for op in ops}
        for op in ops:
            for name in op.operands:
                if name in users:
                    users[name].append(op)
        total = sum(
            self._parameter(op, users) for op in ops if op.kind == "parameter" and op.results[0].dims not in without
        )
        root = next(op for op in ops if op.root)
        written = [self._source(name, computation) for name in root.operands] if root.kind == "tuple" else [root]
        for op in written:
            op = self._source(op.name, computation) if op.kind in _VIEWS else op
            if op.kind in ("dynamic-update-slice", "scatter"):
                total += self.operands(computation, op)[-1 if op.kind == "scatter" else 1].nbytes
            else:
                total += 0 if any(s.dims in without for s in op.results) else op.nbytes
        return total

    def _parameter(self, op: Op, users: Mapping[str, list[Op]]) -> int:
        """Bytes that are read of a fusion's parameter."""
        read = 0
        for user in users[op.name]:
            if user.kind in _VIEWS:
                read += self._parameter(user, users)
            elif user.kind in _PICKS and user.operands[0] == op.name:
                read += user.nbytes
            elif user.kind in ("dynamic-update-slice", "scatter") and user.operands[0] == op.name:
                continue
            else:
                return op.nbytes
        return min(read, op.nbytes)

    def _source(self, name: str, computation: str) -> Op:
        """The instruction behind views."""
        op = self._by_name[computation][name]
        while op.kind in _VIEWS and op.operands[0] in self._by_name[computation]:
            op = self._by_name[computation][op.operands[0]]
        return op


@dataclass(frozen=True)
class Product:
    """A matrix product, and who computes it: `dot` is code that XLA generates itself."""

    by: str
    inputs: tuple[Shape, Shape]
    flops: int


def _product(op: Op, inputs: list[Shape]) -> Product:
    contracted = re.search(r'"?lhs_contracting_dim(?:ension)?s"?[=:][\[{]([\d",]*)[\]}]', op.attributes)
    numbers = re.findall(r"\d+", contracted[1]) if contracted else [str(len(inputs[0].dims) - 1)]
    depth = math.prod(inputs[0].dims[int(n)] for n in numbers)
    return Product(op.target or op.kind, (inputs[0], inputs[1]), 2 * depth * op.results[0].size)


def _op(name: str, rest: str, root: bool) -> Op:
    """`bf16[2]{0} add(%a, %b), ...`; the type of a tuple stands in parentheses."""
    cut = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opened = rest.index("(", cut)
    closed = _closing(rest, opened)
    results = tuple(
        Shape(dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _ARRAY.findall(rest[:cut])
    )
    kind, inside = rest[cut:opened].strip(), rest[opened + 1 : closed]
    operands = (inside,) if kind in ("parameter", "constant") else tuple(re.findall(r"%([\w.-]+)", inside))
    return Op(name, kind, results, operands, rest[closed + 1 :], root)


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at `at` closes."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unbalanced: {text[at : at + 60]}")
