"""Run in three processes by test_agreement: what each says when process 1 is unlike the others.

A case in which processes differ raises the same error in all, so the next one can follow. With an
argument, processes begin to train from the seed of their environment, and end.
"""

import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from training import trainer

import jaxsparse
from jaxsparse import LocalSteps, shard
from jaxsparse.processes.group import ProcessGroup

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_disable_most_optimizations", True)
LIMIT = 2.0  # of the watch: all must be late by it
LATE = 8.0  # none may be late by it but the one that sleeps, however busy the machine is
SIZE = 40


def loss(params, batch):
    return jnp.mean(jnp.square(batch @ params["w"] - 1))


def training(mesh, system, rate=0.1):
    """A step, and its state as it is before `shard`."""
    tx = optax.chain(system, optax.sgd(rate))
    step = jax.jit(trainer(tx, jaxsparse.grad(loss, mesh=mesh)))
    params = {"w": jnp.ones(SIZE)}
    return jaxsparse.watch(step, mesh), (params, tx.init(params))


def local(mesh, rate, every=2):
    tx = optax.sgd(rate)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    pair = jaxsparse.dense(), optax.sgd(1.0)
    run = LocalSteps(step, *pair, mesh, every=every, params=lambda state: state[0])
    params = {"w": jnp.ones(SIZE)}
    state = run.init((params, tx.init(params)))
    return lambda batch: lambda: run(state, batch, 0)


def replicated(mesh, tree):
    """An array of each process's own values. `device_put` would compare them."""
    sharding = NamedSharding(mesh, PartitionSpec())
    put = lambda x: jax.make_array_from_single_device_arrays(
        x.shape, sharding, [jax.device_put(x, d) for d in jax.local_devices()]
    )
    return jax.tree.map(put, tree)


def cases(mesh, is_odd):
    """A name and a call for each difference. `is_odd` says whether this process is process 1."""
    top_k = lambda: jaxsparse.top_k(0.1, is_dense=lambda *_: False)
    batch = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("data")), np.ones((2, SIZE), np.float32)
    )

    def start(system, **settings):
        step, state = training(mesh, system, **settings)
        return lambda: step(shard(state, mesh), batch)

    yield "equal", start(top_k())
    yield "rate", start(top_k(), rate=0.2 if is_odd else 0.1)
    yield "local", local(mesh, 0.2 if is_odd else 0.1)(batch)
    yield "every", local(mesh, 0.1, every=3 if is_odd else 4)(batch)
    scaled = jaxsparse.watch(jax.jit(lambda s, x: s["rate"] * x.mean()), mesh)
    rate = replicated(mesh, {"rate": np.float32(0.2 if is_odd else 0.1)})
    yield "value", lambda: scaled(rate, batch)
    yield "late", lambda: time.sleep(1.5 * LATE * is_odd) or scaled({"rate": np.ones(2)}, batch)


def begin():
    with jaxsparse.fail_at_once(limit=60):
        drawn = lambda name: np.random.default_rng(int(os.environ[name])).normal(size=SIZE)
        params = {"w": np.float32(drawn("SEED"))}
        inside = jax.local_device_count()
        mesh = jax.make_mesh((jax.process_count(), inside), ("data", "fsdp"))
        if inside > 1:  # cut inside of a process, and JAX does not compare it
            cut, values = NamedSharding(mesh, PartitionSpec("fsdp")), np.float32(drawn("CUT_SEED"))
            params["cut"] = jax.make_array_from_callback((SIZE,), cut, lambda index: values[index])
        shard(params, mesh)


def main():
    jax.distributed.initialize()
    if len(sys.argv) > 1:
        return begin()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    is_odd = jax.process_index() == 1
    for name, call in cases(mesh, is_odd):
        ProcessGroup.limit = LATE if name == "late" else 60.0
        try:
            jax.block_until_ready(call())
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
        else:
            print(f"{name}: ran", flush=True)

    ones = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("data")), np.ones(1, np.float32)
    )
    mean = jaxsparse.watch(jax.jit(jnp.mean), mesh)
    ProcessGroup.limit = 60.0
    jax.block_until_ready(mean(ones))
    with jaxsparse.fail_at_once(limit=LIMIT):
        for _ in range(3 - is_odd):  # process 1 leaves one out
            jax.block_until_ready(mean(ones))
        print("all called", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main()
