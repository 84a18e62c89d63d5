"""Batches of sparse rows with static shapes, and how much room their gradients need."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from data import Rows


class Batch(NamedTuple):
    """The rows of all workers, those of a worker renumbered to the features that it touches.

    With W workers, b rows for each, at most z features in a row and t in a worker's rows.
    """

    touched: np.ndarray  # int32[W * t]: features, distinct for a worker; the number of them if none
    positions: np.ndarray  # int32[W * b, z]: places in `touched`
    values: np.ndarray  # float32[W * b, z]: 0 where a row has fewer features
    labels: np.ndarray  # int32[W * b]


@dataclasses.dataclass(frozen=True)
class Room:
    """The static shapes that the fullest step of a run needs, so that nothing is ever left out.

    Attributes:
        features: touched by the rows of one worker.
        row: features of a row.
        to_owner: gradient entries of one worker that lie in one of W equal ranges.
        of_owner: those of all workers together in one range, each index counted once.
    """

    features: int
    row: int
    to_owner: int
    of_owner: int


class Batches:
    """Random batches, the same ones for every exchange.

    Args:
        rows: to choose from, with replacement.
        workers: W.
        per_worker: rows of each, b.
        columns: of the model: gradient entries for each feature.
        steps: number of batches.
        seed: of the choice.
    """

    def __init__(
        self, rows: Rows, *, workers: int, per_worker: int, columns: int, steps: int, seed: int
    ):
        rng = np.random.default_rng(seed)
        size = (steps, workers, per_worker)
        self._chosen = rng.integers(len(rows.labels), size=size)
        self._rows = rows
        self.steps = steps
        total = rows.features.shape[1]
        entries = -(-total * columns // workers)  # of a range
        features = row = to_owner = of_owner = 1
        for step in self._chosen:
            touched = [np.unique(rows.features[own].indices) for own in step]
            features = max(features, *map(len, touched))
            row = max(row, int(np.diff(rows.features[step.reshape(-1)].indptr).max()))
            owned = [_owned(own, columns, entries) for own in touched]
            to_owner = max(to_owner, *owned)
            of_owner = max(of_owner, _owned(np.unique(np.concatenate(touched)), columns, entries))
        self.room = Room(features, row, to_owner, of_owner)

    def __iter__(self) -> Iterator[Batch]:
        for step in self._chosen:
            parts = [self._worker(own) for own in step]
            yield Batch(*(np.concatenate(part) for part in zip(*parts)))

    def _worker(self, chosen: np.ndarray) -> Batch:
        own = self._rows.features[chosen]
        touched, place = np.unique(own.indices, return_inverse=True)
        lengths = np.diff(own.indptr)
        at = (
            np.repeat(np.arange(len(chosen)), lengths),
            np.arange(own.nnz) - np.repeat(own.indptr[:-1], lengths),
        )
        positions = np.zeros((len(chosen), self.room.row), np.int32)
        values = np.zeros(positions.shape, np.float32)
        positions[at], values[at] = place, own.data
        padded = np.full(self.room.features, own.shape[1], np.int32)
        padded[: len(touched)] = touched
        return Batch(padded, positions, values, self._rows.labels[chosen])


def _owned(features: np.ndarray, columns: int, entries: int) -> int:
    """The most gradient entries of these features in one range of so many entries."""
    if not len(features):
        return 0
    indices = features[:, None].astype(np.int64) * columns + np.arange(columns)
    return int(np.bincount((indices // entries).reshape(-1)).max())
