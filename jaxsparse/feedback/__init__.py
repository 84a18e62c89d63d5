"""Residual and momentum around any reducer, as Optax transformations."""

from jaxsparse.feedback.store import (
    ErrorFeedbackState as ErrorFeedbackState,
    states_in as states_in,
)
from jaxsparse.feedback.transformations import (
    Exchange as Exchange,
    exchange as exchange,
    partition as partition,
)
