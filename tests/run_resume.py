"""Trains with several transformations, stops, and goes on in another process.

A script for `test_checkpoint.py`:

    run_resume.py straight FOLDER CASE...   20 steps; the states after 10 are saved with Orbax
    run_resume.py resumed FOLDER CASE...    from there to 20; the same bits, or an error
    run_resume.py killed FOLDER             saves on and on until killed, checks what it finds
    run_resume.py hanging FOLDER            the same in several processes; the third save hangs
    run_resume.py moved FOLDER CASE...      in several processes: some steps from where others came
"""

import functools
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from table import EXCHANGES
from training import trainer

import jaxsparse
from jaxsparse import PerWorker, contrib, reducers, shard, warm_up

WORKERS = 4
STEPS = 20
SAVED_AT = 10
PARAMS = {
    "w": np.ones((50, 40), np.float32),
    "v": np.ones((30, 30), np.float32),
    "b": np.ones(50, np.float32),  # dense
}


def by_row(name):
    system = EXCHANGES[name]
    return system.transformation(**system.cases[""].small, momentum=0.9)


# Every system with its row's settings, and cases that change between the steps 10 and 20, too.
CASES = {name: functools.partial(by_row, name) for name in EXCHANGES} | {
    "ok_topk": lambda: contrib.ok_topk(0.05, refresh_every=8, rebalance_every=7, momentum=0.9),
    "spardl_adaptive": lambda: jaxsparse.spardl(0.05, teams=2, gather="bruck", momentum=0.9),
    "sparcml": lambda: jaxsparse.sparcml(k=8, bits=4, momentum=0.9),
    "dgc": lambda: jaxsparse.dgc(0.05),
    "warm_up": lambda: jaxsparse.exchange(warm_up(reducers.TopK(0.02), steps=15, stages=2)),
    "delay": lambda: jaxsparse.top_k(0.05, delay=1, momentum=0.9, bucket_size=2000),
    "no_dense": lambda: jaxsparse.top_k(0.05, delay=1, momentum=0.9, is_dense=lambda *_: False),
    "bfloat16": lambda: jaxsparse.top_k(0.05, accumulator_dtype="bfloat16", momentum=0.9),
    "partition": lambda: jaxsparse.partition(
        {"w": jaxsparse.reducers.TopK(0.05), "v": jaxsparse.reducers.Quantized()}, momentum=0.9
    ),
}

# Local steps. One case is saved between two outer steps, one while an exchange is on its way.
LOCAL = {
    "sparse_loco": {
        "exchange": jaxsparse.chunked_top_k(4, 64, decay=0.95),
        "optimizer": optax.sgd(0.7),
        "every": 4,
    },
    "streaming": {
        "exchange": jaxsparse.dense(),
        "optimizer": optax.sgd(0.7, 0.9, nesterov=True),
        "every": 4,
        "streaming": jaxsparse.outer.Streaming(
            2, overlap=3, split=lambda path: int(path in ("['b']", "['v']"))
        ),
    },
}


@functools.cache
def mesh():
    return jax.make_mesh((WORKERS,), ("data",))


def optimizer(name):
    return optax.chain(CASES[name](), optax.sgd(optax.cosine_decay_schedule(0.1, STEPS)))


def start(name):
    if name in LOCAL:
        return local_steps(name).init((PARAMS, optax.adam(0.01).init(PARAMS)))
    return shard((PARAMS, optimizer(name).init(PARAMS)), mesh())


@functools.cache
def program(name):
    rows = lambda params, targets: jax.tree.map(lambda p, t: p[None] - t, params, targets)
    return jax.jit(trainer(optimizer(name), rows), donate_argnums=0)


@functools.cache
def local_steps(name):
    def step(state, targets):
        params, opt_state = state
        grads = jax.tree.map(lambda p, t: p - t[0], params, targets)
        updates, opt_state = optax.adam(0.01).update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), ()

    return jaxsparse.LocalSteps(step, mesh=mesh(), **LOCAL[name])


def train(name, state, first, last):
    """Trains from step `first` to step `last` - 1. `state` is donated."""
    for i in range(first, last):
        rng = np.random.default_rng(i)
        targets = {n: rng.standard_t(2, (WORKERS, *p.shape)) for n, p in PARAMS.items()}
        targets = jax.tree.map(spread, targets)
        if name in LOCAL:
            state, _ = local_steps(name)(state, targets, i)
        else:
            state = program(name)(state, targets)
        jax.block_until_ready(state)
    return state


def spread(x):
    """The whole array, which each process has, as float32 on the devices."""
    split = NamedSharding(mesh(), PartitionSpec("data"))
    return jax.make_array_from_callback(x.shape, split, lambda index: np.float32(x[index]))


def manager(folder):
    return ocp.CheckpointManager(folder / "states")


