"""Warnings of steps that train otherwise than they read.

They read the program that `jaxsparse.check` traces. There it doesn't matter in which containers a
trainer keeps its states.
"""

import dataclasses
import functools
import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from jaxsparse.comm import compat
from jaxsparse.comm.meshes import MOMENTUM, SCOPE

# Optax's clips, by norm or by value, are in this file, and have one of these operations. To look at
# all others' frames would take long.
_CLIPS, _HAVE = "/optax/transforms/_clipping.py", {"select_n", "clamp", "max", "min", "jit", "pjit"}
# Optax's functions that keep a momentum: of SGD, and the moments of Adam, Muon and Lion.
_MOMENTA, _DECAY = {"trace", "tree_update_moment"}, "add_decayed_weights"

# What a value is made of, as bits: state or parameters, and updates of an exchange with momentum.
# The bits above these are one for each array that exchanges deliver.
_OTHERS, _MOMENTUM, _DELIVERED = 1, 2, 2


def warn_of_chains(program: Jaxpr, gradients: int) -> None:
    """Warns of clips, momenta, weight decays and frozen leaves in the wrong place.

    Args:
        program: the update of all workers, without its exchanges.
        gradients: number of its first arguments that are gradients. Others are state and
            parameters.
    """
    found = _Flow()
    others = len(program.invars) - gradients
    returned = found.flow(program, [0] * gradients + [_OTHERS] * others)
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
    read = _joined(returned)
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


@dataclasses.dataclass
class _Flow:
    """What was found so far, on the way through a program from its beginning."""

    momentum_twice: bool = False
    clips_momentum: bool = False
    decays_without_momentum: bool = False
    # Size of each array that exchanges deliver, and the equation that makes it.
    delivered: list[tuple[int, Any]] = dataclasses.field(default_factory=list)

    def flow(self, program: Jaxpr, given: Sequence[int]) -> list[int]:
        """What the outputs of a program are made of, given the same of its inputs."""
        bits = dict(zip(program.invars, given))
        of = lambda x: 0 if isinstance(x, Literal) else bits.get(x, 0)
        for equation in program.eqns:
            inputs = [of(x) for x in equation.invars]
            stack = compat.name_stack(equation)
            if SCOPE in stack:
                outputs = self._exchanged(equation, inputs, MOMENTUM in stack)
            else:
                self._look_at(equation, inputs)
                outputs = self._through(equation, inputs)
            bits.update(zip(equation.outvars, outputs))
        return [of(x) for x in program.outvars]

    def _exchanged(self, equation: Any, inputs: Sequence[int], has_momentum: bool) -> list[int]:
        """What an equation of an exchange makes: of nothing, an array that it delivers."""
        made = _joined(inputs) >> _DELIVERED << _DELIVERED
        if all(isinstance(x, Literal) for x in equation.invars):
            if not any(e is equation for _, e in self.delivered):  # in a loop it comes again
                self.delivered.append((math.prod(equation.outvars[0].aval.shape), equation))
            at = [e is equation for _, e in self.delivered].index(True)
            made |= 1 << _DELIVERED + at | (_MOMENTUM if has_momentum else 0)
        return [made] * len(equation.outvars)

    def _look_at(self, equation: Any, inputs: Sequence[int]) -> None:
        name = equation.primitive.name
        # Parameters that an update was added to are no update any more.
        has_momentum = any(x & _MOMENTUM and not x & _OTHERS for x in inputs)
        if has_momentum:
            files, functions = compat.optax_frames(equation)
            is_clip = name in _HAVE and any(file.endswith(_CLIPS) for file in files)
            self.clips_momentum |= is_clip
            self.momentum_twice |= not functions.isdisjoint(_MOMENTA)
            self.decays_without_momentum |= _DECAY in functions

    def _through(self, equation: Any, inputs: Sequence[int]) -> list[int]:
        """What the outputs of any other equation are made of."""
        every, programs = _joined(inputs), list(compat.inner_programs(equation.params))
        outputs = [0 if programs else every] * len(equation.outvars)
        for inner in programs:
            n = len(inner.invars)
            made = self.flow(inner, inputs[len(inputs) - n :] if n <= len(inputs) else [every] * n)
            if equation.primitive.name == "scan":  # what it carries goes through it again
                first, carried = compat.carried_by(equation)
                again = [*inputs]
                for _ in range(carried):  # enough, and most often one
                    before = [*again]
                    for i in range(carried):
                        again[first + i] |= made[i]
                    if again == before:
                        break
                    made = self.flow(inner, again)
            if equation.primitive.name == "while" or len(made) != len(outputs):
                made = [every | _joined(made)] * len(outputs)
            outputs = [a | b for a, b in zip(outputs, made)]
        return outputs


def _joined(bits: Sequence[int]) -> int:
    return functools.reduce(operator.or_, bits, 0)
