"""EXO Gym's example of MNIST, on digits: its strategies in its own code, beside ours.

    python benchmarks/exo_gym.py --json exo_gym.json                             # our rows
    python benchmarks/exo_gym.py --json exo_gym.json --theirs python3 --gym gym  # both sides
    python benchmarks/exo_gym.py --json exo_gym.json --theirs python3 --gym gym --tune

The example's CNN, AdamW, warm-up and cosine train on scikit-learn's 8x8 digits, whose images shift
by up to a pixel. Both sides start from the same parameters, and each node has the same batches in
the same order. Only dropout draws differ. Losses and shares of right answers are held-out ones, of
the mean of all nodes' parameters and BatchNorm statistics. `--batch` is for each node. The example
has 256, for 15,000 images a node, where digits have 359.

`--theirs` is a Python that has PyTorch, and `--gym` a clone of github.com/exo-explore/gym, at
commit 9fa323c. exo_gym_theirs.py runs there, and says what it changes. Bytes are those that a node
receives, mean over steps: ours are read from compiled programs, theirs counted as they are called.

`--tune` trains with the rate that is best on seed 0, of the example's rate times powers of 4. Both
its neighbours are worse. Nothing that a file of `--json` has is trained again.
"""

import functools
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import rates
import timing
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxsparse
from jaxsparse.arrays.printing import aligned

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
digits: Any = importlib.import_module("digits")

NODES, STEPS, WARM_UP, RATE, DECAY = 4, 150, 100, 3e-4, 1e-4
THEIRS = [
    f"{name}{how}"
    for name in ("SimpleReduce", "DiLoCo", "SPARTA 5 %")
    for how in ("", ", repaired")
]
THEIRS += ["SPARTA 0.5 %"]


class Row(NamedTuple):
    """An exchange, and where it stands."""

    exchange: optax.GradientTransformation
    every: int = 0  # local steps; 0: gradients are exchanged
    outer: optax.GradientTransformation = optax.sgd(1.0)
    is_behind: bool = False  # the exchange stands behind each worker's own Adam


def ours() -> dict[str, Row]:
    int4, nesterov = jaxsparse.quantized("int4"), optax.sgd(0.7, 0.9, nesterov=True)
    return {
        "dense": Row(jaxsparse.dense()),
        "DiLoCo": Row(jaxsparse.dense(), 20, nesterov),
        "DiLoCo, int4": Row(int4, 20, nesterov),
        "DiLoCo, sign": Row(jaxsparse.quantized("sign"), 20, nesterov),
        "mean of 20 steps": Row(jaxsparse.dense(), 20),
        "mean of 3 steps, int4": Row(int4, 3),
        "random 5 %": Row(jaxsparse.random_k(0.05, decay=0.0)),
        "random 5 %, behind Adam": Row(jaxsparse.random_k(0.05, decay=0.0), is_behind=True),
        "one mean at the end": Row(jaxsparse.dense(), STEPS + 1),
    }


