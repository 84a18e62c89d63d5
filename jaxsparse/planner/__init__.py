"""Says what compression gains and costs: leave your trainer as it is, or take this recipe."""

from jaxsparse.planner.measuring import (
    Autotuned as Autotuned,
    autotune as autotune,
    measure_network as measure_network,
)
from jaxsparse.planner.tensors import (
    TensorSelection as TensorSelection,
    select_tensors as select_tensors,
    time_codec as time_codec,
)
