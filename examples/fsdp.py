"""Fully sharded training on two levels: parameters sharded in a host, compressed between hosts.

Eight emulated devices are two hosts of four. Weights and Adam's moments are sharded over the four
devices of a host, so each holds a quarter of them (FSDP, ZeRO stage 3), and gathered layer by layer
when they are needed. Gradients are summed over the fast axis, "local", by the reduce-scatter that
JAX makes of the gather. Over the slow one, "hosts", each device exchanges its shard by SparDL. The
data are scikit-learn's 8x8 digits (nothing is downloaded):

    python examples/fsdp.py
    python examples/fsdp.py --method dense
"""

import argparse
import itertools
from typing import Any

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import number
from rich.progress import track

import jaxsparse
from jaxsparse import Sharded

HOSTS, LOCAL = 2, 4
AXES = ("hosts", "local")  # the slow axis first


def init_params(hidden: int, seed: int) -> list[dict[str, Any]]:
    """Kernels are sharded along their first axis; biases are small, and stay whole."""
    rng = np.random.default_rng(seed)
    sizes = (64, hidden, hidden, 10)
    return [
        {
            "kernel": Sharded(jnp.asarray(rng.normal(size=(n, m)) * (2 / n) ** 0.5, jnp.float32)),
            "bias": jnp.zeros(m),
        }
        for n, m in itertools.pairwise(sizes)
    ]


# What is gathered is not kept for the backward pass, but gathered again (on CPU XLA keeps it).
@jax.checkpoint
def layer(params: dict[str, Any], x: jax.Array) -> jax.Array:
    kernel = jax.lax.all_gather(params["kernel"].value, "local", tiled=True)
    return x @ kernel + params["bias"]


def loss_of(params: list[dict[str, Any]], batch: digits.Digits) -> jax.Array:
    x: Any = batch.images
    for each in params[:-1]:
        x = jax.nn.relu(layer(each, x))
    logits = layer(params[-1], x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def make_step(tx: optax.GradientTransformation):
    def step(state: Any, batch: digits.Digits) -> tuple[Any, jax.Array]:
        """What one device does, with its shards and its share of the batch."""
        params, opt_state = state
        # Local along "hosts" only: along "local" JAX is to sum gradients, of shards and of whole
        # leaves alike. Divided by the devices that they are summed over, they are means.
        loss, grads = jax.value_and_grad(lambda p: loss_of(p, batch) / LOCAL)(
            jaxsparse.local(params, "hosts")
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jax.lax.pmean(loss * LOCAL, AXES)

    return step


def bytes_by_axis(sent: jaxsparse.traffic.WireBytes) -> dict[str, float]:
    """Bytes that a device receives in a step; a group of four is one host's."""
    total = {"hosts": 0.0, "local": 0.0}
    for collective in sent.collectives:
        in_host = collective.group_size == LOCAL and collective.op != "collective-permute"
        total["local" if in_host else "hosts"] += collective.count * collective.received_bytes
    return total


def bytes_held(tree: Any) -> int:
    """Bytes of `tree` on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def main() -> None:
    args = flags().parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", HOSTS * LOCAL)
    mesh = jax.make_mesh((HOSTS, LOCAL), AXES)
    train_set, test_set = digits.load()

    reducer: Any = {
        "dense": jaxsparse.systems.Dense(),
        "spardl": jaxsparse.systems.SparDL(args.density),
    }[args.method]
    # What is small goes uncompressed, and it is the shard that counts: of the last kernel 96 x 10
    # elements by default, fewer than 1024, travel with the biases.
    exchange = jaxsparse.error_feedback(
        reducer, axis_name="hosts", dense_axis="local", sharded=True, delay=args.delay
    )
    tx = optax.chain(exchange, optax.adam(args.lr))

    params = jaxsparse.shard(
        init_params(digits.shared_batch(args.hidden, LOCAL), args.seed), mesh, axis_name=AXES
    )
    # On the mesh, where shards have their sizes: Adam's moments are sharded as the weights are.
    init = jaxsparse.data_parallel(tx.init, mesh, axis_name=AXES, batch_argnums=())
    state = params, init(params)
    step = jaxsparse.data_parallel(make_step(tx), mesh, axis_name=AXES, donate_argnums=0)

    batch_size = digits.shared_batch(args.batch_size, HOSTS * LOCAL)
    batches = list(digits.batches(train_set, batch_size, args.steps, args.seed))
    received = bytes_by_axis(jaxsparse.traffic.wire_bytes(step, state, batches[0]))
    for batch in track(batches, args.method):
        state, loss = step(state, batch)
        loss = float(loss)  # waits: emulated devices may deadlock on queued steps

    params, (feedback, *adam) = state
    weights = [(np.asarray(p["kernel"].value), np.asarray(p["bias"])) for p in params]
    x: Any = np.asarray(test_set.images)
    for kernel, bias in weights[:-1]:
        x = (x @ kernel + bias).clip(min=0)
    kernel, bias = weights[-1]
    accuracy = np.mean((x @ kernel + bias).argmax(axis=1) == test_set.labels)
    print(f"{args.method}: train loss {loss:.4f}, test accuracy {100 * accuracy:.1f} %")
    print(
        f"a device receives {received['hosts']:,.0f} bytes a step from other hosts, "
        f"{received['local']:,.0f} from its own"
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
    add("--method", choices=["dense", "spardl"], default="spardl", help="(default: spardl)")
    add("--density", type=number(float, 0), default=0.05, help="of spardl (default: 0.05)")
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
