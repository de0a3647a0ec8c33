"""The page that draws latency against load: whole, well formed, and loading nothing."""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from server.bench.plot import Curve, Panel, Picture, page, ticks, write_png

PICTURE = Picture(
    title="load <of> a & b",
    told="10 requests",
    names=("1", "inf", "2"),
    loads=(1.0, 3.5, 2.0),
    panels=(Panel("TTFT", (Curve("median", (5.0, 80.0, 6.0)), Curve("p99", (9.0, 160.0, 12.0)))),),
)


def test_the_page_loads_nothing_and_escapes_names():
    text = page(PICTURE)
    assert not re.search(r"(?:src|href)=|url\(|@import|https?://", text)
    assert "load &lt;of&gt; a &amp; b" in text


def test_points_are_joined_in_the_order_of_the_load():
    [svg] = re.findall(r"<svg.*?</svg>", page(PICTURE))
    found = [line.attrib["points"].split() for line in ET.fromstring(svg).iter("polyline")]
    assert [len(points) for points in found] == [3, 3]
    for points in found:
        across = [float(point.split(",")[0]) for point in points]
        upward = [float(point.split(",")[1]) for point in points]
        assert across == sorted(across)
        assert upward == sorted(upward, reverse=True)  # latency rises, and y counts downwards
    assert "p99 160.0 ms at 3.50 requests/s (asked for inf)" in svg


@pytest.mark.parametrize(
    ("most", "found"),
    [(0.0, [0, 1]), (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]), (7.0, [0, 2, 4, 6, 8]), (160.0, [0, 50, 100, 150, 200])],
)
def test_ticks_are_round(most: float, found: list[float]):
    assert ticks(most) == pytest.approx(found)


def test_a_picture_without_numbers_is_drawn():
    empty = Picture("t", "", ("inf",), (0.0,), (Panel("TTFT", (Curve("median", (0.0,)),)),))
    assert "<polyline" in page(empty)


def test_a_png_needs_matplotlib(tmp_path: Path):
    file = tmp_path / "load.png"
    made = write_png(PICTURE, file)
    assert made == file.exists() == (importlib.util.find_spec("matplotlib") is not None)
