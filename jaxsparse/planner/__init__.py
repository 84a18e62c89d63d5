"""Measures networks and devices, predicts exchanges, and chooses a system for a model."""

from jaxsparse.planner.computing import (
    profile_systems as profile_systems,
    profile_tensors as profile_tensors,
    time_exchange as time_exchange,
)
from jaxsparse.planner.forecasts import (
    Forecast as Forecast,
    RecipePlan as RecipePlan,
    plan_recipes as plan_recipes,
)
from jaxsparse.planner.islands import (
    IslandRound as IslandRound,
    IslandsPlan as IslandsPlan,
    plan_islands as plan_islands,
)
from jaxsparse.planner.links import fit_link as fit_link, measure_network as measure_network
from jaxsparse.planner.losses import Loss as Loss
from jaxsparse.planner.network import (
    Link as Link,
    Network as Network,
    Timing as Timing,
    rounds as rounds,
)
from jaxsparse.planner.planning import plan as plan
from jaxsparse.planner.plans import (
    Plan as Plan,
    Prediction as Prediction,
)
from jaxsparse.planner.profiles import (
    Floor as Floor,
    SystemPoint as SystemPoint,
    SystemProfile as SystemProfile,
)
from jaxsparse.planner.recipes import Recipe as Recipe
from jaxsparse.planner.tensors import (
    TensorPoint as TensorPoint,
    TensorProfile as TensorProfile,
    TensorSelection as TensorSelection,
    TensorTimes as TensorTimes,
    select_tensors as select_tensors,
)
from jaxsparse.planner.trials import Autotuned as Autotuned, autotune as autotune
