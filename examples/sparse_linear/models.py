"""Linear classifiers: scores are features times weights. Two classes share one column."""

import jax
import jax.numpy as jnp
import numpy as np
import optax


def columns_of(classes: int) -> int:
    """Number of columns of the weights: one for each class, or one for two classes."""
    return 1 if classes == 2 else classes


def _targets(labels: jax.Array, columns: int) -> jax.Array:
    """1 for the label's column and -1 for the others."""
    hot = labels[:, None] if columns == 1 else jax.nn.one_hot(labels, columns, dtype=jnp.int32)
    return (2 * hot - 1).astype(jnp.float32)


def logistic(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy, multinomial if there are more than two classes."""
    if scores.shape[1] == 1:
        return jax.nn.softplus(-_targets(labels, 1) * scores).mean()
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def svm(scores: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean hinge loss. More than two classes add up the losses of each against the rest."""
    return jax.nn.relu(1 - _targets(labels, scores.shape[1]) * scores).sum(axis=1).mean()


LOSSES = {"logistic": logistic, "svm": svm}


def predicted(scores: np.ndarray) -> np.ndarray:
    """The labels, int[n], that float[n, columns] scores predict."""
    return (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
