"""Quantised all-reduce and random-k on real gradients, with error feedback and without.

    python benchmarks/quantized.py
    python benchmarks/quantized.py --methods "int4, none" "sign, none"

14 simulated workers train a small MLP on scikit-learn's digits, as in benchmarks/spardl.py. Means
and standard deviations are over seeds of initial weights and batches. Each row's rate is tuned by
the rule of rates.py, from `--lr` on, by the mean training loss of all seeds. Words are those of
compressed leaves that a worker receives in a step, read from a program traced for 14 devices.
"""

from typing import Any

import optax
import spardl
import timing

import jaxsparse
from jaxsparse import exchange
from jaxsparse.quantize import QSGD, Format
from jaxsparse.reducers import Quantized
from jaxsparse.reducers.dense import Dense
from jaxsparse.reducers.random_k import RandomK

WORKERS = spardl.WORKERS


# Those whose names end in "none" drop their residuals.
METHODS: dict[str, Any] = {
    "dense": Dense(),
    "8 bits": Quantized(QSGD(8)),
    "4 bits": Quantized(QSGD(4)),
    "2 bits": Quantized(QSGD(2)),
    "2 bits, l2": Quantized(QSGD(2, scale="l2")),
    "4 bits, feedback": Quantized(QSGD(4), "nearest"),
    "2 bits, feedback": Quantized(QSGD(2), "nearest"),
    "2 bits, nearest, none": Quantized(QSGD(2), "nearest"),
    "int8, feedback": jaxsparse.quantized("int8").reducer,
    "int4, feedback": jaxsparse.quantized("int4").reducer,
    "int4, none": jaxsparse.quantized("int4").reducer,
    "e3m0, feedback": jaxsparse.quantized("e3m0").reducer,
    "e3m0, none": jaxsparse.quantized("e3m0").reducer,
    "bfloat16": jaxsparse.quantized("bfloat16").reducer,
    "sign, feedback": Quantized(Format("sign", 1024, "float32"), "nearest"),
    "sign, none": Quantized(Format("sign", 1024, "float32"), "nearest"),
    "random-k, 10 %": RandomK(0.1),
    "random-k, none": RandomK(0.1),
}


def received_words(tx: optax.GradientTransformation, hidden: int) -> int:
    """Words of compressed leaves that a worker receives in a step, as traced for devices."""
    params = spardl.init(0, hidden)
    moved = jaxsparse.traffic.traced_bytes(tx, params, WORKERS).received
    uncompressed = (
        jaxsparse.arrays.layout.layout_of(params).dense_size + 1
    )  # 1: the flag that all are finite
    return round(moved / 4 - 2 * (WORKERS - 1) / WORKERS * uncompressed)


def main() -> None:
    parser = timing.parser_of(__doc__)
    spardl.add_flags(parser, seeds=3)
    add = parser.add_argument
    add("--json", metavar="FILE", help="also write all results here")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    args = parser.parse_args()
    where, results = timing.where(), list[dict[str, Any]]()
    print(f"{args.steps} steps, seeds {args.seeds}; words received\n\n{spardl.head()}")
    for name in args.methods:
        decay = 0.0 if name.endswith("none") else 1.0
        tx = exchange(METHODS[name], momentum=args.momentum, decay=decay)
        outcome = spardl.train(tx, args)
        outcome = outcome._replace(words=received_words(tx, args.hidden))
        results.append(spardl.show(name, outcome))
    timing.save({**where, **vars(args), "results": results}, args.json)


if __name__ == "__main__":
    main()
