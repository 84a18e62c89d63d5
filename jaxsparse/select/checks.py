"""What every selection asks of its arguments."""

from jax import Array


def check_vector(name: str, x: Array) -> None:
    """Raises ValueError unless `x` is a vector whose indices, and its size, fit into int32."""
    if x.ndim != 1:
        raise ValueError(f"{name} has shape {x.shape}, but must be a vector: pass {name}.ravel()")
    if x.size >= 2**31:
        raise ValueError(
            f"{name} has {x.size} elements, but indices are int32: split it into vectors of less "
            "than 2**31 (bucket_size of a reducer does)"
        )
