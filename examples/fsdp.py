"""Fully sharded training inside a host, compressed exchange between hosts.

Eight emulated devices act as two hosts of four. Weights and Adam's moments are sharded over the
four devices of a host, so that each device holds a quarter of them (FSDP, ZeRO stage 3). The step
is any trainer's, under its own `jax.jit`: JAX gathers a weight where a layer needs it, and sums
the gradients over the fast axis, "local". Three lines add jaxsparse, which exchanges each device's
shard in four bits over the slow axis, "hosts". The data are scikit-learn's 8x8 digits, so nothing
is downloaded:

    python examples/fsdp.py
    python examples/fsdp.py --method dense
"""

import argparse
import functools
import itertools
from typing import Any

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import number
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.progress import track

import jaxsparse

HOSTS, LOCAL = 2, 4
AXES = ("hosts", "local")  # the slow axis first

Params = list[dict[str, jax.Array]]


def init_params(hidden: int, seed: int, mesh: Mesh) -> Params:
    """Initial parameters. Kernels are sharded along their first axis. Small biases stay whole."""
    rng = np.random.default_rng(seed)
    sizes = (64, hidden, hidden, 10)

    def put(values: np.ndarray, *axes: str) -> jax.Array:
        placed = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.device_put(values.astype(np.float32), placed)

    return [
        {
            "kernel": put(rng.normal(size=(n, m)) * (2 / n) ** 0.5, "local"),
            "bias": put(np.zeros(m)),
        }
        for n, m in itertools.pairwise(sizes)
    ]


def logits_of(params: Params, images: Any) -> jax.Array:
    """Scores of the ten digits: float[n, 64] to float[n, 10]."""
    for each in params[:-1]:
        images = jax.nn.relu(images @ each["kernel"] + each["bias"])
    return images @ params[-1]["kernel"] + params[-1]["bias"]


def loss_of(params: Params, batch: digits.Digits) -> jax.Array:
    logits = logits_of(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def bytes_held(tree: Any) -> int:
    """Bytes of `tree` on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def main() -> None:
    args = flags().parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", HOSTS * LOCAL)
    mesh = jax.make_mesh((HOSTS, LOCAL), AXES, axis_types=(AxisType.Auto,) * 2)
    train_set, test_set = digits.load()
    batch_size = digits.shared_batch(args.batch_size, HOSTS * LOCAL)
    share = NamedSharding(mesh, PartitionSpec(AXES))  # each device has a part of the batch
    batches = [
        jax.device_put(batch, share)
        for batch in digits.batches(train_set, batch_size, args.steps, args.seed)
    ]
    params = init_params(digits.shared_batch(args.hidden, LOCAL), args.seed, mesh)

    # Small leaves go uncompressed. The size of the shard decides: the last kernel's has 96 x 10
    # elements by default, fewer than 1024, so it travels with the biases.
    exchange = {
        "dense": jaxsparse.dense(axis_name="hosts", delay=args.delay),
        "int4": jaxsparse.quantized("int4", axis_name="hosts", delay=args.delay),
    }[args.method]

    tx = optax.chain(exchange, optax.adam(args.lr))  # 1: the exchange
    # 2: places the whole state. Each host has a residual, sharded as the parameters are.
    params, opt_state = jaxsparse.shard((params, tx.init(params)), mesh, axis_name="hosts")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, batch: digits.Digits) -> tuple[Params, Any, jax.Array]:
        own = jaxsparse.value_and_grad(loss_of, axis_name="hosts")  # 3: not jax's
        losses, grads = own(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    moved = jaxsparse.wire_bytes(step, params, opt_state, batches[0], mesh=mesh)
    for batch in track(batches, args.method):
        params, opt_state, loss = step(params, opt_state, batch)
        loss = float(loss)  # waits: emulated devices may deadlock on queued steps

    feedback, *adam = opt_state
    logits = logits_of(jax.device_get(params), test_set.images)
    accuracy = jnp.mean(logits.argmax(axis=1) == test_set.labels)
    print(f"{args.method}: train loss {loss:.4f}, test accuracy {100 * accuracy:.1f} %")
    print(
        f"a device receives {moved.across('hosts').received:,.0f} bytes a step from other hosts, "
        f"{moved.within('hosts').received:,.0f} from its own"
    )
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    print(
        f"a device holds {bytes_held(params):,} of {whole:,} bytes of parameters, "
        f"{bytes_held(adam):,} of Adam's moments, {bytes_held(feedback):,} of residuals"
    )


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--method", choices=["dense", "int4"], default="int4", help="(default: int4)")
    add("--delay", type=int, choices=[0, 1], default=0, help="steps (default: 0)")
    add("--batch-size", type=number(int, 1), default=256, help="of all devices (default: 256)")
    add("--steps", type=number(int, 1), default=200, help="(default: 200)")
    add("--lr", type=number(float, 0), default=1e-3, help="of Adam (default: 0.001)")
    add(
        "--hidden",
        type=number(int, 32),
        default=384,
        help="units, rounded up to what four devices can share (default: 384)",
    )
    add("--seed", type=number(int, 0), default=0, help="(default: 0)")
    return parser


if __name__ == "__main__":
    main()
