"""Trains in float16 with dynamic loss scaling: a step that overflows is skipped on all workers.

Small gradients vanish in float16 unless the loss is scaled up, and large ones overflow if it is
scaled too far. So the scale is raised every so often. If a gradient overflows on any worker, the
step is skipped, and the scale is halved: jaxsparse then returns updates that are nan for all, which
`optax.apply_if_finite` leaves out. The data are scikit-learn's 8x8 digits, so nothing is
downloaded. Eight emulated devices are the workers:

    python examples/loss_scaling.py
"""

import argparse
import functools
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import optax
from digits import number

import jaxsparse

HALVINGS = 24  # of the largest loss scale, to 1


class LossScale(NamedTuple):
    """The factor that multiplies the loss."""

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32: number of good steps since the scale last changed

    def after(self, is_good: jax.Array, raise_every: int) -> "LossScale":
        """The scale, doubled after `raise_every` good steps in a row or halved after a bad one."""
        good_steps = jnp.where(is_good, self.good_steps + 1, 0)
        rises = good_steps == raise_every
        factor = jnp.where(is_good, jnp.where(rises, 2.0, 1.0), 0.5)
        return LossScale(
            jnp.clip(self.scale * factor, 1.0, 2.0**HALVINGS), jnp.where(rises, 0, good_steps)
        )


class State(NamedTuple):
    params: Any  # float32; the model computes with float16 copies
    opt_state: Any
    loss_scale: LossScale


def logits_of(params: digits.Params, images: Any) -> jax.Array:
    x = jnp.asarray(images, jnp.float16)
    for i, layer in enumerate(params):
        x = x @ layer["kernel"].astype(jnp.float16) + layer["bias"].astype(jnp.float16)
        x = jax.nn.relu(x) if i + 1 < len(params) else x
    return x.astype(jnp.float32)


def make_step(tx: optax.GradientTransformation, raise_every: int, workers: int | None):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, batch: digits.Digits) -> tuple[State, jax.Array]:
        scale = state.loss_scale.scale

        def scaled_loss(
            params: Any, batch: digits.Digits, scale: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            """The loss of one worker, scaled and as it is."""
            logits = logits_of(params, batch.images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            return losses.mean() * scale, losses.mean()

        own = jaxsparse.value_and_grad(scaled_loss, has_aux=True, workers=workers)
        (_, losses), grads = own(state.params, batch, scale)
        # Residuals outlive the current scale, so gradients go back to the loss's own units.
        grads = jax.tree.map(lambda g: g / scale, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        is_good = optax.tree.get(opt_state, "last_finite")
        state = State(
            optax.apply_updates(state.params, updates),
            opt_state,
            state.loss_scale.after(is_good, raise_every),
        )
        return state, losses.mean()

    return step


def main() -> None:
    parser = flags()
    args = parser.parse_args()
    workers = digits.find_workers(args, parser)
    size = digits.shared_batch(args.batch_size, workers.mesh.size)
    train_set, test_set = digits.load()

    # A skipped update is nan, so that Adam's moments are kept, too. The wrapper is behind the
    # exchange: around it, it would see the gradients of all workers. `check` names such mistakes.
    tx = optax.chain(
        jaxsparse.quantized("int4", when_skipped="nan", workers=workers.simulated),
        optax.apply_if_finite(optax.adam(args.lr), max_consecutive_errors=HALVINGS),
    )
    params = digits.init_params(args.hidden, args.seed)
    jaxsparse.check(tx, params)
    scale = LossScale(jnp.float32(2.0**HALVINGS), jnp.int32(0))
    state = jaxsparse.shard(State(params, tx.init(params), scale), workers.where)
    step = make_step(tx, args.raise_every, workers.simulated)

    skipped = 0
    for i, batch in enumerate(digits.batches(train_set, size, args.steps, args.seed), start=1):
        state, loss = jax.block_until_ready(step(state, batch))
        now = int(optax.tree.get(state.opt_state, "total_notfinite"))
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
    parser = digits.parser_of(__doc__)
    digits.add_worker_flags(parser)
    parser.add_argument("--raise-every", type=number(int, 1), default=50, metavar="STEPS",
        help="good steps after which the scale is doubled (default: 50)")  # fmt: skip
    digits.add_training_flags(parser, steps=200, lr=2e-3, hidden=256)
    return parser


if __name__ == "__main__":
    main()
