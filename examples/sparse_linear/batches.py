"""Batches of sparse rows with static shapes, and how much room their gradients need."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from data import Rows


class Batch(NamedTuple):
    """The rows of all workers in one step, with small numbers for the features that they touch.

    There are W workers with b rows each. A row has at most z features, and a worker's rows touch at
    most t features.
    """

    # int32[W * t]: each worker's distinct features, padded with the number of all features
    touched: np.ndarray
    positions: np.ndarray  # int32[W * b, z]: places in the worker's part of `touched`
    values: np.ndarray  # float32[W * b, z]: 0 where a row has fewer features
    labels: np.ndarray  # int32[W * b]


@dataclasses.dataclass(frozen=True)
class Room:
    """The static shapes that the fullest step of a run needs, so that nothing is ever left out.

    Attributes:
        features: number of features that the rows of one worker touch.
        row: number of features of a row.
        to_owner: number of gradient entries of one worker that lie in one of W equal ranges.
        of_owner: number of gradient entries of all workers together in one of these ranges. Each
            index counts once.
    """

    features: int
    row: int
    to_owner: int
    of_owner: int


class Batches:
    """Random batches, the same ones for every exchange.

    Args:
        rows: rows to choose from, with replacement.
        workers: number of workers, W.
        per_worker: number of rows of each worker, b.
        columns: number of gradient entries for each feature: the model's columns.
        steps: number of batches.
        seed: seed of the choice.
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
        entries = -(-total * columns // workers)  # elements of a range
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
    """The most gradient entries that these features have in one range of `entries` elements."""
    if not len(features):
        return 0
    indices = features[:, None].astype(np.int64) * columns + np.arange(columns)
    return int(np.bincount((indices // entries).reshape(-1)).max())
