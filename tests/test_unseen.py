"""Elements that never have a gradient, such as the rows of tokens that never come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table import EXCHANGES
from workers import some

W, SHAPE = 2, (48, 40)
SEEN = np.random.default_rng(1).permutation(48) % 3 > 0
# Their docstrings say so, and docs/which.md. All others leave zeros alone.
MOVES = ["quantized int2", "quantized sign", "sign_sgd ", "demo ", "powersgd ", "s2_reducer wide"]
CHOICES = {
    f"{name} {variant}": (name, case.small)
    for name, row in EXCHANGES.items()
    for variant, case in row.cases.items()
}
for name in ("int2", "sign", "ternary", "int4", "e3m0", "float8_e5m2"):
    CHOICES[f"quantized {name}"] = "quantized", {"format": name, "group_size": 64}
# Blocks of two rows, of which one may be seen.
WIDE = {"density": 0.5, "union_density": 0.8, "sketch_ratio": 0.3, "block_size": 80}
CHOICES["s2_reducer wide"] = "s2_reducer", WIDE
STAY = ["quantized int4", "quantized ternary", "s2_reducer ", "omni_reduce ", "top_k "]
USUAL = ["quantized sign", "s2_reducer wide", "top_k "]


def gradients(step):
    draw = np.random.default_rng((0, step)).normal(size=(W, *SHAPE)).astype(np.float32)
    return {"table": draw * SEEN[:, None]}


@pytest.mark.parametrize("choice", some(CHOICES, USUAL))
def test_what_has_no_gradient_stays_or_is_known_to_move(choice):
    name, settings = CHOICES[choice]
    tx = EXCHANGES[name].transformation(**settings, workers=W)
    params = {"table": jnp.zeros(SHAPE)}
    state, update = tx.init(params), jax.jit(tx.update)
    moved = np.zeros(SHAPE)
    for step in range(3):
        updates, state = update(gradients(step), state, params)
        moved = np.maximum(moved, np.abs(updates["table"]))
    # Products of `powersgd` round.
    assert (moved[~SEEN].max() > 1e-6) == (choice in MOVES)
    assert moved[SEEN].max() > 0.01
