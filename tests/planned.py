"""A profile for tests of the planner."""

from jaxsparse import systems
from jaxsparse.planner import Floor, SystemPoint, SystemProfile
from jaxsparse.systems.sparcml import ALGORITHMS


def profile(passes=10.0, floor=1e-9):
    """A profile: each system takes `passes` passes, dense takes one; `floor` seconds an element."""
    names = {*systems.WITH_VARIANTS, *(f"sparcml:{name}" for name in ALGORITHMS)} - {
        "dense",
        "sparcml",
    }
    points = [SystemPoint(name, 2**10, 4, None, passes) for name in sorted(names)]
    points.append(SystemPoint("dense", 2**10, 4, None, 1.0))
    return SystemProfile(tuple(points), (Floor(2**10, floor * 2**10),))
