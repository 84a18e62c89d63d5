"""Warns about chains that do not train the way they read.

They read the program that `jaxsparse.check` traces. There it doesn't matter in which containers a
trainer keeps its states.
"""

import warnings
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxsparse.feedback.front import MEANS_OF_MOMENTUM
from jaxsparse.feedback.mixtures import (
    DELIVERED,
    NUMBER,
    PARAMETERS,
    STATE,
    Mixtures,
    Operations,
)


def warn_of_chains(program: Jaxpr, gradients: int, parameters: int) -> None:
    """Warns of clips, momenta, weight decays and frozen leaves in the wrong place.

    Args:
        program: the update of all workers, without its exchanges.
        gradients: number of its first arguments that are gradients.
        parameters: number of its last arguments that are parameters. Those between are state.
    """
    found = Mixtures(MEANS_OF_MOMENTUM)
    state = program.invars[gradients : len(program.invars) - parameters]
    avals: list[Any] = [x.aval for x in state]
    is_array = [x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.inexact) for x in avals]
    of_state = [STATE if yes else NUMBER for yes in is_array]
    given = [0] * gradients + of_state + [PARAMETERS] * parameters
    read = found.join(found.program(program, given))
    if found.fading:
        _warn(
            "momentum acts twice: in the exchange (momentum=) and behind it, as in "
            "optax.sgd(momentum=) or Adam. Two of 0.9 make updates of SGD 100 times as long as a "
            "gradient: leave one out (None, since 0.0 keeps a state, too; dgc has 0.9 by itself). "
            "To have both on purpose, filter this warning: "
            'warnings.filterwarnings("ignore", "momentum acts twice")'
        )
    if found.clips:
        _warn(
            "a clip behind the exchange clips its momentum (momentum=), which is up to ten times "
            "as long as a gradient with 0.9. A dense trainer clips gradients, and then adds them "
            "up: leave momentum out of the exchange, as in optax.chain(jaxsparse.spardl(0.01), "
            "optax.clip_by_global_norm(1.0), optax.sgd(lr, momentum=0.9)). To clip it on purpose, "
            'filter this warning: warnings.filterwarnings("ignore", "a clip behind")'
        )
    if found.decays:
        _warn(
            "weight decay behind an exchange with momentum (momentum=) gets none, so with 0.9 it "
            "is ten times as weak as in optax.chain(optax.add_decayed_weights(wd), "
            "optax.sgd(lr, momentum=0.9)): leave momentum out of the exchange, and chain these two "
            "behind it. For a decay that never had momentum, as SGDW's, filter this warning: "
            'warnings.filterwarnings("ignore", "weight decay behind")'
        )
    whole = [size for size, _ in found.delivered]
    lost = [size for i, size in enumerate(whole) if not read >> DELIVERED + i & 1]
    if lost and len(lost) < len(whole):
        _warn(
            f"the step drops {len(lost)} of {len(whole)} arrays that its exchanges "
            f"deliver ({sum(lost):,} of {sum(whole):,} elements), as optax.set_to_zero does with "
            "frozen parameters. Each exchange sends them, and a budget goes to them first if their "
            "gradients are large: take gradients of the others alone, and give the chain these "
            "and their parameters"
        )


def warn_of_masks(program: Jaxpr, other: Jaxpr) -> None:
    """Warns if other operations lead to an exchange in `other`, for parameters of other shapes."""
    here, there = Operations(), Operations()
    for found, each in ((here, program), (there, other)):
        found.program(each, [None] * len(each.invars))
    shapes = {
        shape
        for (shape, made), (_, wanted) in zip(here.delivered, there.delivered)
        if made != wanted
    }
    if shapes:
        _warn(
            "in front of the exchange, gradients have a row for each worker, and what is done to "
            f"parameters of shapes {sorted(shapes)} goes by the number of axes or elements of "
            "their rows, as by a mask or labels that are a function: one for p.ndim > 1 takes "
            "biases, too. Give a tree made from the parameters, jax.tree.map(lambda p: p.ndim > 1, "
            "params), or put the transformation behind the exchange or in jaxsparse.per_worker. If "
            'it is for rows, filter this warning: warnings.filterwarnings("ignore", "in front of '
            'the exchange")',
            above=5,
        )


def _warn(text: str, above: int = 4) -> None:
    """Warns the caller of `jaxsparse.check`, who is so many frames above."""
    warnings.warn(text, stacklevel=above)
