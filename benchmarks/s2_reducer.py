"""S2 Reducer's sketch_ratio on real gradients: 8 simulated workers train an MLP on digits.

    python benchmarks/s2_reducer.py --blocks
    python benchmarks/s2_reducer.py --received 8 16 64 256

This is the paper's figure 8 in small. For each ratio, the table is sized by the expected union of
the workers' blocks, and by one worker's own blocks. "blocks" are exact blocks, without a sketch:
all that S2 selects, and with `--blocks` as many as have room in the words of each sketch. With that
stand beside each sketch as many coordinates drawn at random, too: the control that a method must
beat. Nothing is downloaded, and one device plays all workers.

Each row's rate is tuned by the rule of rates.py, from `--lr` on, by the mean training loss of all
seeds. (For results/s2.md it was the best of a grid on two of them.) Means and standard deviations
are over seeds of initial weights, batches and hashes. Words are those of the psum of compressed
leaves. The union of supports adds one bit a block. "exact" marks tables that would be no smaller
than the blocks of all workers. Then the blocks are summed.

`--received` trains nothing: it traces the exchange of 2^20 elements for each number of workers,
with each sizing and with exact blocks, and prints the words received over the elements.
"""

import argparse
import datetime
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import spardl

import jaxsparse
from jaxsparse.arrays import blocks
from jaxsparse.reducers.base import Reducer
from jaxsparse.systems import Dense, OmniReduce, RandomK, SparseAllGather
from jaxsparse.systems.s2_reducer import S2

digits = spardl.digits


class Method(NamedTuple):
    """A row of the table."""

    sizing: str
    ratio: float | None
    words: int  # of the psum
    reducer: Reducer | None  # None: dense
    decay: float = 1.0  # of the residual


def exact_blocks(sizing: str, ratio: float | None, k: int, size: int, args: Any) -> Method:
    """The exact sum of k blocks of each worker, with room for all of them."""
    count = blocks.count(size, args.block_size)
    reducer = OmniReduce((k - 0.5) / count, block_size=args.block_size)
    words = min(size, args.workers * k * args.block_size)
    return Method(f"blocks, {sizing}", ratio, words, reducer)


def methods(size: int, args: argparse.Namespace) -> list[Method]:
    """The rows for a bucket of `size` elements."""
    rows = [Method("dense", None, size, None)]
    selected = S2(args.density, block_size=args.block_size).plan(size, args.workers).selected
    rows.append(exact_blocks("all", None, selected, size, args))
    for sizing in args.sizings:
        for ratio in args.ratios:
            s2 = S2(
                args.density,
                block_size=args.block_size,
                rows=args.rows,
                sketch_ratio=ratio,
                sizing=sizing,
            )
            words, cols = s2.words(size, args.workers), s2.plan(size, args.workers).cols
            rows.append(Method(sizing if cols else f"{sizing}, exact", ratio, words, s2))
            if args.blocks and cols is not None:
                k = max(1, words // (args.workers * args.block_size))
                rows.append(exact_blocks(sizing, ratio, k, size, args))
                # What is not drawn is dropped: fed back, it would be stale, and end far higher.
                blind = RandomK(words / size)
                rows.append(Method(f"random, {sizing}", ratio, words, blind, decay=0.0))
    return rows


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    (size,) = jaxsparse.layout.plan(spardl.init(0, args.hidden)).bucket_sizes
    print(f"{'sizing':<14} {'ratio':>5} {'train loss':>18} {'accuracy, %':>16} {'words':>6}   rate")
    results: list[dict[str, Any]] = []
    for method in methods(size, args):
        if method.reducer is None:
            tx = jaxsparse.dense(momentum=args.momentum)
        else:
            tx = jaxsparse.error_feedback(
                method.reducer, momentum=args.momentum, decay=method.decay
            )
        outcome = spardl.train(tx, args, args.workers)
        print(
            f"{method.sizing:<14} {'' if method.ratio is None else f'{method.ratio:g}':>5} "
            f"{spardl.spread(outcome.train_loss):>18} "
            f"{spardl.spread(outcome.accuracy, 100, 2):>16} {method.words:>6} {outcome.rate:>6g}",
            flush=True,
        )
        row = method._asdict() | {"reducer": repr(method.reducer), "rate": outcome.rate}
        results.append(row | {"train_loss": outcome.train_loss, "accuracy": outcome.accuracy})
    return results


def received(args: argparse.Namespace) -> None:
    """Prints the words that a worker receives over the elements, as traced."""
    size, density = 2**20, args.density
    reducers = {
        "union": S2(density, sizing="union"),
        "local": S2(density, sizing="local"),
        "omni_reduce": OmniReduce(density),
        "sparse_all_gather": SparseAllGather(density),
        "dense": Dense(),
    }
    print(f"words received over elements, of {size} elements, density {density:g}, blocks of 256")
    print(f"{'workers':>7}  " + "  ".join(reducers))
    for workers in args.received:
        moved = (jaxsparse.traffic.traced_bytes(x, size, workers) for x in reducers.values())
        shares = [one.received / 4 / size for one in moved]
        cells = [f"{share:>{len(name)}.3f}" for name, share in zip(reducers, shares)]
        print(f"{workers:>7}  " + "  ".join(cells), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, number = parser.add_argument, digits.number
    add("--ratios", type=number(float, 1e-3), nargs="+", default=[0.1, 0.25, 0.5, 1.0, 2.0])
    add("--sizings", choices=["union", "local"], nargs="+", default=["union", "local"])
    add("--rows", type=number(int, 1), default=1, help="of the sketch")
    add("--block-size", type=number(int, 1), default=16)
    add("--density", type=number(float, 1e-6, math.nextafter(1, 2)), default=1 / 32)
    add("--workers", type=number(int, 1), default=8)
    add("--seeds", type=number(int, 0), nargs="+", default=[0, 1, 2, 3, 4], metavar="SEED")
    add("--steps", type=number(int, 1), default=400)
    add("--hidden", type=number(int, 32), default=128, help="width of the two hidden layers")
    add("--lr", type=number(float, 0), default=0.1, help="first rate; it falls to a tenth")
    add("--momentum", type=number(float, 0, 1), default=0.9, help="of every method")
    add("--blocks", action="store_true", help="also as many words of exact blocks, and at random")
    add("--batch-size", type=number(int, 1), default=144, help="of all workers together")
    add(
        "--received",
        type=number(int, 2),
        nargs="+",
        metavar="W",
        help="print the words that a worker receives, for each of these numbers of workers",
    )
    add("--json", type=Path, metavar="FILE", help="also write all results here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.received:
        received(args)
        return
    where = {
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(
        f"{args.workers} simulated workers, blocks of {args.block_size}, density {args.density:g}, "
        f"{args.rows} rows, {args.steps} steps, momentum {args.momentum:g}, "
        f"seeds {args.seeds}"
    )
    results = sweep(args)
    if args.json:
        given = {name: str(value) for name, value in vars(args).items()}
        with open(args.json, "w") as file:
            json.dump({**where, "arguments": given, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
