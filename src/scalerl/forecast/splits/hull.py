"""Places within the hull of a few points on a line or in a plane."""

from __future__ import annotations

import numpy as np

from scalerl.errors import CannotAnswerError

_SIDE, _ON_LINE = 33, 201


def places_within(points: np.ndarray) -> np.ndarray:
    """Places (H, 1 or 2) within the hull of points (c, 1 or 2) from -1 to 1: a lattice, the hull's edge, and
    the points themselves; along the line, where all points are on one."""
    if points.shape[1] == 1:
        return np.linspace(points.min(), points.max(), _ON_LINE)[:, None]
    centre = points.mean(axis=0)
    _, size, axes = np.linalg.svd(points - centre)
    if size[0] < 1e-9:
        raise CannotAnswerError("the grid is one cell")
    if size[1] < 1e-9:
        along = (points - centre) @ axes[0]
        return centre + np.linspace(along.min(), along.max(), _ON_LINE)[:, None] * axes[0]
    corners = _corners(points)
    side = np.linspace(-1, 1, _SIDE)
    lattice = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    after = np.roll(corners, -1, axis=0)
    # Counterclockwise, the inside is to the left of every edge.
    inside = np.ones(len(lattice), dtype=bool)
    edge = []
    for one, other in zip(corners, after, strict=True):
        inside &= _turn(one, other, lattice) >= -1e-9
        edge.append(one + np.linspace(0, 1, _SIDE)[:, None] * (other - one))
    return np.unique(np.vstack([lattice[inside], *edge, points]), axis=0)


def _corners(points: np.ndarray) -> np.ndarray:
    """Corners of the convex hull, counterclockwise (Andrew's monotone chain)."""
    ordered = [tuple(point) for point in np.unique(points, axis=0).tolist()]

    def chain(of: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
        out: list[tuple[float, ...]] = []
        for point in of:
            while len(out) > 1 and _turn(np.array(out[-2]), np.array(out[-1]), np.array([point]))[0] <= 1e-12:
                out.pop()
            out.append(point)
        return out[:-1]

    return np.array(chain(ordered) + chain(ordered[::-1]))


def _turn(one: np.ndarray, other: np.ndarray, then: np.ndarray) -> np.ndarray:
    """Positive where `then` (k, 2) is to the left of the way from one to other."""
    along, away = other - one, then - one
    return along[0] * away[:, 1] - along[1] * away[:, 0]
