"""Local updates: workers train alone for some steps, and then exchange their displacements."""

from jaxsparse.outer.fragments import Streaming as Streaming
from jaxsparse.outer.local_steps import LocalSteps as LocalSteps
from jaxsparse.outer.optimizers import (
    bmuf as bmuf,
    diloco as diloco,
    mean as mean,
    slowmo as slowmo,
    sparse_loco as sparse_loco,
)
from jaxsparse.outer.worker import LocalState as LocalState
