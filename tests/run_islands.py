"""An island on a mesh, for `test_islands_of_processes.py`, which runs it in several processes, too.

As a script, `run_islands.py STORE ROUNDS SETTINGS PLAN` in each process of the island, with
settings of `Islands` in JSON, it prints a report of each round. The plan is "train"; "wrong", which
then uses islands wrongly; "kill R", by which process R kills itself once a message of the island
has counted; or "wait R", by which it does so while it waits for others.
"""

import contextlib
import json
import os
import signal
import sys
import threading

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxsparse
from jaxsparse.islands.processes import lead
from jaxsparse.processes.group import whole_group

SHAPES = {"w": (64, 48), "v1": (48, 32), "b": (32,)}
SPECS = {"w": P("x"), "v1": P(None, "x"), "b": P()}
TX = optax.sgd(0.1, momentum=0.9)


def placed(x, mesh, spec):
    """A NumPy array, which all processes have, on a mesh."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])


def start(mesh, seed, *, is_spread=True):
    """A training state, with FSDP or as replicas. Islands start from unlike numbers, and join."""
    rng = np.random.default_rng(seed)
    made = {name: np.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    specs = SPECS if is_spread else dict.fromkeys(SPECS, P())
    params = {name: placed(x, mesh, specs[name]) for name, x in made.items()}
    return params, TX.init(params)


@jax.jit
def step(state, batch):
    """Batches are of whole numbers, so that sums over devices are exact in any order."""
    params, opt_state = state
    mean = jax.tree.map(lambda x: x.mean(0), batch)
    grads = jax.tree.map(lambda g, w: g + 0.1 * w, mean, params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), mean["b"].sum()


def batches(mesh, seed):
    """Batches spread over the devices, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        yield {
            name: placed(np.float32(rng.integers(-8, 9, (4, *shape))), mesh, P("x"))
            for name, shape in SHAPES.items()
        }


def island(store, **settings):
    usual = {"every": 3, "quorum": 2, "grace": 0.1, "poll": 0.02, "snapshots": 2}
    exchange = jaxsparse.chunked_top_k(64, decay=0.95, axis_name=None)
    return jaxsparse.islands.Islands(
        step, exchange, optax.sgd(1.0), store, loss=lambda loss: loss, **{**usual, **settings}
    )


def trained(
    store,
    devices,
    rounds,
    *,
    seed,
    is_spread=True,
    counts=0,
    each_step=lambda train, state: None,
    **settings,
):
    """Makes so many rounds, until so many of its messages counted, or `each_step` returns True.

    Returns the island and its state.
    """
    mesh = Mesh(np.array(devices), "x")
    train, given = island(store, **settings), batches(mesh, seed)
    state = train.join(start(mesh, seed, is_spread=is_spread))
    last = state.round + rounds
    while state.round < last or train.status().counted < counts:
        state, _ = train(state, next(given))
        if each_step(train, state):
            break
    return train, state


class Link:
    """A way to a store, which the first process alone may use, and which fails as it is told."""

    def __init__(self, store):
        self._store, self.error = store, None

    def __getattr__(self, operation):
        def ask(*args):
            assert jax.process_index() == 0, "another process asks the store"
            if self.error is not None:
                raise self.error
            return getattr(self._store, operation)(*args)

        return ask


@contextlib.contextmanager
def told(what):
    """Prints an error, which there must be."""
    try:
        yield
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        print(f"{what}: {type(error).__name__}: {error}", *notes, flush=True)
    else:
        print(f"{what}: nothing", flush=True)


def use_wrongly(link, train, state):
    """Prints what processes say of errors that are raised in all of them, or would be in one."""
    rank, mesh = jax.process_index(), Mesh(np.array(jax.devices()), "x")
    given = batches(mesh, 0)
    join = lambda state, **settings: island(link, **{"name": "pair", **settings}).join(state)
    with told("settings"):
        join(state, every=3 + rank)
    with told("state"):
        join(state._replace(round=state.round + rank))
    with told("local"):
        join(start(Mesh(np.array(jax.local_devices()), "x"), 0))
    other = island(Link(jaxsparse.islands.Store("memory://")), name="pair", quorum=1, weighted=True)
    state_of_other = other.join(start(mesh, 0))
    with told("weights"):
        for weight in 3 * [0.1] + 2 * [0.1] + [0.1 + rank]:
            state_of_other, _ = other(state_of_other, next(given), weight)
    assert other.status().counted == 1
    with told("refused"):
        link.error = PermissionError("no access to the store")
        join(state)
    link.error = None
    train = island(link, name="pair", quorum=1, patience=0.2, overlap=1)
    state = train.join(state)
    while not state.steps:  # until a thread has an exchange
        state, _ = train(state, next(given))
    with told("down"):
        link.error = jaxsparse.islands.UnreachableError("down")
        for _ in range(9):
            state, _ = train(state, next(given))
    link.error = None
    for i in range(300):
        assert lead(int, i if rank == 0 else "none") == i
        if i % 32 == 0:
            multihost_utils.sync_global_devices(f"{i}")
    if rank == 0:
        from jaxsparse.comm import compat

        notes = compat.shared_store().key_value_dir_get_bytes(whole_group()._place)
        print("notes", len(notes) < 200, flush=True)


def main(url, rounds, settings, plan="train"):
    plan, _, victim = plan.partition(" ")
    link, settings = Link(jaxsparse.islands.Store(url)), json.loads(settings)
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)

    def each_step(train, state):
        if victim != str(jax.process_index()):
            return
        if plan == "kill" and train.status().counted:
            die()
        if plan == "wait" and state.steps == 1:
            threading.Timer(3.0, die).start()

    train, state = trained(link, jax.devices(), int(rounds), each_step=each_step, **settings)
    for report in train.status().rounds:
        print("round", json.dumps(report._asdict()), flush=True)
    jaxsparse.check_replicas((state.worker, state.params, state.outer))
    digest = np.asarray(train._member.arithmetic.digest(state))
    print("digest", digest.tolist(), state.round, state.steps, flush=True)
    if plan == "wrong":
        use_wrongly(link, train, state)


if __name__ == "__main__":
    is_short = sys.argv[-1].startswith(("kill", "wait"))
    jax.distributed.initialize(heartbeat_timeout_seconds=10 if is_short else 100)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_disable_most_optimizations", True)
    with jaxsparse.fail_at_once():
        main(*sys.argv[1:])
