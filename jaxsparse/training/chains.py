"""Warnings of chains that train otherwise than they read: clips in front, momentum twice."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr

from jaxsparse.comm import compat
from jaxsparse.comm.meshes import SCOPE
from jaxsparse.feedback import ErrorFeedbackState

# Optax's clips, by norm or by value, are in this file, and have one of these operations. To look at
# all others' frames would take long.
_FILE, _HAVE = "/optax/transforms/_clipping.py", {"select_n", "clamp", "max", "min", "jit", "pjit"}


def warn_of_clips(program: Jaxpr) -> None:
    """Warns of clips of Optax in front of an exchange, in a program traced for the check."""
    if _clips_first(program):
        warnings.warn(
            "the step clips gradients in front of the exchange: each worker's own, whose norm is "
            "larger than that of their mean. A dense trainer clips the mean: switch this clip off, "
            "and chain it behind the exchange, as in optax.chain(jaxsparse.spardl(0.01), "
            "optax.clip_by_global_norm(1.0), optax.adamw(lr)). To clip each worker's on purpose, "
            'filter this warning: warnings.filterwarnings("ignore", "the step clips")',
            stacklevel=5,
        )


def warn_of_two_momenta(args: Any) -> None:
    """Warns of an Optax chain with momentum in its exchange, and in a trace behind it.

    It sees the states of `optax.chain(exchange, ...)` with `optax.sgd(momentum=)` or `optax.trace`.
    It does not see chains within chains, states that Flax nnx has split, and moments of Adam.
    """
    is_chain = lambda node: type(node) is tuple and any(map(_has_momentum, node))
    found = jax.tree.leaves(args, is_leaf=is_chain)
    if any(map(_has_trace_behind, filter(is_chain, found))):
        warnings.warn(
            "momentum acts twice: in the exchange (momentum=) and behind it, as in "
            "optax.sgd(momentum=). Two of 0.9 make updates 100 times as long as a gradient: leave "
            "one out (None, since 0.0 keeps a state, too). To have both on purpose, filter this "
            'warning: warnings.filterwarnings("ignore", "momentum acts twice")',
            stacklevel=4,
        )


def _has_momentum(node: Any) -> bool:
    return isinstance(node, ErrorFeedbackState) and bool(node.momentum)


def _has_trace_behind(chain: tuple[Any, ...]) -> bool:
    """Whether a trace comes behind an exchange with momentum. In front it is a worker's own."""
    behind = chain[[*map(_has_momentum, chain)].index(True) + 1 :]
    is_trace = lambda node: isinstance(node, optax.TraceState)
    return any(map(is_trace, jax.tree.leaves(behind, is_leaf=is_trace)))


def _clips_first(program: Jaxpr) -> bool:
    """Whether a clip comes before the first exchange. False without an exchange."""
    clipped = False
    for equation in _all(program):
        if SCOPE in compat.name_stack(equation):
            return clipped
        may_be = equation.primitive.name in _HAVE and not clipped
        clipped |= may_be and any(file.endswith(_FILE) for file in compat.files_of(equation))
    return False


def _all(program: Jaxpr) -> Iterator[Any]:
    for equation in program.eqns:
        yield equation
        for inner in compat.inner_programs(equation.params):
            yield from _all(inner)
