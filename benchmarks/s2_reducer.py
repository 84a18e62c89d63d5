"""S2 Reducer's sketch_ratio on real gradients: 8 simulated workers train an MLP on digits.

    python benchmarks/s2_reducer.py --blocks
    python benchmarks/s2_reducer.py --received 8 16 64 256

This is the paper's figure 8 in small. For each ratio, the table is sized by the expected union of
the workers' blocks, and by one worker's own blocks. "blocks" are exact blocks, and with `--blocks`
there are as many as have room in the words of each sketch, and as many coordinates drawn at random.
Words are those of the psum of compressed leaves. "exact" marks tables that would be no smaller than
the blocks of all workers. Nets, rates and spreads are as in spardl.py.

`--received` trains nothing: it traces the exchange of 2^20 elements for each number of workers,
with each sizing and with exact blocks, and prints the words received over the elements.
"""

import argparse
from typing import Literal, NamedTuple

import spardl
import timing

import jaxsparse
from jaxsparse.arrays import blocks
from jaxsparse.reducers import Dense, OmniReduce, RandomK, SparseAllGather
from jaxsparse.reducers.base import Reducer
from jaxsparse.reducers.s2_reducer import S2

number = spardl.digits.number
DENSITY, BLOCK, WORKERS = 1 / 32, 16, 8
RATIOS = (0.1, 0.25, 0.5, 1.0, 2.0)


class Method(NamedTuple):
    """A row of the table."""

    name: str
    words: int  # of the psum
    reducer: Reducer | None  # None: dense
    decay: float = 1.0  # of the residual


def exact_blocks(name: str, k: int, size: int) -> Method:
    """The exact sum of k blocks of each worker, with room for all of them."""
    count = blocks.count(size, BLOCK)
    reducer = OmniReduce((k - 0.5) / count, block_size=BLOCK)
    return Method(f"blocks, {name}", min(size, WORKERS * k * BLOCK), reducer)


def methods(size: int, args: argparse.Namespace) -> list[Method]:
    """The rows for a bucket of `size` elements."""
    rows = [Method("dense", size, None)]
    selected = S2(DENSITY, block_size=BLOCK).plan(size, WORKERS).selected
    rows.append(exact_blocks("all", selected, size))
    sizings: tuple[Literal["union", "local"], ...] = "union", "local"
    for sizing in sizings:
        for ratio in RATIOS:
            s2 = S2(DENSITY, block_size=BLOCK, sketch_ratio=ratio, sizing=sizing)
            words, cols = s2.words(size, WORKERS), s2.plan(size, WORKERS).cols
            name = f"{sizing}, {ratio:g}"
            rows.append(Method(name if cols else f"{name}, exact", words, s2))
            if args.blocks and cols is not None:
                k = max(1, words // (WORKERS * BLOCK))
                rows.append(exact_blocks(name, k, size))
                # What is not drawn is dropped: fed back, it would be stale, and end far higher.
                rows.append(Method(f"random, {name}", words, RandomK(words / size), decay=0.0))
    return rows


def sweep(args: argparse.Namespace) -> None:
    (size,) = jaxsparse.arrays.layout.layout_of(spardl.init(0, args.hidden)).bucket_sizes
    print(spardl.head())
    for method in methods(size, args):
        if method.reducer is None:
            tx = jaxsparse.dense(momentum=args.momentum)
        else:
            tx = jaxsparse.exchange(method.reducer, momentum=args.momentum, decay=method.decay)
        outcome = spardl.train(tx, args, WORKERS)._replace(words=method.words)
        spardl.show(method.name, outcome)


def received(numbers: list[int]) -> None:
    """Prints the words that a worker receives over the elements, as traced."""
    size, density = 2**20, DENSITY
    reducers = {
        "union": S2(density, sizing="union"),
        "local": S2(density, sizing="local"),
        "omni_reduce": OmniReduce(density),
        "sparse_all_gather": SparseAllGather(density),
        "dense": Dense(),
    }
    print(f"words received over elements, of {size} elements, density {density:g}, blocks of 256\n")
    print(timing.head("workers", *reducers))
    for workers in numbers:
        moved = (jaxsparse.traffic.traced_bytes(x, size, workers) for x in reducers.values())
        shares = [one.received / 4 / size for one in moved]
        print(timing.row(workers, *(f"{share:.3f}" for share in shares)), flush=True)


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    spardl.add_flags(parser)
    add("--blocks", action="store_true", help="also as many words of exact blocks, and at random")
    add("--received", type=number(int, 2), nargs="+", metavar="W", help="see above")
    args = parser.parse_args()
    if args.received:
        received(args.received)
        return
    args.batch_size = 144
    timing.where()
    print(f"{args.steps} steps, seeds {args.seeds}\n")
    sweep(args)


if __name__ == "__main__":
    main()
