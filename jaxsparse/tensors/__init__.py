"""Which tensors to compress: by what compressing costs on a device, measured, and what it saves."""

from jaxsparse.tensors.measure import profile as profile
from jaxsparse.tensors.profiles import Point as Point, Profile as Profile
from jaxsparse.tensors.selection import (
    TensorSelection as TensorSelection,
    TensorTimes as TensorTimes,
    select_tensors as select_tensors,
)

__all__ = [
    "Point",
    "Profile",
    "TensorSelection",
    "TensorTimes",
    "profile",
    "select_tensors",
]
