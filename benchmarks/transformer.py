"""A byte-level transformer, its loss, and the text that it reads: Python's own library."""

import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

BYTES = 256  # the vocabulary


class Block(nnx.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, width: int, layers: int, heads: int, length: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(BYTES, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.output = nnx.Linear(width, BYTES, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Scores of the next byte: int[n, length] to float[n, length, 256]."""
        x = self.embedding(text) + self.positions(jnp.arange(text.shape[1]))
        mask = nnx.make_causal_mask(text)
        for block in self.blocks:
            x = block(x, mask)
        return self.output(self.norm(x))


def loss_of(model: Transformer, windows: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of a byte, in nats; windows are int32[n, length + 1]."""
    scores = model(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, windows[:, 1:]).mean()


class Corpus(NamedTuple):
    """Two texts."""

    train: np.ndarray  # uint8[n]
    held_out: np.ndarray  # uint8[m], of other files


def corpus() -> Corpus:
    """The standard library's modules that are single files. About one in ten is held out."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts[zlib.crc32(path.name.encode()) % 10 == 0].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return Corpus(train, held_out)


def windows(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Random windows, int32[count, length + 1]: inputs and targets."""
    starts = rng.integers(len(text) - length, size=count)
    return text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
