"""What a TPU's program sends to other slices.

XLA:TPU compiles a program for one slice. Over the network between slices (DCN), its runtime,
megascale, runs the collectives: the program hands it the operand by a `send` to the host, and takes
the result by a `recv`. Their attributes say which collective it is, and of which devices. A device
is numbered as JAX numbers it: 100,000 times its slice, from 1 on, and its place there.
"""

import itertools
import re
from collections.abc import Mapping

from jaxsparse.traffic.hlo import Instruction

_RUNTIME = "xla_megascale_runtime"
_PER_SLICE = 100_000
_OPCODES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_ATTRIBUTE = re.compile(r'\b_xla_(\w+)=("[^"]*"|\{(?:\{[^{}]*\},?)*\})')
_PRODUCT = re.compile(r"\{([\d,:]*)\}x\{([\d,:]*)\}")


def is_over_slices(instruction: Instruction) -> bool:
    """Whether it is a `send` to other slices, or a `recv` from them."""
    return instruction.opcode in ("send", "recv") and _RUNTIME in instruction.attributes


def collective_of(send: Instruction) -> tuple[str, str, list[list[int]]]:
    """The collective that a `send` to other slices is: its opcode, its name, its groups of devices.

    Raises:
        ValueError: it has another form.
    """
    attributes: Mapping[str, str] = {
        name: text.strip('"')
        for name, text in _ATTRIBUTE.findall(send.attributes.partition("metadata=")[0])
    }
    kind, target = attributes.get("megascale_transfer_type"), attributes.get("megascale_target", "")
    pairs = re.findall(r"(\d+)->(\d+)", target)
    if product := _PRODUCT.fullmatch(target):
        slices, places = map(_numbers, product.groups())
        groups = [[_PER_SLICE * s + place for s in slices] for place in places]
    elif pairs:
        groups = [[int(source), int(to)] for source, to in pairs if source != to]
    else:
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", target)]
    if kind not in _OPCODES or not any(groups) or bool(pairs) != (kind == "ONE_TO_ONE"):
        raise ValueError(
            f"{send.opcode} {send.name!r} goes to other slices in a way that is not understood "
            f"(transfer type {kind}, target {target[:60]!r}): report the HLO line to have it added"
        )
    name = attributes.get("host_transfer_rendezvous", send.name)
    return _OPCODES[kind], name, groups


def device_of(slice_index: int, place: int) -> int:
    """The number of a device, in a slice counted from 0."""
    return _PER_SLICE * (slice_index + 1) + place


def _numbers(text: str) -> list[int]:
    """Numbers, and ranges of them such as 0:3, whose end belongs to them."""
    ends = ([int(x) for x in part.split(":")] for part in text.split(",") if part)
    return [*itertools.chain.from_iterable(range(end[0], end[-1] + 1) for end in ends)]
