"""Local updates: workers train alone for some steps, and then exchange their displacements."""

from jaxsparse.outer.fragments import Streaming as Streaming
from jaxsparse.outer.local_steps import LocalSteps as LocalSteps
from jaxsparse.outer.worker import LocalState as LocalState
