"""What an exchange costs: bytes, from compiled or traced programs, and a model of the time."""

from jaxsparse.cost.codecs import CodecProfile as CodecProfile
from jaxsparse.cost.computing import (
    exchange_seconds as exchange_seconds,
    profile_codecs as profile_codecs,
)
from jaxsparse.cost.leaf_groups import Group as Group
from jaxsparse.cost.networks import fit_link as fit_link, measure_network as measure_network
from jaxsparse.cost.planner import plan as plan
from jaxsparse.cost.plans import GroupChoice as GroupChoice, Plan as Plan, Prediction as Prediction
from jaxsparse.cost.predicting import usual as usual
from jaxsparse.cost.report import (
    Collective as Collective,
    Conditional as Conditional,
    WireBytes as WireBytes,
)
from jaxsparse.cost.traced import traced_bytes as traced_bytes
from jaxsparse.cost.traffic import wire_bytes as wire_bytes
from jaxsparse.network import (
    Link as Link,
    Network as Network,
    Timing as Timing,
    Traffic as Traffic,
    dense_all_reduce as dense_all_reduce,
    rounds as rounds,
)

__all__ = [
    "CodecProfile",
    "Collective",
    "Conditional",
    "Group",
    "GroupChoice",
    "Link",
    "Network",
    "Plan",
    "Prediction",
    "Timing",
    "Traffic",
    "WireBytes",
    "dense_all_reduce",
    "exchange_seconds",
    "fit_link",
    "measure_network",
    "plan",
    "profile_codecs",
    "rounds",
    "traced_bytes",
    "usual",
    "wire_bytes",
]
