"""The contract of a reducer, and the reducers: one family a file.

A reducer adds up all workers' vectors with few bytes. It imports the contract and arithmetic, and
nothing of what runs it. `jaxsparse.exchange(reducer)` makes an Optax transformation of it.
"""

from jaxsparse.reducers.base import (
    Gathered as Gathered,
    Info as Info,
    Kept as Kept,
    Reducer as Reducer,
    SeededReducer as SeededReducer,
    Sums as Sums,
)
from jaxsparse.reducers.block_sparse import (
    OmniReduce as OmniReduce,
    SparseAllGather as SparseAllGather,
)
from jaxsparse.reducers.chunked_top_k import ChunkedTopK as ChunkedTopK
from jaxsparse.reducers.dense import Dense as Dense
from jaxsparse.reducers.dragonn import Dragonn as Dragonn
from jaxsparse.reducers.powersgd import PowerSGD as PowerSGD
from jaxsparse.reducers.quantized import (
    GatheredQuantized as GatheredQuantized,
    Quantized as Quantized,
)
from jaxsparse.reducers.random_k import RandomK as RandomK
from jaxsparse.reducers.s2_reducer import S2 as S2
from jaxsparse.reducers.sketched_sgd import SketchedSGD as SketchedSGD
from jaxsparse.reducers.sparcml import SparCML as SparCML
from jaxsparse.reducers.spardl import SparDL as SparDL
from jaxsparse.reducers.stages import Staged as Staged, warm_up as warm_up
from jaxsparse.reducers.top_k import TopK as TopK
from jaxsparse.reducers.true_top_k import TrueTopK as TrueTopK
