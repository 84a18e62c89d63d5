"""An LSTM language model whose embedding's gradient is sparse, and its loss."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class LanguageModel(nnx.Module):
    """Embedding, one LSTM layer and an output matrix of its own, behind a narrower layer.

    The gradient of `embedding` has rows other than 0 for the words of the batch only. That of
    `output` is dense: the softmax pushes every word's score down.
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
        """Scores of what follows: int[windows, length] to float[windows, length, words]."""
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

        # Not zeros: a scan's carry must be typed as differing between workers, as the gates are.
        nothing = jnp.zeros_like(gates[0, :, : kernel.shape[0]])
        _, states = jax.lax.scan(step, (nothing, nothing), gates)
        return self.output(nnx.relu(self.narrow(jnp.swapaxes(states, 0, 1))))


def loss(model: LanguageModel, windows: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of a word, in nats; windows are int[n, length + 1]."""
    scores = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()
