"""Budgets given as a share of the elements."""

import math

from jaxsparse.settings import static_float


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    if not 0 < static_float("density", density) <= 1:
        raise ValueError(f"density={density} must lie in (0, 1]: 0.01 sends 1 % of the elements")


def entries(density: float, size: int, parts: int = 1) -> int:
    """Entries of each of `parts` equal parts of `size` elements, rounded up, at least 1.

    Example:
        >>> entries(0.01, 1000), entries(0.01, 1000, parts=3), entries(0.01, 10)
        (10, 4, 1)
    """
    # Less a hair, for 0.01 * 1000 must not round up to 11.
    return max(1, math.ceil(density * size / parts * (1 - 1e-12)))
