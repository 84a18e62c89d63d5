"""Groups of workers within one axis, expressed by permutations.

Permutations and not `axis_index_groups`: those don't exist under `jax.vmap`.
"""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Int

from jaxsparse.collectives import wire


@dataclasses.dataclass(frozen=True)
class Group:
    """Divides the workers of an axis into groups of `size`, which all do the same at once.

    Members of a group are `stride` ranks apart: with T teams of n consecutive workers,
    Group(axis, n, 1) are the teams and Group(axis, T, n) those of the same rank in each team.
    """

    axis_name: str | None
    size: int
    stride: int = 1

    @classmethod
    def whole(cls, axis_name: str | None) -> "Group":
        """All workers of the axis in one group."""
        return cls(axis_name, wire.axis_size(axis_name))

    @classmethod
    def teams(cls, axis_name: str | None, teams: int) -> "tuple[Group, Group]":
        """Teams of consecutive workers, and the groups of those of equal rank in each team.

        Raises:
            ValueError: the workers can't be divided into so many teams.
        """
        workers = wire.axis_size(axis_name)
        if teams < 1 or workers % teams:
            divisors = [t for t in range(1, workers + 1) if workers % t == 0]
            raise ValueError(
                f"teams={teams} does not divide the {workers} workers of axis {axis_name!r}: "
                f"use one of {divisors}"
            )
        team = workers // teams
        return cls(axis_name, team), cls(axis_name, teams, team)

    @property
    def rank(self) -> Int[Array, ""]:
        """This worker's place in its group."""
        return wire.axis_index(self.axis_name) // self.stride % self.size

    def shift(self, x: Array, distance: int) -> Array:
        """Sends `x` to the member `distance` further round the group; returns what arrives."""
        return self._move(x, lambda place: (place + distance) % self.size)

    def exchange(self, x: Array, distance: int) -> Array:
        """Swaps `x` with member rank XOR distance, both powers of two."""
        return self._move(x, lambda place: place ^ distance)

    def _move(self, x: Array, target: Callable[[int], int]) -> Array:
        pairs = []
        for worker in range(wire.axis_size(self.axis_name)):
            place = worker // self.stride % self.size
            pairs.append((worker, worker + (target(place) - place) * self.stride))
        return wire.permute(x, self.axis_name, pairs)
