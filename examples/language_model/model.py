"""An LSTM language model with a sparse gradient of its embedding, and its loss."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class LanguageModel(nnx.Module):
    """An embedding, one LSTM layer, a narrower layer, and an output matrix that is not shared.

    The gradient of `embedding` is zero in all rows but those of the batch's words. The gradient of
    `output` is dense, because the softmax pushes every word's score down.
    """

    def __init__(self, words: int, width: int, hidden: int, output: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(words, width, rngs=rngs)
        self.gates = nnx.Linear(width, 4 * hidden, rngs=rngs)
        self.recurrent = nnx.Linear(
            hidden, 4 * hidden, use_bias=False, kernel_init=nnx.initializers.orthogonal(), rngs=rngs
        )
        self.narrow = nnx.Linear(hidden, output, rngs=rngs)
        self.output = nnx.Linear(output, words, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores of the next words: int[windows, length] to float[windows, length, words]."""
        gates = jnp.swapaxes(self.gates(self.embedding(tokens)), 0, 1)  # time first, for the scan
        kernel = self.recurrent.kernel[...]

        def step(
            carry: tuple[jax.Array, jax.Array], gates: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            short, long = carry
            enter, keep, leave, new = jnp.split(gates + short @ kernel, 4, axis=-1)
            long = nnx.sigmoid(keep + 1) * long + nnx.sigmoid(enter) * jnp.tanh(new)
            short = nnx.sigmoid(leave) * jnp.tanh(long)
            return (short, long), short

        # Made of the gates, so that the type says, as theirs does, that workers' values differ.
        nothing = jnp.zeros_like(gates[0, :, : kernel.shape[0]])
        _, states = jax.lax.scan(step, (nothing, nothing), gates)
        return self.output(nnx.relu(self.narrow(jnp.swapaxes(states, 0, 1))))


def loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of a word, in nats; windows are int[n, length + 1]."""
    scores = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()
