"""Quantised all-reduce and random-k on real gradients, with error feedback and without.

`benchmarks/formats.py` has the errors and times of number formats.

    python benchmarks/quantized.py
    python benchmarks/quantized.py --seeds 0 1 2 --momentum 0

14 simulated workers train a small MLP on scikit-learn's digits, as in benchmarks/spardl.py. Means
and standard deviations are over seeds of initial weights and batches. Each row's rate is tuned by
the rule of rates.py, from `--lr` on, by the mean training loss of all seeds. Words are those of
compressed leaves that a worker receives in a step, read from a program traced for 14 devices.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import spardl
from spardl import digits

import jaxsparse
from jaxsparse import error_feedback
from jaxsparse.quantize import QSGD, Format
from jaxsparse.reducers.base import Conservation, Kept, Reducer, Sums, settle
from jaxsparse.systems import SYSTEMS, Quantized
from jaxsparse.systems.dense import Dense
from jaxsparse.systems.random_k import RandomK

WORKERS = spardl.WORKERS


@dataclasses.dataclass(frozen=True)
class WithoutFeedback(Reducer):
    """A reducer whose residual is thrown away."""

    reducer: Any

    @property
    def conservation(self) -> Conservation:
        return "leaks"

    def split(self, sizes: tuple[int, ...], dense_size: int = 0) -> tuple[Reducer, ...]:
        return tuple(map(WithoutFeedback, self.reducer.split(sizes, dense_size)))

    def init(self, size: int) -> Any:
        return self.reducer.init(size)

    def reduce(self, x: jax.Array, state: Any, axis_name: str | None) -> tuple[Sums, Kept]:
        sums, kept = settle(x, *self.reducer.reduce(x, state, axis_name))
        return sums, Kept(jnp.zeros_like(x), None, kept.state)


METHODS: dict[str, Any] = {
    "dense": Dense(),
    "8 bits": Quantized(QSGD(8)),
    "4 bits": Quantized(QSGD(4)),
    "2 bits": Quantized(QSGD(2)),
    "2 bits, l2": Quantized(QSGD(2, scale="l2")),
    "4 bits, feedback": Quantized(QSGD(4), "nearest"),
    "2 bits, feedback": Quantized(QSGD(2), "nearest"),
    "2 bits, nearest, none": WithoutFeedback(Quantized(QSGD(2), "nearest")),
    "int8, feedback": SYSTEMS["quantized"].reducer("int8"),
    "int4, feedback": SYSTEMS["quantized"].reducer("int4"),
    "int4, none": WithoutFeedback(SYSTEMS["quantized"].reducer("int4")),
    "e3m0, feedback": SYSTEMS["quantized"].reducer("e3m0"),
    "e3m0, none": WithoutFeedback(SYSTEMS["quantized"].reducer("e3m0")),
    "bfloat16": SYSTEMS["quantized"].reducer("bfloat16"),
    "sign, feedback": Quantized(Format("sign", 1024, "float32"), "nearest"),
    "sign, none": WithoutFeedback(Quantized(Format("sign", 1024, "float32"), "nearest")),
    "random-k, 10 %": RandomK(0.1),
    "random-k, none": WithoutFeedback(RandomK(0.1)),
}


def received_words(tx: optax.GradientTransformation, hidden: int) -> int:
    """Words of compressed leaves that a worker receives in a step, as traced for devices."""
    params = spardl.init(0, hidden)
    moved = jaxsparse.traffic.traced_bytes(tx, params, WORKERS).received
    uncompressed = jaxsparse.layout.plan(params).dense_size + 1  # 1: the flag that all are finite
    return round(moved / 4 - 2 * (WORKERS - 1) / WORKERS * uncompressed)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number, add = digits.number, parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    add("--seeds", type=number(int, 0), nargs="+", default=[0, 1, 2], metavar="SEED")
    add("--hidden", type=number(int, 32), default=128, help="width of the two hidden layers")
    add("--steps", type=number(int, 1), default=400)
    add(
        "--lr",
        type=number(float, 0),
        default=0.1,
        help="the first rate to try; it falls to a tenth",
    )
    add("--momentum", type=number(float, 0, 1), default=0.9, help="of every method; 0 for none")
    add("--batch-size", type=number(int, 1), default=140, help="of all workers together")
    add("--json", type=Path, metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    jax.config.update("jax_platforms", "cpu")
    print(
        f"jax {jax.__version__}, {WORKERS} simulated workers, {args.steps} steps, rates from "
        f"{args.lr} on, momentum {args.momentum}, seeds {args.seeds}; words received"
    )
    print(spardl.HEADER)
    results = []
    for name in args.methods:
        tx = error_feedback(METHODS[name], momentum=args.momentum or None)
        outcome = spardl.train(tx, args)
        outcome = outcome._replace(words=received_words(tx, args.hidden))
        results.append(spardl.show(name, outcome))
    if args.json:
        args.json.write_text(json.dumps({"results": results}, indent=1))


if __name__ == "__main__":
    main()
