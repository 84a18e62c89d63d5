"""Which tensors to compress: by what compressing costs on a device, measured, and what it saves."""

from jaxsparse.tensors.measure import profile as profile
from jaxsparse.tensors.profiles import Point as Point
from jaxsparse.tensors.profiles import Profile as Profile
from jaxsparse.tensors.selection import TensorSelection as TensorSelection
from jaxsparse.tensors.selection import TensorTimes as TensorTimes
from jaxsparse.tensors.selection import select_tensors as select_tensors

__all__ = [
    "Point",
    "Profile",
    "TensorSelection",
    "TensorTimes",
    "profile",
    "select_tensors",
]
