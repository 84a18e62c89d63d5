"""Which system suits a model and a network: both measured, the exchange predicted, and a choice."""

from jaxsparse.network import Link as Link
from jaxsparse.network import Network as Network
from jaxsparse.network import Timing as Timing
from jaxsparse.network import rounds as rounds
from jaxsparse.planner.computing import profile_systems as profile_systems
from jaxsparse.planner.computing import profile_tensors as profile_tensors
from jaxsparse.planner.computing import time_exchange as time_exchange
from jaxsparse.planner.leaf_groups import Group as Group
from jaxsparse.planner.networks import fit_link as fit_link
from jaxsparse.planner.networks import measure_network as measure_network
from jaxsparse.planner.planning import plan as plan
from jaxsparse.planner.plans import GroupChoice as GroupChoice
from jaxsparse.planner.plans import Plan as Plan
from jaxsparse.planner.plans import Prediction as Prediction
from jaxsparse.planner.tensors import TensorPoint as TensorPoint
from jaxsparse.planner.tensors import TensorProfile as TensorProfile
from jaxsparse.planner.tensors import TensorSelection as TensorSelection
from jaxsparse.planner.tensors import TensorTimes as TensorTimes
from jaxsparse.planner.tensors import select_tensors as select_tensors
from jaxsparse.profiles import Floor as Floor
from jaxsparse.profiles import SystemPoint as SystemPoint
from jaxsparse.profiles import SystemProfile as SystemProfile
