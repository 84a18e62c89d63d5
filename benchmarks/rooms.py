r"""Words that sums of real gradients need, beside the room that messages have for them.

    python benchmarks/rooms.py --json benchmarks/results/rooms.json
    python benchmarks/rooms.py --workers 8 --densities 0.01 --steps 40

The net of sketched_training.py trains with SparCML's two sums, and with SparDL's B-SAG, at one
rate. One device plays all workers. A row has the means over the second half of the steps, in words
of all messages that one worker receives (in units of k, the entries that a worker sends):

- needed: two words for each entry of the sums that arrived in each stage (B-SAG: of the block);
- paid: the room that those messages had, which follows the needs of the step before;
- random, all: the room that sums of random, and of disjoint, supports would have.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sketched_training as task
import timing

import jaxsparse
from jaxsparse.arrays.printing import aligned
from jaxsparse.collectives.messages import MessageFormat, Rooms, ladder
from jaxsparse.collectives.sparcml import _capacities
from jaxsparse.reducers import SparCML, SparDL
from jaxsparse.reducers.sparcml import Algorithm

WINDOWS, WIDTH, RATE = 4, 168, 0.1  # windows of a worker's batch


def follow(reducer: Any, workers: int, args: argparse.Namespace, text: jax.Array) -> Any:
    """The reducer's states after all steps: its leaves have a row for each step."""
    tx = jaxsparse.exchange(reducer, momentum=task.MOMENTUM, workers=workers)
    params = task.init(0, WIDTH)
    grad = jaxsparse.value_and_grad(task.loss_of, workers=workers)

    def step(carried: Any, t: jax.Array) -> Any:
        params, state = carried
        key = jax.random.fold_in(jax.random.key(1), t)
        shape = workers * WINDOWS, 1
        starts = jax.random.randint(key, shape, 0, len(text) - task.LENGTH)
        loss, grads = grad(params, text[starts + jnp.arange(task.LENGTH + 1)])
        updates, state = tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
        return (params, state), (loss.mean(), state.reducers)

    run = jax.jit(lambda carried: jax.lax.scan(step, carried, jnp.arange(args.steps)))
    _, (losses, states) = run((params, tx.init(params)))
    print(f"{reducer}, {workers} workers: loss {float(losses[-5:].mean()):.2f}", flush=True)
    return states


def paid(widest: MessageFormat, least: int, need: int) -> int:
    """Words of a message that follows one with so many entries."""
    room = int(Rooms(widest, least, jnp.int32(need)).room)
    return 2 * room if 2 * room < widest.size else widest.size


def sums(name: Algorithm, share: float, workers: int, args: argparse.Namespace, text: Any) -> Any:
    """A row for one of SparCML's sums: words in units of k."""
    reducer = SparCML(round(512 * share), algorithm=name)
    (needs,) = jax.tree.leaves(follow(reducer, workers, args, text))
    needs = np.asarray(needs)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0, WIDTH)))
    k, m = reducer.entries(size), reducer.deal(size, workers).range_size
    format_of = lambda most, of: MessageFormat(of, most, "sum", jnp.float32, reducer.codec)
    if name == "recursive_double":
        formats = [format_of(most, size) for most in _capacities(k, size, workers)]
        held = [2**stage for stage in range(len(formats))]
        least, copies, first = -(-k // 2), 1, 0
    else:
        room = min(m, reducer.capacity(size, workers))
        formats, held = [format_of(min(m, workers * room), m)], [workers]
        least, copies, first = -(-k // (2 * workers)), workers - 1, 2 * room * (workers - 1)
    words = lambda entries, of: min(2 * entries, of.size)
    part = 1 if name == "recursive_double" else workers
    union = lambda n: reducer.expected(size, n) / part
    total: dict[str, Any] = {"needed": 0.0, "paid": 0.0, "random": 0.0, "all": 0.0}
    steps = range(args.steps // 2, args.steps)
    for stage, (of, n) in enumerate(zip(formats, held, strict=True)):
        of_steps = [int(needs[t, stage]) for t in steps]
        before = [int(needs[t - 1, stage]) for t in steps]
        total["needed"] += copies * np.mean([words(need, of) for need in of_steps])
        total["paid"] += copies * np.mean([paid(of, least, need) for need in before])
        total["random"] += copies * words(union(n), of)
        total["all"] += copies * of.words
    found = {key: round(float(x + first) / k, 3) for key, x in total.items()}
    last = [int(need) for need in needs[-1, : len(formats)]]
    return {"sum": name, "share": share, "workers": workers, "k": k, **found, "last_needs": last}


def teams(share: float, args: argparse.Namespace, text: Any) -> Any:
    """A row for B-SAG between two teams of four: its gather of h entries."""
    workers, count = 8, 2
    reducer = SparDL(share, teams=count, gather="bruck")
    states = follow(reducer, workers, args, text)
    h = np.asarray(jax.tree.leaves(states)[0])[args.steps // 2 - 1 : -1].round()
    size = sum(leaf.size for leaf in jax.tree.leaves(task.init(0, WIDTH)))
    k = round(share * size) // (workers // count)
    rooms = ladder(k / count, k)
    room = [min(r for r in rooms if r >= x) for x in h]
    whole = lambda x: round(float(np.mean(x)) * 2 * (count - 1) / k, 3)
    return {"sum": "bruck", "share": share, "workers": workers, "k": k} | {
        "needed": whole(h),
        "paid": whole(room),
        "all": whole([k]),
    }


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--json", metavar="FILE")
    add("--workers", type=int, nargs="+", default=[2, 8, 32])
    add("--densities", type=float, nargs="+", default=[0.01, 0.1])
    add("--steps", type=int, default=60)
    args = parser.parse_args()
    text, _ = task.words()
    cells = [(share, workers) for share in args.densities for workers in args.workers]
    names: tuple[Algorithm, ...] = ("recursive_double", "split_allgather")
    found = [sums(name, *cell, args, text) for cell in cells for name in names]
    found += [teams(share, args, text) for share in args.densities]
    keys = ("sum", "share", "workers", "needed", "paid", "random", "all")
    lines = [keys, *(tuple(str(row.get(key, "")) for key in keys) for row in found)]
    print("\n".join(aligned(lines, right=range(1, 7))))
    timing.save({**timing.where(), "steps": args.steps, "rows": found}, args.json)


if __name__ == "__main__":
    main()
