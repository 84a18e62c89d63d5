"""Does Sketched-SGD train as well as true top-k and as blind draws of as many words, on digits?

    python benchmarks/sketch_sizing.py --json sketch_sizing.json
    python benchmarks/sketch_sizing.py --hidden 128 --ratios 10 --dtypes float32 bfloat16 float16
    python benchmarks/sketch_sizing.py --tails

A budget is d / ratio words, less those of the biases. Controls are dense gradients, random-k with
as many coordinates (the same payload, drawn blindly), and true top-k with the sketch's k (what a
sketch without errors would deliver). Rows "decay D" keep D of the residual in each step. Eight
simulated workers train the MLP of spardl.py on scikit-learn's digits, with momentum 0.9. Rates are
tuned by the rule of rates.py, from 0.06 on, by the mean training loss of all seeds.

`--tails` trains nothing. It prints what share of the squared norm of a vector one exchange
delivers, and after a slash that of the k largest, for 1, 3 and 5 rows, and for each for candidates'
shares of 0.25, 0.5 and 0.75. P is rows + 1, and the sketch is the textbook's.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import spardl
import timing

import jaxsparse
from jaxsparse.reducers import Dense, RandomK, SketchedSGD, TrueTopK

number = spardl.digits.number
MOMENTS: dict[str, Callable[[Any], Any]] = {"right": np.mean, "deviation": np.std}

TAILS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, d: rng.normal(size=d),
    "normal, cubed": lambda rng, d: rng.normal(size=d) ** 3,
    "Student t(2)": lambda rng, d: rng.standard_t(2, size=d),
    "rank ** -0.5": lambda rng, d: rng.permutation(np.arange(1, d + 1) ** -0.5),
    "rank ** -0.75": lambda rng, d: rng.permutation(np.arange(1, d + 1) ** -0.75),
    "rank ** -1": lambda rng, d: rng.permutation(np.arange(1, d + 1) ** -1.0),
}


def delivered(
    x: np.ndarray, ratio: float, rows: int, share: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Shares of the squared norm: delivered by a sketch, and that of the k largest."""
    words = x.size / ratio
    candidates, cols = int(share * words), int((1 - share) * words / rows)
    k = candidates // (rows + 1)
    estimates = []
    for _ in range(rows):
        column, sign = rng.integers(0, cols, x.size), rng.choice([-1.0, 1.0], x.size)
        estimates.append(sign * np.bincount(column, sign * x, cols)[column])
    size = np.abs(np.median(estimates, axis=0))
    chosen = np.argpartition(-size, candidates)[:candidates]
    whole = np.sum(x**2)
    best = lambda values: float(np.sum(np.sort(values**2)[::-1][:k]) / whole)
    return best(x[chosen]), best(x)


def show_tails(size: int = 2**17) -> None:
    rng = np.random.default_rng(0)
    for ratio, (name, make) in itertools.product((10, 20, 100), TAILS.items()):
        x = make(rng, size)
        pairs = (
            delivered(x, ratio, rows, share, rng)
            for rows, share in itertools.product((1, 3, 5), (0.25, 0.5, 0.75))
        )
        shown = " ".join(f"{sketched:.3f}/{largest:.3f}" for sketched, largest in pairs)
        print(f"{ratio:>4}x  {name:<14} random-k {1 / ratio:.3f}  {shown}", flush=True)


Row = tuple[str, Any, float]  # name, system, and the share of the residual that a step keeps


def rows(hidden: int, ratio: float, dtypes: list[str]) -> Iterator[Row]:
    """The systems to compare at one ratio."""
    layout = jaxsparse.arrays.layout.layout_of(spardl.init(0, hidden))
    (size,), dense = layout.bucket_sizes, layout.dense_size
    usual = SketchedSGD(ratio)
    k, _ = usual.sized(size, dense)
    words = int((size + dense) / ratio) - dense - 1  # one more word is a flag
    for dtype in dtypes:
        yield f"table in {dtype}", SketchedSGD(ratio, table_dtype=dtype), 1.0
    yield f"sketched_sgd({ratio:g})", usual, 1.0
    large = SketchedSGD(ratio, rows=5, oversampling=4)
    yield f"sketched_sgd({ratio:g}, rows=5, oversampling=4)", large, 1.0
    # What waits long is stale, so that forgetting some of it or all may train better.
    random = RandomK(words / size)
    for kept in (0.0, 0.5, 0.9):
        yield f"sketched_sgd({ratio:g}), decay {kept:g}", usual, kept
        yield f"random-k, decay {kept:g}", random, kept
    yield "dense", Dense(), 1.0
    yield f"random-k, k={words}", random, 1.0
    yield f"true top-k, k={k}", TrueTopK(k), 1.0


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--hidden", type=number(int, 32), nargs="+", default=[128, 256], metavar="N")
    add("--ratios", type=number(float, 1), nargs="+", default=[10.0, 20.0])
    add("--dtypes", nargs="*", default=[], help="of tables of the default sizes, too")
    add("--seeds", type=number(int, 0), nargs="+", default=[0, 1, 2, 3, 4])
    add("--steps", type=number(int, 1), default=300)
    add("--tails", action="store_true", help="see above")
    add("--json", metavar="FILE", help="also write all results here")
    args = parser.parse_args()
    where = timing.where()
    if args.tails:
        show_tails()
        return
    results = list[dict[str, Any]]()
    for hidden, ratio in itertools.product(args.hidden, args.ratios):
        given = {"hidden": hidden, "steps": args.steps, "seeds": args.seeds}
        settings = argparse.Namespace(**given, batch_size=128, lr=0.06)
        print(f"{hidden} hidden units, {ratio:g}x\n\n{spardl.head()}")
        for name, system, decay in rows(hidden, ratio, args.dtypes):
            tx = jaxsparse.exchange(system, momentum=0.9, decay=decay)
            found = spardl.show(name, spardl.train(tx, settings, workers=8))
            right = {key: float(of(found["accuracy"])) for key, of in MOMENTS.items()}
            loss = {"name": name, "loss": float(np.mean(found["train_loss"]))}
            results.append({**found, **loss, **right, "hidden": hidden, "ratio": ratio})
            timing.save({**where, "arguments": vars(args), "results": results}, args.json)


if __name__ == "__main__":
    main()
