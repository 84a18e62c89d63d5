"""Says what compression gains and costs: leave your trainer as it is, or take this recipe."""

from jaxsparse.comm.links import Link as Link, rounds as rounds
from jaxsparse.planner.measuring import (
    Autotuned as Autotuned,
    autotune as autotune,
    measure_network as measure_network,
)
from jaxsparse.planner.planning import (
    Forecast as Forecast,
    Moved as Moved,
    Plan as Plan,
    plan as plan,
)
from jaxsparse.planner.recipes import RECIPES as RECIPES, Cost as Cost, Recipe as Recipe
from jaxsparse.planner.tensors import (
    TensorSelection as TensorSelection,
    select_tensors as select_tensors,
    time_codec as time_codec,
)
