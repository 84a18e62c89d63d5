"""Residual and momentum around any reducer, as Optax transformations."""

from jaxsparse.feedback.levels import Levels as Levels
from jaxsparse.feedback.one_reducer import error_feedback as error_feedback
from jaxsparse.feedback.planned import Planned as Planned, planned_feedback as planned_feedback
from jaxsparse.feedback.state import ErrorFeedbackState as ErrorFeedbackState
