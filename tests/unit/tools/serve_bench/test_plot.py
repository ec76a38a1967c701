"""What is drawn of a run."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from headrace.tools.serve_bench.plot import HEIGHT, WIDTH, draw

SVG = "{http://www.w3.org/2000/svg}"


def test_each_curve_rises_inside_the_picture() -> None:
    root = ET.fromstring(draw({"first token": [3.0, 1.0, 200.0] * 500, "whole answer": [5.0], "none": []}))  # noqa: S314  # drawn by us
    lines = [line.attrib["points"] for line in root.iter(f"{SVG}polyline")]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
        assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert "first token" in names
    assert "none" not in names


def test_nothing_is_drawn_of_nothing() -> None:
    assert not list(ET.fromstring(draw({"first token": [], "whole answer": [0.0]})).iter(f"{SVG}polyline"))  # noqa: S314  # drawn by us
