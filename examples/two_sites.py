"""Two sites with a slow link between them, and fully sharded training inside each.

Eight emulated devices act as two sites of four. Each site shards its weights and moments over its
devices (FSDP), and trains alone by Muon for ten steps. Then the sites exchange what they moved, in
four bits, with what rounding left fed back. Two fragments of the model take turns, and each travels
beside the next step (Streaming DiLoCo): sites wait only for what takes longer than that step. The
run is saved as it goes, and the same command with more steps goes on from what was saved:

    python examples/two_sites.py --steps 200 --save out/two_sites
    python examples/two_sites.py --steps 400 --save out/two_sites

The data are scikit-learn's 8x8 digits, so nothing is downloaded. On real sites, start one process
on each host with `jax.distributed.initialize()`, and make the mesh of all devices, sites first.
"""

import argparse
from pathlib import Path
from typing import Any

import digits
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from digits import bytes_held, init_params, logits_of, loss_of, number
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsparse

HOSTS, LOCAL = 2, 4
AXES = ("hosts", "local")  # the slow axis first


def main() -> None:
    args = flags().parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", HOSTS * LOCAL)
    mesh = jax.make_mesh((HOSTS, LOCAL), AXES, axis_types=(AxisType.Auto,) * 2)
    train_set, test_set = digits.load()
    share = NamedSharding(mesh, PartitionSpec(AXES))  # each device has a part of the batch
    batch_size = digits.shared_batch(256, HOSTS * LOCAL)
    params = init_params(384, args.seed, mesh)
    inner = optax.contrib.muon(args.lr, consistent_rms=0.2)

    def step(state: Any, batch: digits.Digits) -> tuple[Any, jax.Array]:
        """A step of one site, as in any trainer: nothing in it knows of the other."""
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = inner.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    exchange = jaxsparse.quantized("int4", axis_name="hosts")
    train = jaxsparse.LocalSteps(
        step,
        exchange,
        optax.sgd(1.0),  # of their mean
        mesh,
        axis_name="hosts",
        every=args.every,
        # The layers' numbers lead their paths: [0]['kernel'], [1]['kernel'], ...
        streaming=jaxsparse.outer.Streaming(fragments=2, overlap=1),
    )
    state = train.init((params, inner.init(params)))
    with ocp.CheckpointManager(args.save.absolute()) as saved:
        done = saved.latest_step() or 0
        if done >= args.steps:
            raise SystemExit(f"{args.save} has step {done}: give more --steps, or another --save")
        if done:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, jaxsparse.checksums.attach(state))
            state = jaxsparse.checksums.verify(
                saved.restore(done, args=ocp.args.StandardRestore(like))
            )
            print(f"goes on after step {done}")
        for t, batch in enumerate(digits.batches(train_set, batch_size, args.steps, args.seed)):
            if t < done:
                continue  # batches are drawn by the seed, so these were seen
            state, losses = jax.block_until_ready(train(state, jax.device_put(batch, share), t))
            if (t + 1) % args.every == 0:
                print(f"step {t + 1}: losses of the sites {losses}", end="")
                print(f", {int(state.skipped)} exchanges skipped")
            if (t + 1) % args.keep == 0:
                whole = jaxsparse.checksums.attach(state)
                saved.save(t + 1, args=ocp.args.StandardSave(whole))
    report(train, state, jax.device_put(batch, share), mesh, args)
    params = train.finish(state, args.steps).params
    accuracy = jnp.mean(
        logits_of(jax.device_get(params), test_set.images).argmax(axis=1) == test_set.labels
    )
    print(f"test accuracy {100 * accuracy:.1f} %")


def report(train: jaxsparse.LocalSteps, state: Any, batch: Any, mesh: Any, args: Any) -> None:
    """What to watch: bytes between sites, and bytes that a device holds."""
    inside = jaxsparse.wire_bytes(train, state, batch, mesh=mesh)
    between = sum(
        jaxsparse.wire_bytes(exchange, state, mesh=mesh).across("hosts").received
        for exchange in train.outer
    )
    dense = 4 * sum(x.size for x in jax.tree.leaves(state.params)) / LOCAL
    print(
        f"a device receives {between / args.every:,.0f} bytes a step from the other site, where "
        f"dense gradients are {dense:,.0f}"
    )
    print(
        f"and {inside.within('hosts').received:,.0f} from its own site, for FSDP and for Muon's "
        "products of matrices"
    )
    print(
        f"a device holds {bytes_held(state.params):,} bytes of global parameters and "
        f"{bytes_held(state.outer):,} of residuals"
    )


def flags() -> argparse.ArgumentParser:
    parser = digits.parser_of(__doc__)
    add = parser.add_argument
    add("--steps", type=number(int, 1), default=200, help="of the whole run (default: 200)")
    add("--every", type=number(int, 3), default=10, help="steps between exchanges (default: 10)")
    add("--lr", type=number(float, 0), default=0.005, help="of Muon (default: 0.005)")
    add("--save", type=Path, default=Path("out/two_sites"), help="folder of checkpoints")
    add("--keep", type=number(int, 1), default=50, help="steps between checkpoints (default: 50)")
    add("--seed", type=number(int, 0), default=0, help="(default: 0)")
    return parser


if __name__ == "__main__":
    main()
