"""Residual and momentum around any reducer, as Optax transformations."""

from jaxsparse.feedback.store import (
    ErrorFeedbackState as ErrorFeedbackState,
    is_exchange as is_exchange,
    states_in as states_in,
)
from jaxsparse.feedback.transformations import (
    error_feedback as error_feedback,
    partition as partition,
)
