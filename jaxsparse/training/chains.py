"""Warnings of steps that train otherwise than they read.

They read the program that `jaxsparse.check` traces. There it doesn't matter in which containers a
trainer keeps its states.
"""

import math
import warnings
from collections.abc import Iterable
from typing import Any

from jax.extend.core import Jaxpr

from jaxsparse.comm.flow import Reading
from jaxsparse.feedback.front import DELIVERED

# What a value is made of, as bits. A state that fades, and a share of the parameters, are scaled. A
# power and a norm are those of updates with momentum; a bound is a norm beside a constant. The bits
# above are one for each array that exchanges deliver.
_PARAMETERS, _STATE, _SCALED, _MOMENTUM, _POWER, _NORM, _BOUND = (1 << i for i in range(7))
_DELIVERED = 7


def warn_of_chains(program: Jaxpr, gradients: int, parameters: int) -> None:
    """Warns of clips, momenta, weight decays and frozen leaves in the wrong place.

    Args:
        program: the update of all workers, without its exchanges.
        gradients: number of its first arguments that are gradients.
        parameters: number of its last arguments that are parameters. Those between are state.
    """
    found = _Behind()
    state = len(program.invars) - gradients - parameters
    given = [0] * gradients + [_STATE] * state + [_PARAMETERS] * parameters
    read = found.join(found.program(program, given))
    if found.momentum_twice:
        _warn(
            "momentum acts twice: in the exchange (momentum=) and behind it, as in "
            "optax.sgd(momentum=) or Adam. Two of 0.9 make updates of SGD 100 times as long as a "
            "gradient: leave one out (None, since 0.0 keeps a state, too; dgc has 0.9 by itself). "
            "To have both on purpose, filter this warning: "
            'warnings.filterwarnings("ignore", "momentum acts twice")'
        )
    if found.clips_momentum:
        _warn(
            "a clip behind the exchange clips its momentum (momentum=), which is up to ten times "
            "as long as a gradient with 0.9. A dense trainer clips gradients, and then adds them "
            "up: leave momentum out of the exchange, as in optax.chain(jaxsparse.spardl(0.01), "
            "optax.clip_by_global_norm(1.0), optax.sgd(lr, momentum=0.9)). To clip it on purpose, "
            'filter this warning: warnings.filterwarnings("ignore", "a clip behind")'
        )
    if found.decays_without_momentum:
        _warn(
            "weight decay behind an exchange with momentum (momentum=) gets none, so with 0.9 it "
            "is ten times as weak as in optax.chain(optax.add_decayed_weights(wd), "
            "optax.sgd(lr, momentum=0.9)): leave momentum out of the exchange, and chain these two "
            "behind it. For a decay that never had momentum, as SGDW's, filter this warning: "
            'warnings.filterwarnings("ignore", "weight decay behind")'
        )
    whole = [size for size, _ in found.delivered]
    lost = [size for i, size in enumerate(whole) if not read >> _DELIVERED + i & 1]
    if lost and len(lost) < len(whole):
        _warn(
            f"the step drops {len(lost)} of {len(whole)} arrays that its exchanges "
            f"deliver ({sum(lost):,} of {sum(whole):,} elements), as optax.set_to_zero does with "
            "frozen parameters. Each exchange sends them, and a budget goes to them first if their "
            "gradients are large: keep them out of it, as in optax.multi_transform({'train': "
            "optax.chain(jaxsparse.spardl(0.01), optimizer), 'freeze': optax.set_to_zero()}, "
            "labels), or take gradients of the others alone"
        )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)


class _Behind(Reading[int]):
    """What stands behind exchanges."""

    nothing = 0

    def __init__(self) -> None:
        super().__init__()
        self.momentum_twice = False
        self.clips_momentum = False
        self.decays_without_momentum = False
        # Size of each array that exchanges deliver, and the equation that makes it.
        self.delivered = list[tuple[int, Any]]()

    def join(self, values: Iterable[int]) -> int:
        made = 0
        for value in values:
            made |= value
        return made

    def operation(self, equation: Any, inputs: list[int]) -> list[int]:
        name, made = equation.primitive.name, self.join(inputs)
        label = str(equation.params.get("name")) if name == "name" else ""
        if label.startswith(DELIVERED):
            made = made >> _DELIVERED << _DELIVERED | self._deliver(equation, label != DELIVERED)
        elif name == "is_finite":
            made = 0
        elif name.startswith("reduce_") and made & (_MOMENTUM | _POWER):
            made = made & ~(_MOMENTUM | _POWER) | _NORM
        else:
            self._look_at(name, inputs)
            is_product = name in ("mul", "div") and all(x & _MOMENTUM for x in inputs)
            if is_product or name == "square" or equation.params.get("y", 1) != 1:
                made = made & ~_MOMENTUM | _POWER
            if equation.outvars[0].aval.dtype == bool:
                made &= ~_MOMENTUM
            if name in ("mul", "div") and made & (_STATE | _PARAMETERS):
                made |= _SCALED
            if name in ("max", "min") and made & _NORM and 0 in inputs:
                made |= _BOUND
        return [made] * len(equation.outvars)

    def _deliver(self, equation: Any, has_momentum: bool) -> int:
        """The bits of an array that an exchange delivers."""
        if not any(e is equation for _, e in self.delivered):  # in a loop it comes again
            self.delivered.append((math.prod(equation.outvars[0].aval.shape), equation))
        at = [e is equation for _, e in self.delivered].index(True)
        return 1 << _DELIVERED + at | (_MOMENTUM if has_momentum else 0)

    def _look_at(self, name: str, inputs: list[int]) -> None:
        # Parameters that an update was added to are no update any more.
        is_update = [bool(x & _MOMENTUM and not x & (_STATE | _PARAMETERS)) for x in inputs]
        if not any(is_update):
            return
        others = [x for x, yes in zip(inputs, is_update) if not yes]
        scaled = self.join(x for x in others if x & _SCALED and not x & _MOMENTUM)
        if name in ("add", "add_any", "sub") and scaled:
            self.decays_without_momentum |= bool(scaled & _PARAMETERS)
            self.momentum_twice |= not scaled & _PARAMETERS
        by_value = name in ("clamp", "max", "min") and not any(others)
        by_norm = name == "select_n" and bool(inputs[0] & _NORM)
        by_bound = name in ("mul", "div") and any(x & _BOUND for x in others)
        self.clips_momentum |= by_value or by_norm or by_bound
