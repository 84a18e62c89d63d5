"""A warning of collectives besides the exchange that cross the workers' axis."""

import warnings
from typing import Any

import jax
from jax.sharding import Mesh

from jaxsparse import traffic
from jaxsparse.comm.meshes import SCOPE

# Below _FEW_BYTES there is no warning, because metrics may cross the axis. A warning names the
# _NAMED largest collectives.
_FEW_BYTES, _NAMED = 1024, 4


def warn_of_strays(step: jax.stages.Wrapped, mesh: Mesh, axis_name: str, args: Any) -> None:
    """Warns of collectives besides the exchange that cross the axis, beyond a few metrics."""
    program = step.lower(*args).compile()  # JAX keeps it: the call does not compile again
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