class CNN(nn.Module):
    """The example's, whose images are 8x8 here."""

    @nn.compact
    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        for channels in (64, 128):
            for _ in range(2):
                x = nn.Conv(channels, (3, 3))(x)
                x = nn.relu(nn.BatchNorm(not is_training, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.Dropout(0.25, broadcast_dims=(1, 2), deterministic=not is_training)(x)
        x = nn.relu(nn.Dense(256)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not is_training)(x))


class State(TrainState):
    """With BatchNorm's statistics."""

    batch_stats: Any


@functools.cache
def start(seed: int) -> Any:
    """Parameters as PyTorch draws them, and statistics."""
    rng, variables = np.random.default_rng(seed), CNN().init(jax.random.key(0), images(1), False)
    for name, layer in variables["params"].items():
        if "kernel" in layer:
            bound = np.prod(layer["kernel"].shape[:-1]) ** -0.5
            for key, x in layer.items():
                variables["params"][name][key] = np.float32(rng.uniform(-bound, bound, x.shape))
    return jax.device_get(variables)


def images(count: int) -> np.ndarray:
    return np.zeros((count, 8, 8, 1), np.float32)


@functools.cache
def data(seed: int, batch: int) -> dict[str, np.ndarray]:
    """Batches of all nodes [step, node, image, ...], each of a node's own quarter, and a test."""
    train, test = digits.load()
    rng, padded = np.random.default_rng(seed), np.zeros((len(train.labels), 10, 10), np.float32)
    padded[:, 1:9, 1:9] = train.images.reshape(-1, 8, 8)
    own = rng.permutation(len(padded))[: len(padded) // NODES * NODES].reshape(NODES, -1)
    epochs = -(-STEPS * batch // own.shape[1])
    order = rng.permuted(np.tile(own, (epochs, 1, 1)), axis=2).swapaxes(0, 1).reshape(NODES, -1)
    drawn = order[:, : STEPS * batch].reshape(NODES, STEPS, batch).swapaxes(0, 1)
    rows, columns = rng.integers(3, size=(2, *drawn.shape, 1, 1))
    at = np.arange(8)
    x = padded[drawn[..., None, None], rows + at[:, None], columns + at]
    scaled = lambda x: ((x - train.images.mean()) / train.images.std())[..., None]
    return {
        "x": scaled(x),
        "y": train.labels[drawn],
        "test_x": scaled(test.images.reshape(-1, 8, 8)),
        "test_y": test.labels,
    }


def schedule(rate: float) -> optax.Schedule:
    """The Gym's "lambda_cosine"."""
    cosine = optax.cosine_decay_schedule(rate, STEPS - WARM_UP, alpha=0.1)
    return optax.join_schedules([optax.linear_schedule(0.0, rate, WARM_UP), cosine], [WARM_UP])


def score(params: Any, stats: Any) -> dict[str, float]:
    """The held-out loss, and the share of right answers."""
    variables = jax.device_get({"params": params, "batch_stats": stats})
    x, labels = (data(0, 1)[key] for key in ("test_x", "test_y"))  # the same for all seeds
    logits = jax.jit(CNN().apply, static_argnums=2)(variables, x, False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return {"loss": float(loss), "right": float((logits.argmax(1) == labels).mean())}


def train_ours(name: str, rate: float, seed: int, size: int) -> dict[str, Any]:
    mesh, row = jax.make_mesh((NODES,), ("data",)), ours()[name]
    tx = adamw = optax.adamw(schedule(rate), weight_decay=DECAY)
    if row.is_behind:
        own = jaxsparse.per_worker(optax.scale_by_adam())
        decay = optax.add_decayed_weights(DECAY)
        tx = optax.chain(own, row.exchange, decay, optax.scale_by_learning_rate(schedule(rate)))
    elif not row.every:
        tx = optax.chain(row.exchange, adamw)
    state: Any = State.create(apply_fn=CNN().apply, tx=tx, **start(seed))

    def loss_of(params: Any, batch: Any, stats: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        logits, new = CNN().apply(
            {"params": params, "batch_stats": stats},
            batch[0],
            True,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return each.mean(), new["batch_stats"]

    def step(state: State, batch: Any, key: jax.Array) -> tuple[State, jax.Array]:
        both = jax.value_and_grad if row.every else jaxsparse.value_and_grad
        key = jax.random.fold_in(key, state.step)
        (loss, stats), grads = both(loss_of, has_aux=True)(
            state.params, batch, state.batch_stats, key
        )
        stats = stats if row.every else jax.tree.map(lambda x: x.mean(0), stats)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    statistics = lambda state: state.batch_stats
    run: Any = jax.jit(step, donate_argnums=0)
    if row.every:
        run = jaxsparse.LocalSteps(
            step, row.exchange, row.outer, mesh, every=row.every, average=statistics
        )
        state = run.init(state)
    else:
        state = jaxsparse.shard(state, mesh)
    key, drawn, received = jax.random.key(seed), data(seed, size), 0.0
    for x, y in zip(drawn["x"], drawn["y"]):
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (x, y))
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
        rest = (batch, None, key) if row.every else (batch, key)
        if not received:
            program = (run.outer[0], state) if row.every else (run, state, *rest)
            share = -(-STEPS // row.every) / STEPS if row.every else 1
            received = share * jaxsparse.wire_bytes(*program, mesh=mesh).received
        state, _ = jax.block_until_ready(run(state, *rest))
    if not row.every:
        return {**score(state.params, state.batch_stats), "received": received}
    is_marked = lambda x: isinstance(x, jaxsparse.PerWorker)
    of = lambda f, tree: jax.tree.map(lambda x: f(jax.device_get(x.value)), tree, is_leaf=is_marked)
    own = state.worker
    alone = score(*(of(lambda x: x[0], tree) for tree in (own.params, own.batch_stats)))
    state = run.finish(state)
    whole = score(state.params, of(lambda x: x.mean(0), state.worker.batch_stats))
    return {**whole, "received": received, "node 0": alone}


def train_theirs(
    name: str, rate: float, seed: int, size: int, python: str, gym: str
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flat, _ = jax.tree_util.tree_flatten_with_path(start(seed)["params"])
        params = {"/".join(x.key for x in path): leaf for path, leaf in flat}
        given: dict[str, Any] = {**data(seed, size), **params}
        np.savez(Path(folder, "data.npz"), **given)
        script = Path(__file__).with_name("exo_gym_theirs.py")
        command: list[Any] = [
            python,
            script,
            folder,
            name,
            str(rate),
            str(seed),
            str(Path(gym).resolve()),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(folder, "found.json").read_text())


def main() -> None:
    parser = timing.parser_of(__doc__)
    add = parser.add_argument
    add("--theirs", metavar="PYTHON", help="a Python that has PyTorch")
    add("--gym", metavar="DIR", default="gym", help="a clone of EXO Gym (default: gym)")
    add("--batch", type=int, default=64)
    add("--seeds", type=int, default=3)
    add("--tune", action="store_true", help="see above")
    add("--only", nargs="+", metavar="ROW", help="rows by name; default: all")
    add("--json", metavar="FILE", help="where runs are, and where new ones go")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NODES)
    where, found = timing.where(), dict[str, Any]()
    if args.json and Path(args.json).exists():
        found = json.loads(Path(args.json).read_text())["rows"]

    def trained(name: str, rate: float, seed: int) -> float:
        runs = found.setdefault(f"{name} at {rate:g}, {args.batch}", {})
        if str(seed) not in runs:
            theirs = name.removeprefix("EXO Gym, ")
            runs[str(seed)] = (
                train_ours(name, rate, seed, args.batch)
                if name == theirs
                else train_theirs(theirs, rate, seed, args.batch, args.theirs, args.gym)
            )
            print(name, rate, seed, runs[str(seed)], flush=True)
            timing.save({**where, "rows": found}, args.json)
        return runs[str(seed)]["loss"]

    names = [*ours(), *(f"EXO Gym, {name}" for name in THEIRS if args.theirs)]
    table = [("exchange", "rate", "loss", "range", "right", "range", "received")]
    for name in args.only or names:
        rate = RATE
        if args.tune:
            # A rate times 2^n stands for one times 4^n.
            four = lambda x: RATE * (x / RATE) ** 2
            rate = four(rates.tuned(lambda x: trained(name, four(x), 0), 2 * RATE))  # noqa: B023
        for seed in range(args.seeds):
            trained(name, rate, seed)
        runs = [found[f"{name} at {rate:g}, {args.batch}"][str(seed)] for seed in range(args.seeds)]
        losses, right = ([run[key] for run in runs] for key in ("loss", "right"))
        table.append(
            (
                name,
                f"{rate:g}",
                f"{np.mean(losses):.3f}",
                f"{np.ptp(losses):.3f}",
                f"{100 * np.mean(right):.1f} %",
                f"{100 * np.ptp(right):.1f}",
                f"{runs[0]['received']:,.0f}",
            )
        )
    print("\n".join(aligned(table, right=range(1, 7))))


if __name__ == "__main__":
    main()
