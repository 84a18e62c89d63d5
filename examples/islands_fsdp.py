"""An island of several devices on a preemptible machine: FSDP inside, others through a store.

Four emulated devices share weights and moments (FSDP). After ten steps of its own the island
exchanges what it moved with the others, in four bits and beside the next steps. Start one on each
machine, or two here, in two shells:

    python examples/islands_fsdp.py --store out/run --name oslo --save out/oslo
    python examples/islands_fsdp.py --store out/run --name rome --save out/rome

Ctrl-C, SIGKILL and power cuts are allowed: the same command comes back. At SIGTERM, with which
clouds announce that they take a machine, the island sends what it has, leaves, and saves its state.
When it comes back with that, it also has its moments, and what it still owes.

The number of a step, t, follows the rounds, which all islands share. Learning rate and batches go
by it, so both are right in each life of an island. The data are scikit-learn's 8x8 digits. On a
machine with GPUs, leave out the two lines of `jax.config` and make the mesh of all its devices.
"""

import argparse
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from digits import bytes_held, init_params, logits_of, loss_of, number
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsparse
from jaxsparse import islands

DEVICES = 4


def main() -> None:
    args = flags().parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("local",), axis_types=(AxisType.Auto,))
    share = NamedSharding(mesh, PartitionSpec("local"))  # each device has a part of the batch
    train_set, test_set = digits.load()
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.lr, args.rounds * args.every // 20, args.rounds * args.every, args.lr / 10
    )
    adamw = optax.adamw(1.0)  # the schedule has the rate

    @jax.jit  # over this island's own devices: nothing in it knows of the others
    def step(state: Any, numbered: tuple[int, digits.Digits]) -> tuple[Any, jax.Array]:
        params, opt_state = state
        t, batch = numbered
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = adamw.update(grads, opt_state, params)
        updates = optax.tree.scale(schedule(t), updates)
        return (optax.apply_updates(params, updates), opt_state), loss

    exchange = jaxsparse.quantized(
        "int4",
        gather=True,  # one message for each island
        axis_name=None,
        is_dense=lambda *_: False,  # so that all that a late island moved waits in its residual
    )
    train = islands.Islands(
        step,
        exchange,
        optax.sgd(1.0),  # of their mean
        islands.Store(args.store),
        name=args.name,
        every=args.every,
        overlap=args.every // 2,
        quorum=args.quorum,
        grace=args.grace,
        loss=lambda loss: loss,
        poll=0.05,
    )
    params = init_params(digits.shared_batch(args.hidden, DEVICES), 0, mesh)  # alike on all islands
    fresh = (params, adamw.init(params))

    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: leaving.append(number))
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(args.save.absolute(), options=options) as saved:
        last = saved.latest_step()
        if last is None:
            state = train.join(fresh)
        else:
            target = ocp.args.StandardRestore(train.like(fresh))
            state = train.join(saved.restore(last, args=target))
        t = max(last or 0, state.round * args.every + state.steps)
        own = "its saved state" if last is not None else "a fresh optimizer"
        print(f"{args.name} joins in round {state.round} with {own}, at step {t}", flush=True)
        while state.round < args.rounds and not leaving:
            before = state.round
            batch = batch_of(train_set, args.name, t)
            state, loss = jax.block_until_ready(train(state, (t, jax.device_put(batch, share))))
            # One step more, or those of rounds that it missed. While an exchange runs, `steps` has
            # begun anew and `round` has not gone on yet.
            t = max(t + 1, state.round * args.every + state.steps)
            if state.round > before:
                print(f"round {state.round}: step {t}, rate {schedule(t):.4f}, loss {loss:.3f}")
                if state.round % args.keep == 0:  # no message is on its way now
                    saved.save(t, args=ocp.args.StandardSave(state))
            time.sleep(args.pause)
        began = time.monotonic()
        state = train.leave(state, patience=args.notice)
        t = max(t + 1, state.round * args.every)
        saved.save(t, args=ocp.args.StandardSave(state), force=True)
        saved.wait_until_finished()
        seconds = time.monotonic() - began
        print(f"{args.name} leaves in round {state.round}, at step {t}, after {seconds:.1f} s")
    status = train.status()
    print(
        f"{status.counted} of {status.posted} messages counted, {status.sent:,} bytes sent, "
        f"{status.received:,} received, {status.waiting:.1f} s waited"
    )
    print(
        f"a device holds {bytes_held(state.params):,} bytes of global parameters, "
        f"{bytes_held(state.outer):,} of residuals, {bytes_held(state.worker):,} of its own state"
    )
    logits = logits_of(jax.device_get(state.params), test_set.images)
    print(f"test accuracy {100 * jnp.mean(logits.argmax(axis=1) == test_set.labels):.1f} %")


def batch_of(data: digits.Digits, name: str, t: int) -> digits.Digits:
    """The batch of a step: another one for each island and step, in whichever life."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), t])
    chosen = rng.integers(len(data.labels), size=64 * DEVICES)
    return digits.Digits(data.images[chosen], data.labels[chosen])


def flags() -> argparse.ArgumentParser:
    parser = digits.parser_of(__doc__)
    add = parser.add_argument
    add("--store", required=True, help="a folder, or s3://bucket/run, gs://..., az://...")
    add("--name", required=True, help="the island's name, another one for each")
    add("--save", type=Path, required=True, help="folder of its checkpoints, another one for each")
    add("--rounds", type=number(int, 1), default=40, help="of the whole run (default: 40)")
    add("--every", type=number(int, 2), default=10, help="local steps in a round (default: 10)")
    add("--keep", type=number(int, 1), default=10, help="rounds between saves (default: 10)")
    add("--quorum", type=number(int, 1), default=2, help="least islands in a round (default: 2)")
    add("--grace", type=number(float, 0), default=5.0, help="seconds for the late (default: 5)")
    add("--notice", type=number(float, 0), default=20.0, help="seconds to leave (default: 20)")
    add("--lr", type=number(float, 0), default=0.003, help="highest rate (default: 0.003)")
    add("--hidden", type=number(int, 32), default=384, help="units, of four (default: 384)")
    add("--pause", type=number(float, 0), default=0.0, help="seconds to sleep in each step")
    return parser


if __name__ == "__main__":
    main()
