"""The named systems as Optax transformations, each a few lines around `error_feedback`."""

from jaxsparse.transforms.baselines import dense as dense
from jaxsparse.transforms.baselines import true_top_k as true_top_k
from jaxsparse.transforms.sketched import sketched_sgd as sketched_sgd
from jaxsparse.transforms.sparcml import sparcml as sparcml
from jaxsparse.transforms.spardl import spardl as spardl
from jaxsparse.transforms.sparse import gtopk as gtopk
from jaxsparse.transforms.sparse import ok_topk as ok_topk
from jaxsparse.transforms.sparse import top_k as top_k
