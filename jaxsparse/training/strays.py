"""A compiled step that warns of collectives besides the exchange that cross the workers' axis."""

import functools
import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from jaxsparse import traffic
from jaxsparse.training.meshes import SCOPE

# Below _FEW_BYTES there is no warning, because metrics may cross the axis. A warning names the
# _NAMED largest collectives.
_FEW_BYTES, _NAMED = 1024, 4


class Watched:
    """Behaves as `run`, and warns at the first call if more than the exchange crosses the axis."""

    def __init__(self, run: jax.stages.Wrapped, mesh: Mesh, axis_name: str) -> None:
        functools.update_wrapper(self, run)
        self._run, self._mesh, self._axis_name = run, mesh, axis_name
        self._is_told = False

    def __call__(self, *args: Any) -> Any:
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
        if not self._is_told and not is_traced:
            self._is_told = True
            # JAX keeps the program: the call does not compile again.
            _warn_of_strays(self._run.lower(*args).compile(), self._mesh, self._axis_name)
        return self._run(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def _warn_of_strays(program: Any, mesh: Mesh, axis_name: str) -> None:
    """Warns of collectives besides the exchange that cross the axis, beyond a few metrics."""
    try:
        strays = traffic.crossing(program, axis_name=axis_name, mesh=mesh, outside=SCOPE)
    except ValueError as error:
        warnings.warn(
            f"data_parallel could not read what crosses {axis_name!r}: {error}", stacklevel=4
        )
        return
    received = sum(stray.received_bytes for stray in strays)
    if received < _FEW_BYTES:
        return
    largest = sorted(strays, key=lambda stray: -stray.received_bytes)[:_NAMED]
    warnings.warn(
        f"besides the exchange, {len(strays)} collectives of the step cross {axis_name!r}, and a "
        f"device receives {received:,.0f} bytes by them: {'; '.join(map(str, largest))}. Is a "
        f"batch not split over {axis_name!r}, or a gradient or activation averaged over it? XLA "
        "moves some lookups in sharded tables across all axes, and vmap convolutions: see "
        "data_parallel.",
        stacklevel=4,
    )
