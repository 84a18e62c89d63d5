"""Trains in float16 with dynamic loss scaling: a step that overflows is skipped on all workers.

Small gradients vanish in float16 unless the loss is scaled up, and large ones overflow if it is
scaled too far. So the scale is raised every so often. If a gradient overflows on any worker, all
workers skip the step and halve the scale. jaxsparse makes them agree, and counts skipped steps in
its state. The scale follows this counter. The data are scikit-learn's 8x8 digits, so nothing is
downloaded. Eight emulated devices are the workers:

    python examples/loss_scaling.py
"""

import argparse
import itertools
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import number

import jaxsparse


class LossScale(NamedTuple):
    """The factor that multiplies the loss. It is equal on all workers."""

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32: number of good steps since the scale last changed

    def after(self, is_good: jax.Array, raise_every: int) -> "LossScale":
        """The scale, doubled after `raise_every` good steps in a row or halved after a bad one."""
        good_steps = jnp.where(is_good, self.good_steps + 1, 0)
        rises = good_steps == raise_every
        factor = jnp.where(is_good, jnp.where(rises, 2.0, 1.0), 0.5)
        return LossScale(
            jnp.clip(self.scale * factor, 1.0, 2.0**24), jnp.where(rises, 0, good_steps)
        )


class State(NamedTuple):
    params: Any  # float32; the model computes with float16 copies
    exchange: Any  # jaxsparse's state
    optimizer: Any
    loss_scale: LossScale


def init_params(hidden: int, seed: int) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(seed)
    sizes = (64, hidden, hidden, 10)
    return [
        {
            "kernel": jnp.asarray(rng.normal(size=(n, m)) * (2 / n) ** 0.5, jnp.float32),
            "bias": jnp.zeros(m),
        }
        for n, m in itertools.pairwise(sizes)
    ]


def logits_of(params: list[dict[str, jax.Array]], images: Any) -> jax.Array:
    x = jnp.asarray(images, jnp.float16)
    for i, layer in enumerate(params):
        x = x @ layer["kernel"].astype(jnp.float16) + layer["bias"].astype(jnp.float16)
        x = jax.nn.relu(x) if i + 1 < len(params) else x
    return x.astype(jnp.float32)


def make_step(method: Any, optimizer: Any, raise_every: int):
    def step(state: State, batch: digits.Digits) -> tuple[State, jax.Array]:
        """The step of one worker, given its share of the batch and its own residual."""
        scale = state.loss_scale.scale

        def scaled_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = logits_of(params, batch.images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            return losses.mean() * scale, losses.mean()

        (_, loss), grads = jax.value_and_grad(scaled_loss, has_aux=True)(state.params)
        # Residuals outlive the current scale, so gradients go back to the loss's own units.
        grads = jax.tree.map(lambda g: g / scale, grads)
        updates, exchange = method.update(grads, state.exchange)
        # Let the counter decide, and not this worker's own gradients: it is equal on all workers,
        # so all take the same branch.
        is_good = optax.tree.get(exchange, "skipped") == optax.tree.get(state.exchange, "skipped")

        # The update of a skipped step is zero, but the optimizer would still age its moments by it.
        # So keep the old moments. jaxsparse's own state needs no such care. (With delay=1 the
        # update is not zero: apply it, and guard the scale only.)
        updates, optimizer_state = optimizer.update(updates, state.optimizer, state.params)
        keep = lambda new, old: jnp.where(is_good, new, old)
        state = State(
            jax.tree.map(keep, optax.apply_updates(state.params, updates), state.params),
            exchange,
            jax.tree.map(keep, optimizer_state, state.optimizer),
            state.loss_scale.after(is_good, raise_every),
        )
        return state, jax.lax.pmean(loss, "data")

    return step


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    workers = digits.find_workers(args, parser)
    size = digits.shared_batch(args.batch_size, workers.mesh.size)
    train_set, test_set = digits.load()

    method = jaxsparse.quantized("int4")
    optimizer = optax.adam(args.lr)
    params = init_params(args.hidden, args.seed)
    state = State(
        params,
        method.init(params),
        optimizer.init(params),
        LossScale(jnp.float32(args.scale), jnp.int32(0)),
    )
    state = jaxsparse.shard(state, workers.run)
    step = jaxsparse.data_parallel(
        make_step(method, optimizer, args.raise_every), workers.run, donate_argnums=0
    )

    skipped = 0
    for i, batch in enumerate(digits.batches(train_set, size, args.steps, args.seed), start=1):
        state, loss = jax.block_until_ready(step(state, batch))
        now = int(optax.tree.get(state.exchange, "skipped"))
        if now > skipped:
            print(
                f"step {i}: a gradient was not finite, skipped by all; "
                f"loss scale {float(state.loss_scale.scale):.0f}"
            )
        skipped = now
    accuracy = jnp.mean(logits_of(state.params, test_set.images).argmax(axis=-1) == test_set.labels)
    print(
        f"{args.steps} steps, {skipped} skipped, loss scale "
        f"{float(state.loss_scale.scale):.0f}, train loss {float(loss):.4f}, "
        f"test accuracy {100 * accuracy:.1f} %"
    )


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    digits.add_worker_flags(parser)
    add = parser.add_argument
    add("--scale", type=number(float, 1), default=2.0**24, help="first loss scale (default: 2^24)")
    add(
        "--raise-every",
        type=number(int, 1),
        default=50,
        metavar="STEPS",
        help="good steps after which the scale is doubled (default: 50)",
    )
    add("--steps", type=number(int, 1), default=200, help="(default: 200)")
    add(
        "--batch-size",
        type=number(int, 1),
        default=256,
        metavar="IMAGES",
        help="of all workers together, rounded up to what they can share (default: 256)",
    )
    add("--lr", type=number(float, 0), default=2e-3, help="of Adam (default: 0.002)")
    add("--hidden", type=number(int, 32), default=256, help="(default: 256)")
    add("--seed", type=number(int, 0), default=0, help="(default: 0)")
    return parser


if __name__ == "__main__":
    main()
