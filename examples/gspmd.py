"""A transformer on three mesh axes: JAX handles two, and jaxsparse compresses over the third.

Eight emulated devices act as two hosts of four. Inside a host, parameters are sharded over "fsdp"
and "tp" (FSDP and tensor parallelism), as the metadata of their Flax nnx initializers says. JAX
adds the communication that this needs. Each method trains the same model on the same data:

- GSPMD: `jax.jit` and Optax alone. JAX sums gradients over hosts, too.
- dense: jaxsparse between hosts, uncompressed. It has the same losses as GSPMD.
- int4: jaxsparse in four bits between hosts. (Sparse gradients train Adam badly.)

The model reads the bytes of Python's own reference manual, so nothing is downloaded:

    python examples/gspmd.py
    python examples/gspmd.py --methods GSPMD int4 --steps 1000
"""

import argparse
import functools
from collections.abc import Iterator
from pydoc_data import topics
from typing import Any

import digits
import jax
import numpy as np
import optax
from digits import number, shared_batch
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.progress import track

import jaxsparse

MESH = {"hosts": 2, "fsdp": 2, "tp": 2}  # the slow axis first
BATCH = ("hosts", "fsdp")  # axes that divide the windows of a batch
METHODS = ("GSPMD", "dense", "int4")
BYTES = 256  # the vocabulary
HEADS = 4


def sharded(*axes: str | None) -> Any:
    """An initializer for a parameter whose dimensions are sharded over these axes."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            width,
            kernel_init=sharded("fsdp", "tp", None),
            out_kernel_init=sharded("tp", None, "fsdp"),
            use_bias=False,
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, kernel_init=sharded("fsdp", "tp"), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=sharded("tp", "fsdp"), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """A byte-level language model, of windows of `length` bytes at most."""

    def __init__(self, width: int, layers: int, length: int, rngs: nnx.Rngs):
        # The lookup below splits windows over "fsdp". If the table's columns were split over it,
        # too, XLA would gather the table, even across hosts.
        table = sharded("fsdp", "tp")
        self.embedding = nnx.Param(table(rngs.params(), (BYTES, width)))
        self.positions = nnx.Param(table(rngs.params(), (length, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.output = nnx.Linear(width, BYTES, kernel_init=sharded("fsdp", "tp"), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores of the next byte: int[n, length] to float[n, length, 256]."""
        x = self.embedding[tokens] + self.positions[: tokens.shape[1]]
        # jaxsparse takes "hosts" out, where this is the model of one host.
        x = jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def loss_of(model: Transformer, windows: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of a byte, in nats; windows are int32[n, length + 1]."""
    scores = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()


def train(method: str, args: argparse.Namespace, mesh: Mesh) -> str:
    """Trains a model on `mesh`, which must also be the mesh of the context. Its row."""
    is_ours = method != "GSPMD"
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0, args.lr, args.steps // 10, args.steps))
    value_and_grad: Any = jax.value_and_grad
    if is_ours:  # two of jaxsparse's three lines
        int4 = functools.partial(jaxsparse.quantized, "int4")
        make: Any = {"dense": jaxsparse.dense, "int4": int4}[method]
        tx = optax.chain(make(axis_name="hosts"), tx)
        value_and_grad = functools.partial(jaxsparse.value_and_grad, axis_name="hosts")

    model = Transformer(args.width, args.layers, args.length, nnx.Rngs(args.seed))
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
    if is_ours:
        state = jaxsparse.shard(state, mesh, axis_name="hosts")  # the third

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        of_model, params = nnx.split(model)
        loss_of_params = lambda params, windows: loss_of(nnx.merge(of_model, params), windows)
        loss, grads = value_and_grad(loss_of_params)(params, windows)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss.mean()

    losses, moved, held = [], None, digits.bytes_held(state)
    placed = NamedSharding(mesh, PartitionSpec(BATCH))
    for windows in track(batches(args), method, args.steps):
        batch = jax.device_put(windows, placed)
        moved = moved or jaxsparse.wire_bytes(run, state, batch, mesh=mesh)
        state, loss = run(state, batch)
        losses.append(float(loss))  # waits: emulated devices may deadlock on queued steps
    assert moved is not None
    mean = np.mean(losses[-max(1, args.steps // 10) :])
    across, inside = (x.received for x in (moved.across("hosts"), moved.within("hosts")))
    return f"{method:<7} {mean:.4f} {across:>16,.0f} {inside:>16,.0f} {held:>16,}"


def batches(args: argparse.Namespace) -> Iterator[np.ndarray]:
    """Random windows of all hosts together, int32[windows, length + 1]: inputs and targets."""
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)
    rng = np.random.default_rng(args.seed)
    for _ in range(args.steps):
        starts = rng.integers(len(text) - args.length, size=args.windows)
        yield text[starts[:, None] + np.arange(args.length + 1)].astype(np.int32)


def main() -> None:
    args = flags().parse_args()
    args.windows = shared_batch(args.windows, MESH["hosts"] * MESH["fsdp"])
    args.width = shared_batch(args.width, HEADS * MESH["tp"])
    args.length = shared_batch(args.length, MESH["fsdp"])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(np.prod(list(MESH.values()))))
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH))
    # In this context nnx places parameters as their metadata says.
    with jax.set_mesh(mesh):
        rows = [train(name, args, mesh) for name in METHODS if name in args.methods]
    print("Loss in nats a byte; bytes that a device receives in one step, as compiled, and holds:")
    print("method    loss     across hosts      inside them             held", *rows, sep="\n")


def flags() -> argparse.ArgumentParser:
    parser = digits.parser_of(__doc__)
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help="(default: all)")
    add("--windows", type=number(int, 1), default=32,
        help="of all hosts, rounded up to what they can share (default: 32)")  # fmt: skip
    add("--length", type=number(int, 1), default=64, help="bytes of a window (default: 64)")
    add("--width", type=number(int, 8), default=128,
        help="of the model, rounded up to what its heads can share (default: 128)")  # fmt: skip
    add("--layers", type=number(int, 1), default=2, help="(default: 2)")
    add("--steps", type=number(int, 1), default=200, help="(default: 200)")
    add("--lr", type=number(float, 0), default=3e-3, help="of Adam, its peak (default: 0.003)")
    add("--seed", type=number(int, 0), default=0, help="(default: 0)")
    return parser


if __name__ == "__main__":
    main()
