"""Latency against load as a picture: a page with its own drawings, which loads nothing, and a PNG by matplotlib.

Takes points, and knows nothing of where they come from.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 16, 44
COLORS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: a latency in milliseconds, a value for each load."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One latency: its mean, median and percentiles."""

    title: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    told: str
    """What was measured, in a line."""
    names: tuple[str, ...]
    """Of the loads, as they were asked for."""
    loads: tuple[float, ...]
    """Requests a second that were answered."""
    panels: tuple[Panel, ...]


_STYLE = """:root{--ink:#1f2937;--soft:#6b7280;--grid:#e5e7eb;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--grid:#374151;--paper:#111827}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:24px auto;max-width:980px;
padding:0 16px}h1{font-size:20px;margin:0}h2{font-size:15px;margin:0 0 4px}p{color:var(--soft);margin:4px 0 20px}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(380px,1fr));gap:24px}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--grid)}.key{display:inline-block;margin-right:14px;color:var(--soft);font-size:12px}
.key i{display:inline-block;width:14px;height:3px;margin-right:5px;vertical-align:middle}
.wide{overflow-x:auto;margin-top:28px}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--soft);font-weight:500}"""


def page(picture: Picture) -> str:
    """A whole HTML document."""
    title = html.escape(picture.title)
    panels = "\n".join(
        f"<section><h2>{html.escape(panel.title)}</h2>{_keys(panel)}{_drawing(picture, panel)}</section>"
        for panel in picture.panels
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1><p>{html.escape(picture.told)}</p>\n"
        f'<div class="panels">\n{panels}\n</div>\n<div class="wide">{_table(picture)}</div></body></html>\n'
    )


def _keys(panel: Panel) -> str:
    return "".join(
        f'<span class="key"><i style="background:{color}"></i>{html.escape(curve.name)}</span>'
        for curve, color in zip(panel.curves, _colors(), strict=False)
    )


def _drawing(picture: Picture, panel: Panel) -> str:
    across = ticks(max(picture.loads, default=0.0))
    upward = ticks(max((value for curve in panel.curves for value in curve.values), default=0.0))
    x = _scale(across[-1], LEFT, WIDTH - RIGHT)
    y = _scale(upward[-1], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(panel.title)}">']
    parts += (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in upward
    )
    parts += (f'<text x="{x(v):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{v:g}</text>' for v in across)
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">requests/s</text>')
    parts.append(f'<text x="4" y="{TOP - 4}">ms</text>')
    for curve, color in zip(panel.curves, _colors(), strict=False):
        parts += _line(picture, curve, color, x, y)
    return "".join([*parts, "</svg>"])


def _line(
    picture: Picture, curve: Curve, color: str, x: Callable[[float], float], y: Callable[[float], float]
) -> Iterator[str]:
    """Points in the order of the load, joined."""
    points = sorted(zip(picture.loads, curve.values, picture.names, strict=True))
    joined = " ".join(f"{x(load):.1f},{y(value):.1f}" for load, value, _ in points)
    yield f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{joined}"/>'
    for load, value, name in points:
        told = html.escape(f"{curve.name} {value:.1f} ms at {load:.2f} requests/s (asked for {name})")
        yield f'<circle cx="{x(load):.1f}" cy="{y(value):.1f}" r="3.5" fill="{color}"><title>{told}</title></circle>'


def _table(picture: Picture) -> str:
    curves = [(panel.title, curve) for panel in picture.panels for curve in panel.curves]
    heads = ["asked for, req/s", "answered, req/s", *(f"{title}, {curve.name}, ms" for title, curve in curves)]
    rows = [
        [name, f"{load:.2f}", *(f"{curve.values[i]:.1f}" for _, curve in curves)]
        for i, (name, load) in enumerate(zip(picture.names, picture.loads, strict=True))
    ]
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{html.escape(head)}</th>' for head in heads)}</tr>{body}</table>"


def ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to `most` or a little more, about `count` of them."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(power * round_ for round_ in (1, 2, 2.5, 5, 10) if power * round_ * count >= most * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _scale(most: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: low + (high - low) * value / most


def _colors() -> Iterator[str]:
    while True:
        yield from COLORS


class _Axes(Protocol):
    def plot(self, x: Sequence[float], y: Sequence[float], marker: str, label: str) -> object: ...
    def set_title(self, label: str) -> object: ...
    def set_xlabel(self, label: str) -> object: ...
    def set_ylabel(self, label: str) -> object: ...
    def set_ylim(self, bottom: float) -> object: ...
    def grid(self, visible: bool, alpha: float) -> object: ...
    def legend(self) -> object: ...


class _Figure(Protocol):
    def add_subplot(self, rows: int, columns: int, index: int) -> _Axes: ...
    def suptitle(self, text: str) -> object: ...
    def savefig(self, path: Path, dpi: int) -> object: ...


class _Figures(Protocol):
    def __call__(self, figsize: tuple[float, float], layout: str) -> _Figure: ...


def write_png(picture: Picture, path: Path) -> bool:
    """False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    figures = cast(_Figures, importlib.import_module("matplotlib.figure").Figure)
    rows = math.ceil(len(picture.panels) / 2)
    figure = figures(figsize=(11.0, 3.8 * rows + 0.4), layout="constrained")
    figure.suptitle(f"{picture.title}\n{picture.told}")
    for index, panel in enumerate(picture.panels, start=1):
        axes = figure.add_subplot(rows, 2, index)
        for curve in panel.curves:
            loads, values = zip(*sorted(zip(picture.loads, curve.values, strict=True)), strict=True)
            axes.plot(loads, values, marker="o", label=curve.name)
        axes.set_title(panel.title)
        axes.set_xlabel("requests/s")
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0.0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=144)
    return True