def arrays(state):
    """Path and NumPy array of each leaf, in dtypes that `np.savez` knows."""
    narrow = lambda x: x.dtype == jnp.bfloat16
    return [
        (jax.tree_util.keystr(path), np.asarray(x, np.float32 if narrow(x) else x.dtype))
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    ]


def straight(folder, names):
    states = {name: train(name, start(name), 0, SAVED_AT) for name in names}
    with manager(folder) as saved:
        saved.save(SAVED_AT, args=ocp.args.StandardSave(states))
        # Each step writes over its donated input, while Orbax may still be writing files.
        states = {name: train(name, states[name], SAVED_AT, STEPS) for name in names}
    for name, state in states.items():
        np.savez(folder / f"{name}.npz", *(x for _, x in arrays(state)))


def resumed(folder, names):
    targets = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        {name: start(name) for name in names},
    )
    with manager(folder) as saved:
        assert saved.latest_step() == SAVED_AT
        states = saved.restore(SAVED_AT, args=ocp.args.StandardRestore(targets))
    for name in names:
        state = train(name, states[name], SAVED_AT, STEPS)
        with np.load(folder / f"{name}.npz") as expected:
            for (path, x), other in zip(arrays(state), expected.values(), strict=True):
                np.testing.assert_array_equal(x, other, err_msg=name + path)
        print(name, "equal", flush=True)


def checkpoints(folder):
    """The multi-host example's own checkpoints."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / n) for n in ("", "multihost")]
    import train

    parser = train.flags()
    flags = ["--resume", "--checkpoint-every", "1", "--steps", "1000000", "--checkpoint-dir"]
    return train.Checkpoints(parser.parse_args([*flags, str(folder)]), parser), train.Progress


def join():
    """Joins the other processes, and takes all devices for workers."""
    global WORKERS
    jax.distributed.initialize()
    WORKERS = jax.device_count()


def killed(folder, hangs_after=None):
    """Saves states until it is killed. All arrays of a state are noise plus the number of its step.

    After `hangs_after` saves, one never ends.
    """
    saved, progress_of = checkpoints(folder)

    # Orbax would compress constants to almost nothing.
    noise = np.random.default_rng(0).integers(0, 2**20, (500, 500)).astype(np.float32)

    def filled(step):
        params = {str(i): noise + np.float32(step) for i in range(4)}
        residual = PerWorker(np.tile(noise + np.float32(step), (WORKERS, 1, 1)))
        return shard((params, residual), mesh())

    state, progress = saved.resume(filled(0), progress_of(0, WORKERS, 0.0, []), mesh())
    for leaf in jax.tree.leaves(state):
        for part in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(part.data) - noise, progress.step)
    print("found", progress.step, os.getpid(), flush=True)
    for step in range(progress.step + 1, 1000000):
        if hangs_after is not None and step == progress.step + hangs_after + 1:
            saved._manager.wait_until_finished()
            # Process 0 calls this when all have written their arrays.
            ocp.StandardCheckpointHandler.finalize = lambda *_: time.sleep(1000)
        saved.save(filled(step), progress_of(step, WORKERS, 0.0, []))


def hanging(folder):
    join()
    killed(folder, hangs_after=2)


@jax.jit
def means(state):
    """Means over workers of arrays that each worker has, and all others."""
    own = lambda x: isinstance(x, PerWorker)
    mean = lambda x: jnp.mean(x.value, axis=0) if own(x) else x
    return jax.tree.map(mean, state, is_leaf=own)


def moved(folder, names):
    """Goes on with as many workers as there are devices, from the checkpoint of other workers."""
    join()
    for name in names:
        saved, progress_of = checkpoints(folder / name)
        state, progress = saved.resume(start(name), progress_of(0, WORKERS, 0.0, []), mesh())
        file = folder / f"{name}.npz"
        if progress.step:
            with np.load(file) as expected:
                for (path, x), other in zip(arrays(means(state)), expected.values(), strict=True):
                    scale = np.abs(other).max(initial=0.0)
                    np.testing.assert_allclose(
                        x, other, rtol=0, atol=1e-6 * scale, err_msg=name + path
                    )
        multihost_utils.sync_global_devices("compared")
        last = progress.step + 3
        state = train(name, state, progress.step, last)
        saved.save(state, progress_of(last, WORKERS, 0.0, []))
        result = arrays(means(state))
        for path, x in result:
            for other in multihost_utils.process_allgather(x)[None]:
                np.testing.assert_array_equal(other, np.broadcast_to(x, other.shape), path)
        if jax.process_index() == 0:
            np.savez(file, *(x for _, x in result))
        saved.close()
        print(name, progress.step, "agree", flush=True)


if __name__ == "__main__":
    what, path, *names = sys.argv[1:]
    modes = (straight, resumed, killed, hanging, moved)
    run = {mode.__name__: mode for mode in modes}[what]
    run(Path(path), *([names] if names else []))
