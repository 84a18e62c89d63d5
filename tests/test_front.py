"""What stands between gradients and their exchange: refused where it mixes workers' rows."""

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse.comm import compat

WORKERS = 3
START = {"w": np.random.default_rng(2).normal(size=(5, 4)).astype(np.float32), "b": np.ones(4, "f")}
INPUTS = np.random.default_rng(3).normal(size=(12, 5)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("as_jax_promotes")


@pytest.fixture(scope="module")
def as_jax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def loss_of(params, x):
    return jnp.mean(jnp.sum((x @ params["w"] + params["b"]) ** 2, axis=1))


ROWS = jaxsparse.grad(loss_of, workers=WORKERS)
EXCHANGE = jaxsparse.dense(workers=WORKERS)
each = lambda f: lambda grads: jax.tree.map(f, grads)


def exchanged(front, grads_of=ROWS, exchange=EXCHANGE, params=START, traced=jax.jit):
    """What an exchange delivers of `front(gradients)`, in one trace."""

    @traced
    def step(params, x):
        return exchange.update(front(grads_of(params, x)), exchange.init(params), params)[0]

    return step(params, INPUTS)


def by(tx):
    """A transformation as a function of gradients, with the state of its first step."""
    return lambda grads: tx.update(grads, tx.init(START), START)[0]


def of_cube(f):
    """Changes the part of a gradient that has the workers' number along all axes."""
    return lambda g: {**g, "w": g["w"].at[:, :WORKERS, :WORKERS].set(f(g["w"][:, :3, :3]))}


def behind(f, tx):
    """A transformation behind code that keeps rows apart in a way of its own."""
    return lambda grads: by(tx)(each(f)(grads))


def summed_in_a_reference(rows):
    """Each row over the sum of those before it, which a reference keeps from turn to turn."""
    kept = jax.new_ref(jnp.float32(1))

    def turn(carry, row):
        kept[...] += jnp.sum(row**2)
        return carry, row / kept[...]

    return jax.lax.scan(turn, 0, rows)[1]


def in_halves(column):
    """Each half over its largest element, as blocks of a quantiser."""
    half = column[:, :4].reshape(2, -1)
    over = half / jnp.abs(half).max(1, keepdims=True)
    return column.at[:, :4].set(over.reshape(-1, 4))


def over_a_norm_in_a_reference(rows):
    kept = jax.new_ref(jnp.float32(0))

    def turn(carry, row):
        kept[...] += jnp.sum(row**2)
        return carry, None

    jax.lax.scan(turn, 0, rows)
    return rows / jnp.sqrt(kept[...])


def clipped(grad):
    return grad / jnp.maximum(1, jnp.linalg.norm(grad.ravel()))


TENTH = np.eye(3, dtype=np.float32) + 0.1
# What is no worker's own any more.
LOGARITHMS = optax.stateless(lambda grads, _: jax.tree.map(jnp.log, grads))
MIXED = {
    "norm": by(optax.clip_by_global_norm(0.5)),
    "norm of a leaf": by(optax.clip_by_block_rms(0.5)),
    "normalized": by(optax.contrib.normalize()),
    "trust ratio": by(optax.scale_by_trust_ratio()),
    "norm of what was laid flat": by(optax.flatten(optax.clip_by_global_norm(0.5))),
    "flat": by(optax.flatten(optax.scale(1.0))),
    "diagonal": lambda g: {**g, "w": g["w"].at[jnp.diag_indices(3)].set(0)},
    "elements of pairs": lambda g: {**g, "w": g["w"].at[np.array([1, 0]), np.array([2, 2])].add(1)},
    "columns of joined rows": each(
        lambda x: (x.reshape(-1, 4) - x.reshape(-1, 4).mean(0)).reshape(x.shape)
    ),
    "blocks over two workers": lambda g: {
        **g,
        "w": (g["w"].reshape(2, 30) / g["w"].reshape(2, 30).max(1, keepdims=True)).reshape(3, 5, 4),
    },
    "signs that agree": each(lambda x: jnp.where(jnp.all(x > 0, axis=0), x, 0)),
    "gate": each(lambda x: jnp.where(jnp.any(x > 0.1), x, 2 * x)),
    "axes swapped": of_cube(lambda x: jnp.swapaxes(x, 0, 1)),
    "symmetric": of_cube(lambda x: x + jnp.swapaxes(x, 0, 1)),
    "product from the left": of_cube(lambda x: jnp.dot(jnp.ones((3, 3)), x)),
    "norms of rows, not kept": of_cube(lambda x: x / jnp.linalg.norm(x, axis=-1)),
    "behind a loop over rows": behind(
        lambda x: jax.lax.map(lambda row: row / jnp.linalg.norm(row.ravel()), x),
        optax.clip_by_global_norm(0.5),
    ),
    "behind sorted rows": behind(
        lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1),
        optax.clip_by_global_norm(0.5),
    ),
    "masked norm": by(optax.masked(optax.clip_by_block_rms(0.5), {"w": True, "b": False})),
    "behind per_worker": lambda g: by(optax.clip_by_global_norm(0.5))(
        by(jaxsparse.per_worker(optax.scale(2.0), workers=WORKERS))(g)
    ),
    "in a function": jax.jit(each(lambda x: x / jnp.linalg.norm(x.ravel()))),
    "in a branch": lambda g: jax.lax.cond(g["w"].sum() > 0, lambda g: g, each(lambda x: 2 * x), g),
    "in a loop": lambda g: jax.lax.fori_loop(0, 3, lambda i, g: each(lambda x: x - x.max())(g), g),
    "while the norm is large": lambda g: jax.lax.while_loop(
        lambda g: optax.tree.norm(g) > 0.5, each(lambda x: x / 2), g
    ),
    "reduced by hand": each(lambda x: x - jax.lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,))),
    "quantile": each(lambda x: jnp.clip(x, -1, jnp.quantile(x, 0.9))),
    "softmax": each(lambda x: jax.nn.softmax(x, axis=0)),
    "less the mean": each(lambda x: x - x.mean(0)),
    "running sum": each(lambda x: jnp.cumsum(x, axis=0)),
    "matrix": each(lambda x: jnp.tensordot(jnp.ones((WORKERS, WORKERS)), x, 1)),
    "an element": lambda g: {**g, "w": g["w"].at[0, 1].set(0)},
    "last": each(lambda x: x.at[-1].set(0)),
    "some": each(lambda x: x[jnp.array([2, 0, 1])]),
    "traced index": lambda g: each(lambda x: x - x[jnp.int32(g["b"].shape[0] - 1)])(g),
    "begin": each(lambda x: x.at[:2].multiply(0.5)),
    "rolled": each(lambda x: jnp.roll(x, 1, axis=0)),
    "turned": each(lambda x: jnp.flip(x, 0)),
    "padded": each(lambda x: jnp.pad(x[:2], [(0, 1)] + [(0, 0)] * (x.ndim - 1))),
    "joined": each(lambda x: jnp.concatenate([x[:1], jnp.zeros_like(x[1:])])),
    "repeated": each(lambda x: jnp.repeat(x[:1], WORKERS, axis=0)),
    "sorted": each(lambda x: jnp.sort(x, axis=0)),
    "norm by a loop": each(
        lambda x: x / jax.lax.scan(lambda s, row: (s + jnp.sum(row**2), None), 0.0, x)[0]
    ),
    "average over layers": each(
        lambda x: jax.lax.scan(lambda c, row: (0.5 * (c + row),) * 2, jnp.zeros(x.shape[1:]), x)[1]
    ),
    "layer before": each(
        lambda x: jax.lax.scan(lambda c, row: (row, c), jnp.zeros(x.shape[1:]), x, reverse=True)[1]
    ),
    "products of rows": each(lambda x: jax.lax.map(lambda row: (row * x).sum(0), x)),
    "polynomial": each(lambda x: x * jnp.polyval(x, 0.5)),
    "columns in vmap": each(
        lambda x: jax.vmap(lambda c: c / jnp.linalg.norm(c), in_axes=-1, out_axes=-1)(x)
    ),
    "along an axis": each(lambda x: jnp.apply_along_axis(jnp.cumsum, 0, x)),
    "ranks of rows": each(lambda x: jax.scipy.stats.rankdata(x, axis=0)),
    "filter": lambda g: {**g, "w": jax.scipy.signal.convolve(g["w"], jnp.ones((3, 3, 3)), "same")},
    "sum of segments": each(lambda x: jax.ops.segment_sum(x, jnp.array([0, 0, 1]), WORKERS)),
    "set by an index": each(lambda x: jnp.zeros_like(x).at[jnp.array([1, 2, 0])].set(x)),
    "counted": each(lambda x: x * jnp.bincount((x.ravel() > 0).astype(int), length=2)[1]),
    "loop over joined rows": each(
        lambda x: jax.lax.scan(lambda c, v: (0.9 * c + v,) * 2, 0.0, x.ravel())[1].reshape(x.shape)
    ),
    "loop over parts of several": each(
        lambda x: jax.lax.map(jnp.sort, x.reshape(2, -1)).reshape(x.shape)
    ),
    "behind an index in vmap": behind(
        jax.vmap(lambda x: x.at[jnp.argmax(jnp.abs(x).ravel()) % len(x)].set(0.0)),
        optax.clip_by_global_norm(0.5),
    ),
    "behind a solve in vmap": lambda g: by(optax.clip_by_global_norm(0.5))(
        {**g, "w": jax.vmap(lambda x: jnp.linalg.solve(jnp.eye(5), x))(g["w"])}
    ),
    "solve": lambda g: {**g, "w": g["w"].at[:, 0, 0].set(jnp.linalg.solve(TENTH, g["w"][:, 0, 0]))},
    "solve of columns": lambda g: {
        **g,
        "w": g["w"].at[:, :3, 0].set(jnp.linalg.solve(TENTH, g["w"][:, :3, 0])),
    },
    "largest by number": lambda g: {**g, "b": g["b"].at[jnp.argmax(g["b"], 1)].set(0)},
    "largest by pairs": lambda g: {
        **g,
        "b": g["b"].at[jnp.arange(WORKERS)[:, None], jax.lax.top_k(g["b"], 2)[1]].set(0),
    },
    "over the largest": lambda g: {**g, "w": g["w"] / g["w"][jnp.argmax(g["w"][:, :, 0], 1)]},
    "sum in a reference": lambda g: {**g, "b": summed_in_a_reference(g["b"])},
    "norm in a reference": lambda g: {**g, "b": over_a_norm_in_a_reference(g["b"])},
    "mean of mapped rows": each(jax.vmap(lambda x: x - jax.lax.pmean(x, "rows"), axis_name="rows")),
    "halves of columns": lambda g: {**g, "w": jax.vmap(in_halves, -1, -1)(g["w"])},
    "solve in another map": lambda g: {
        **g,
        "b": jax.vmap(lambda a: a * jax.scipy.sparse.linalg.cg(lambda x: TENTH @ x, g["b"])[0])(
            jnp.ones(2)
        ).mean(0),
    },
    "largest of workers": lambda g: {**g, "b": jax.lax.top_k(g["b"], 3, axis=0)[0]},
    "linear call": lambda g: {
        **g,
        "b": jax.custom_derivatives.linear_call(
            lambda _, x: jnp.cumsum(x, 0), lambda _, x: jnp.cumsum(x, 0), (), g["b"]
        ),
    },
    "conjugate gradients": of_cube(
        lambda x: (
            x * jax.scipy.sparse.linalg.cg(lambda u: u + u.sum(), x[:, 0, 0])[0][:, None, None]
        )
    ),
    "transposed in a branch": of_cube(
        lambda x: jnp.cumsum(
            jax.lax.cond(x[0, 0, 0] > 0, lambda x: x, lambda x: x.swapaxes(0, 1), x), 0
        )
    ),
}


# What keeps rows apart, but would take another axis for its own where code counts from the first,
# or needs more than a reader should know.
MIXED |= {
    "sum of each": each(lambda x: x - x.sum(tuple(range(1, x.ndim)), keepdims=True)),
    "sum of layers": lambda g: {**g, "w": g["w"] - g["w"].sum(1, keepdims=True)},
    "centered": by(optax.centralize()),
    "running sum of each": each(lambda x: jnp.cumsum(x, axis=1)),
    "a column": each(lambda x: x.at[:, 0].set(0)),
    "columns": each(lambda x: x[:, ::-1]),
    "product": lambda g: {**g, "w": g["w"] @ jnp.ones((4, 4))},
    "singular values": lambda g: {**g, "w": jnp.linalg.svd(g["w"], full_matrices=False)[0]},
    "largest of each": lambda g: {**g, "b": jnp.take_along_axis(g["b"], jnp.argsort(g["b"]), 1)},
    "joined and back": each(lambda x: (2 * x.reshape(-1, 2)).reshape(x.shape)),
    "rows in map": each(lambda x: jax.lax.map(clipped, x)),
    "chunks in map": each(lambda x: jax.lax.map(clipped, x.reshape(-1, 4)).reshape(x.shape)),
    "clip in vmap": each(jax.vmap(clipped)),
    "index in vmap": each(jax.vmap(lambda x: x.at[jnp.argmax(x.ravel()) % len(x)].set(0.0))),
    "over micro-batches": each(
        lambda x: jax.vmap(lambda x: x - x.mean(1, keepdims=True))(jnp.stack([x, x])).mean(0)
    ),
    "over micro-batches in map": each(
        lambda x: jax.lax.map(lambda x: x - x.mean(-1)[..., None], jnp.stack([x, x]), batch_size=2)[
            1
        ]
    ),
    "closed over in vmap": each(
        lambda x: jax.vmap(lambda s: s * (x - x.mean(1, keepdims=True)))(jnp.ones(2)).mean(0)
    ),
    "layers in vmap": lambda g: {
        **g,
        "w": jax.vmap(lambda x: x / jnp.abs(x).sum(-1, keepdims=True), 1, 1)(g["w"]),
    },
    "vecdot": each(lambda x: x / jnp.sqrt(jnp.vecdot(x, x, axis=-1))[..., None]),
    "along the next axis": each(
        lambda x: jnp.apply_along_axis(lambda v: v / jnp.linalg.norm(v), 1, x)
    ),
    "moved behind": each(
        lambda x: jnp.swapaxes((y := jnp.swapaxes(x, 0, 1)) / jnp.abs(y).max(0), 0, 1)
    ),
    "moved behind layers": lambda g: {
        **g,
        "w": jnp.moveaxis((y := jnp.moveaxis(g["w"], 0, -1)) / jnp.abs(y).max(0), -1, 0),
    },
    "turned": each(lambda x: (2 * x.T).T),
    "stacked behind rows": each(lambda x: jnp.stack([x, x], 1).mean(1)),
    "the first is finite": lambda g: each(lambda x: jnp.where(jnp.isfinite(g["w"][0].sum()), x, 0))(
        g
    ),
    "bits of finite entries": each(
        lambda x: (
            x * jax.lax.reduce_or(jnp.isfinite(x).astype("int32") << 3, axes=tuple(range(x.ndim)))
        )
    ),
    "number of finite entries": each(lambda x: x * (20 / jnp.sum(jnp.isfinite(x)))),
    "number of equal entries": each(lambda x: x / jnp.sum(x == x)),
    "finite in all workers": each(
        lambda x: jnp.where(jnp.isfinite(jnp.where(x > 0.3, jnp.inf, x)).all(0), x, 0)
    ),
    "finite in a layer": each(lambda x: jnp.where(jnp.isnan(x).any(1, keepdims=True), 0, x)),
    "finite in the first": each(lambda x: x * jnp.isfinite(x)[0]),
    "finite norm": lambda g: each(lambda x: jnp.where(jnp.isfinite(optax.tree.norm(g)), x, 0))(g),
    "infinite above a norm": each(
        lambda x: jnp.where(jnp.isfinite(jnp.where(jnp.max(x) > 3, jnp.inf, 0.0)), x, x / 10)
    ),
    "a sum has a logarithm": each(lambda x: jnp.where(jnp.isnan(jnp.log(jnp.sum(x))), -x, x)),
    "finite in float16": each(lambda x: jnp.where(jnp.isfinite(x.astype("f2")).all(), x, x / 2)),
    "all have roots": each(lambda x: jnp.where(jnp.isnan(jnp.sqrt(x)).any(), 2 * x, x)),
    "none is 0": each(lambda x: jnp.where(jnp.isnan(x * jnp.inf).any(), 2 * x, x)),
    "quotients": each(lambda x: jnp.where(jnp.isfinite(1 / x).all(), x, 2 * x)),
    "a quotient is clipped": each(
        lambda x: jnp.where(jnp.isfinite(jnp.clip(x / jnp.zeros_like(x), -1, 1)).all(), x, 2 * x)
    ),
    "none is 0, by a quotient": each(lambda x: jnp.where(jnp.isnan(x / 0.0).any(), 2 * x, x)),
    "finite behind per_worker": lambda g: jax.tree.map(
        lambda x, y: jnp.where(jnp.isfinite(y).all(), y, x),
        g,
        by(jaxsparse.per_worker(LOGARITHMS, workers=WORKERS))(g),
    ),
    "joined": lambda g: {**g, "w": jnp.concatenate([g["w"], g["w"]], 1).reshape(-1, 5, 8)[..., :4]},
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_workers_rows_is_refused_where_it_stands(name):
    with pytest.raises(ValueError, match=r"In front of the exchange, the .* at .*per_worker"):
        exchanged(MIXED[name], traced=lambda step: lambda *a: jax.eval_shape(step, *a))


@pytest.mark.parametrize("parts", [2, 4])
def test_a_norm_behind_micro_batches_at_once_is_refused(parts):
    def clipped_mean(params, x):
        found = jax.vmap(lambda part: ROWS(params, part))(x.reshape(parts, -1, 5))
        return by(optax.clip_by_global_norm(0.5))(jax.tree.map(lambda g: g.mean(0), found))

    with pytest.raises(ValueError, match="In front of the exchange, the"):
        exchanged(lambda g: g, clipped_mean)


def test_code_that_is_trusted_takes_no_micro_batches():
    """Where they stand in front, its rows can't be found again."""
    where = mesh(WORKERS)
    cut = lambda spec: jax.shard_map(jnp.negative, mesh=where, in_specs=spec, out_specs=spec)
    cast = cut(P("data"))

    def stacked_and_cast(params, x):
        found = jax.lax.map(lambda part: ROWS(params, part), x.reshape(2, -1, 5))
        return jax.tree.map(lambda g: cut(P(None, "data"))(g).mean(0), found)

    with pytest.raises(ValueError, match="In front of the exchange, the shard_map at"):
        exchanged(lambda g: g, stacked_and_cast)
    exchanged(each(cast))
    with pytest.raises(ValueError, match="In front of the exchange, the reduce_sum at"):
        exchanged(each(lambda x: cast(x) / jnp.sum(cast(x))))
    with pytest.raises(ValueError, match="In front of the exchange, the shard_map at"):
        exchanged(each(cut(P())))  # each device has all rows


@pytest.mark.parametrize("place", ["params", "state"])
def test_a_norm_of_all_rows_beside_gradients_is_refused(place):
    """As what a per_worker scales by."""
    inside = optax.GradientTransformation(
        lambda params: jnp.ones(()),
        lambda grads, state, params: (each(lambda g: g / (state + params["b"][0]))(grads), state),
    )
    tx = jaxsparse.per_worker(inside, workers=WORKERS)

    def front(grads):
        norm = optax.tree.norm(grads)
        params, state = START, tx.init(START)
        if place == "params":
            params = each(lambda p: p * norm)(params)
        else:
            state = jax.tree.map(lambda x: x * norm, state)
        return tx.update(grads, state, params)[0]

    with pytest.raises(ValueError, match=r"In front of the exchange, the reduce_sum .* a state of"):
        exchanged(front)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_norm_of_what_per_worker_keeps_is_refused(dtype):
    inside = optax.GradientTransformation(
        lambda params: each(lambda p: jnp.zeros(p.shape, dtype))(params),
        lambda grads, state, params: (grads, each(lambda g: jnp.sign(g).astype(dtype))(grads)),
    )
    tx = jaxsparse.per_worker(inside, workers=WORKERS)

    def front(grads):
        updates, state = tx.update(grads, tx.init(START), START)
        norm = sum(jnp.sum(jnp.abs(x).astype("f")) for x in jax.tree.leaves(state))
        return each(lambda g: g / norm)(updates)

    with pytest.raises(ValueError, match="In front of the exchange, the reduce_sum"):
        exchanged(front)


@pytest.mark.parametrize("way", ["closure", "extra argument"])
def test_a_norm_of_all_rows_reaches_no_per_worker(way):
    scaled = lambda grads, by: each(lambda g: g / by)(grads)

    def front(grads):
        norm = optax.tree.norm(grads)
        inside = optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(),
            lambda grads, state, params=None, by=norm: (scaled(grads, by), state),
        )
        tx = jaxsparse.per_worker(inside, workers=WORKERS)
        given = {} if way == "closure" else {"by": norm}
        return tx.update(grads, tx.init(START), START, **given)[0]

    with pytest.raises(ValueError, match="In front of the exchange, the reduce_sum"):
        exchanged(front)


ZERO1 = functools.partial(jaxsparse.zero1, optax.sgd(1.0))


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize(
    "exchange",
    some([jaxsparse.dense, functools.partial(jaxsparse.top_k, 0.3), ZERO1], [jaxsparse.dense]),
)
def test_two_steps_under_one_jit_are_two_steps(exchange, kind):
    """The second one's gradients, parameters and states are made by the first one's exchange."""
    where = {"workers": 4} if kind == "simulated" else {"mesh": mesh(4)}
    start = START | {"b": jnp.ones(4)}  # with as many entries as there are workers
    tx = optax.chain(
        jaxsparse.per_worker(optax.trace(0.9), **where),
        exchange(is_dense=lambda *_: False, **where),
        optax.clip_by_global_norm(0.5),
        optax.adam(0.1),
    )
    grads_of = jaxsparse.grad(loss_of, **where)

    def step(params, state, x):
        updates, state = tx.update(grads_of(params, x), state, params)
        return optax.apply_updates(params, updates), state

    once = jax.jit(step)
    in_a_loop = lambda *given: jax.lax.fori_loop(0, 1, lambda _, c: step(*c, given[-1]), given[:2])
    given = start, tx.init(start)
    right = once(*once(*given, INPUTS), INPUTS)[0]
    for first in (step, in_a_loop):
        twice = jax.jit(lambda *given, first=first: step(*first(*given), given[-1]))
        found = twice(*given, INPUTS)[0]
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, right)


def if_all_are_finite(grads):
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(g).all(), g, 0), grads)


def added_to_zeros(params, x):
    add = lambda total, part: (jax.tree.map(jnp.add, total, ROWS(params, part)), None)
    zeros = each(lambda p: jnp.zeros((WORKERS, *p.shape)))(params)
    total = jax.lax.scan(add, zeros, x.reshape(2, -1, 5))[0]
    return if_all_are_finite(each(lambda g: g / 2)(total))


def means_of_sums(params, x):
    sums = jaxsparse.grad(
        lambda p, x: (loss_of(p, x) * len(x), 1.0 * len(x)), has_aux=True, workers=WORKERS
    )
    return if_all_are_finite(jaxsparse.mean_of(*sums(params, x)))


@pytest.mark.parametrize("grads_of", [added_to_zeros, means_of_sums])
def test_sums_and_means_may_be_asked_whether_they_are_finite(grads_of):
    expected = jax.grad(loss_of)(START, INPUTS)
    found = exchanged(lambda g: g, grads_of)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), found, expected)


def test_joins_along_axes_that_one_worker_counts_otherwise_are_refused():
    start = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2)), "both": jnp.ones((2, 4))}
    of = lambda p, x: jnp.sum((p["a"] + 2 * p["b"]).ravel() * x[:, :4].mean(0)) + p["both"].sum()
    joined = lambda g: {**g, "both": jnp.concatenate([g["a"], g["b"]], 1).reshape(-1, 2, 4)}
    with pytest.raises(ValueError, match="In front of the exchange, the concatenate"):
        exchanged(joined, jaxsparse.grad(of, workers=WORKERS), params=start)


def test_rows_along_another_axis_are_refused_where_they_were_moved():
    start = {"s": jnp.ones(WORKERS)}
    grads_of = jaxsparse.grad(lambda p, x: jnp.sum(p["s"] * x[:, :3].mean(0)), workers=WORKERS)
    with pytest.raises(ValueError, match=rf"the transpose at {__file__}:\d+.*gradient\['s'\] were"):
        exchanged(each(jnp.transpose), grads_of, params=start)


def test_the_error_names_the_code_in_front_and_its_call():
    def halved(grads):
        return jax.tree.map(lambda x: x.at[1].multiply(0.5), grads)

    with pytest.raises(ValueError, match="In front of the exchange") as caught:
        exchanged(halved)
    line = inspect.getsourcelines(halved)[1] + 1
    assert f"the scatter-mul at {__file__}:{line}:" in str(caught.value)
    assert "as if gradient['b'] were" in str(caught.value)
    with pytest.raises(ValueError, match="In front of the exchange") as caught:
        exchanged(MIXED["norm"])
    here = inspect.getsourcelines(by)[1] + 2
    text = rf"_clipping\.py:\d+.*clip_by_global_norm.*, called at {re.escape(__file__)}:{here}:"
    assert re.search(text, str(caught.value))


@pytest.mark.parametrize("kind", ["mesh", "set_mesh", "scan", "zero1", "per_worker"])
def test_it_is_refused_wherever_an_exchange_is(kind):
    where = mesh(WORKERS)
    params = jax.device_put(START, NamedSharding(where, P()))
    clip = MIXED["norm"]
    grads_of, all_leaves, front = jaxsparse.grad(loss_of), lambda *_: False, clip
    exchange = jaxsparse.top_k(0.5, is_dense=all_leaves, mesh=where if kind == "scan" else None)
    if kind == "zero1":
        exchange = jaxsparse.zero1(optax.sgd(0.1), is_dense=lambda path, shape: len(shape) < 2)
    if kind == "per_worker":
        front = lambda g: by(jaxsparse.per_worker(optax.scale(2.0), mesh=where))(clip(g))
    if kind == "scan":
        grads_of = jaxsparse.grad(loss_of, mesh=where)
    state = exchange.init(params)

    def step(params, x):
        return exchange.update(front(grads_of(params, x)), state, params)[0]

    def steps(params, x):
        return jax.lax.scan(
            lambda p, _: (optax.apply_updates(p, step(p, x)), None), params, None, 2
        )

    with jax.set_mesh(where) if kind == "set_mesh" else warnings.catch_warnings():
        x = jax.device_put(INPUTS, NamedSharding(where, P("data")))
        with pytest.raises(ValueError, match="In front of the exchange, the reduce_sum at"):
            jax.jit(steps if kind == "scan" else step).trace(params, x)


def sums_of(params, x):
    each = jnp.sum((x @ params["w"] + params["b"]) ** 2, axis=1)
    return jnp.sum(each * (x[:, 0] > 0)), jnp.sum(x[:, 0] > 0)


def mean_of_sums(params, x):
    (total, count), grads = jaxsparse.value_and_grad(sums_of, has_aux=True, workers=WORKERS)(
        params, x
    )
    return jaxsparse.mean_of((total, grads), count)[1]


def accumulated(params, x):
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(ROWS, params, x[:6]))
    add = lambda total, part: (jax.tree.map(jnp.add, total, ROWS(params, part)), None)
    return jax.tree.map(lambda g: g / 2, jax.lax.scan(add, zeros, x.reshape(2, 6, 5))[0])


def stacked(params, x):
    found = jax.lax.map(lambda part: ROWS(params, part), x.reshape(2, 6, 5))
    return jax.tree.map(lambda g: g.mean(0), found)


def mapped_parts(params, x):
    found = jax.vmap(lambda part: ROWS(params, part))(x.reshape(2, 6, 5))
    return jax.tree.map(lambda g: g.mean(0), found)


def listed(params, x):
    found = [ROWS(params, part) for part in jnp.split(x, 2)]
    return jax.tree.map(lambda *g: jnp.stack(g).mean(0), *found)


def in_a_buffer(params, x):
    found = [ROWS(params, part) for part in jnp.split(x, 2)]

    def filled(*parts):
        buffer = jnp.zeros((2, *parts[0].shape))
        for i, part in enumerate(parts):
            buffer = buffer.at[i].set(part)
        return buffer.mean(0)

    return jax.tree.map(filled, *found)


def of_two_groups(params, x):
    few = jaxsparse.grad(loss_of, workers=1)(params, x[:4])
    rest = jaxsparse.grad(loss_of, workers=2)(params, x[4:])
    return jax.tree.map(lambda *g: jnp.concatenate(g), few, rest)


def scaled_loss(params, x):
    scale = jnp.float32(64)
    loss = lambda p, x: scale * loss_of(p, x)
    grads = jax.tree.map(lambda g: g / scale, jaxsparse.grad(loss, workers=WORKERS)(params, x))
    finite = jax.tree.reduce(jnp.logical_and, each(lambda g: jnp.all(jnp.isfinite(g)))(grads))
    return jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)


# Ways to the gradients of the whole batch: their mean is that of plain JAX.
GRADIENTS = {
    f.__name__: f
    for f in (accumulated, stacked, mapped_parts, listed, in_a_buffer, of_two_groups, scaled_loss)
} | {
    "inner jit": jax.jit(ROWS),
    "remat": jax.checkpoint(ROWS),
    "if finite": lambda p, x: by(optax.apply_if_finite(optax.identity(), 3))(ROWS(p, x)),
    "no nans": lambda p, x: by(optax.zero_nans())(ROWS(p, x)),
    "found_inf": lambda p, x: each(
        lambda g: jnp.where(jnp.isinf(g).any() | jnp.isnan(g).any(), 0, g)
    )(ROWS(p, x)),
    "barrier": lambda p, x: jax.lax.optimization_barrier(ROWS(p, x)),
    "branch": lambda p, x: jax.lax.cond(x[0, 0] < 9, lambda g: g, each(jnp.zeros_like), ROWS(p, x)),
    "masked": lambda p, x: by(optax.masked(optax.scale(1.0), {"w": True, "b": False}))(ROWS(p, x)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_ways_to_the_gradients_of_a_batch_stay_allowed(name):
    expected = jax.grad(loss_of)(START, INPUTS)
    found = exchanged(lambda g: g, GRADIENTS[name])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), found, expected)


def test_means_of_sums_stay_allowed():
    total = lambda p: sums_of(p, INPUTS)[0] / sums_of(p, INPUTS)[1]
    expected = jax.grad(total)(START)
    found = exchanged(lambda g: g, mean_of_sums)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), found, expected)


def twice_above_0(grad):
    return jnp.where(grad > 0, 2 * grad, grad)


# What is done to each worker's own gradient, and the same to one worker's.
OWN = {
    "vmap over rows": (each(jax.vmap(twice_above_0)), twice_above_0),
    "by value": (by(optax.clip(0.1)), lambda x: jnp.clip(x, -0.1, 0.1)),
    "cast": (
        each(lambda x: x.astype("bfloat16").astype("f")),
        lambda x: x.astype("bfloat16").astype("f"),
    ),
    "signs": (by(optax.scale_by_sign()), jnp.sign),
    "per_worker": (
        by(jaxsparse.per_worker(optax.stateless(lambda g, p: each(clipped)(g)), workers=WORKERS)),
        clipped,
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_is_done_to_each_workers_own_gradient_stays_allowed(name):
    front, of_one = OWN[name]
    own = [jax.grad(loss_of)(START, part) for part in np.split(INPUTS, WORKERS)]
    mean = lambda *g: jnp.mean(jnp.stack([of_one(x) for x in g]), 0)
    expected = jax.jit(lambda own: jax.tree.map(mean, *own))(own)
    found = exchanged(front)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected
    )


@pytest.mark.parametrize("seeds", [2, WORKERS])
def test_steps_that_are_mapped_or_differentiated_are_judged(seeds):
    """Rows then stand behind the axis that is mapped, however long it is."""

    def loss(front, params, x):
        updates, _ = EXCHANGE.update(front(ROWS(params, x)), EXCHANGE.init(params), params)
        return sum(map(jnp.sum, jax.tree.leaves(updates)))

    many = jax.tree.map(lambda x: jnp.stack([x] * seeds), (START, INPUTS))
    ways = {
        "mapped": lambda front: jax.vmap(lambda p, x: loss(front, p, x))(*many),
        "slope": lambda front: jax.grad(lambda p: loss(front, p, INPUTS))(START),
    }
    for run in ways.values():
        jax.jit(lambda run=run: run(each(lambda g: 2 * g))).trace()
        for name in ("norm", "sum of layers"):
            with pytest.raises(ValueError, match="In front of the exchange"):
                jax.jit(lambda run=run, name=name: run(MIXED[name])).trace()


def test_as_many_micro_batches_at_once_as_workers_are_averaged():
    def parts(params, x):
        found = jax.vmap(lambda part: ROWS(params, part))(x[:9].reshape(WORKERS, WORKERS, 5))
        return jax.tree.map(lambda g: g.mean(0), found)

    exchanged(lambda g: g, parts, traced=lambda step: lambda *a: jax.eval_shape(step, *a))


def test_rows_from_elsewhere_are_not_judged():
    """An inner function sees no producer of its arguments, and arrays have none."""
    rows = ROWS(START, INPUTS)
    state = EXCHANGE.init(START)
    clip = MIXED["norm"]
    jax.jit(lambda g: EXCHANGE.update(clip(g), state, START)[0]).trace(rows)
    inner = jax.jit(lambda g: EXCHANGE.update(clip(g), state, START)[0])
    jax.jit(lambda p, x: inner(ROWS(p, x))).trace(START, INPUTS)
    stop = lambda g: jax.pure_callback(lambda g: g, jax.eval_shape(lambda g: g, g), g)
    exchanged(stop, traced=lambda step: lambda *a: jax.eval_shape(step, *a))


def test_a_release_of_jax_that_does_not_tell_falls_back_to_check(monkeypatch):
    monkeypatch.setattr(compat, "made_by", lambda values, is_first: [])
    exchanged(MIXED["norm"], traced=lambda step: lambda *a: jax.eval_shape(step, *a))
    with pytest.raises(ValueError, match="mixes the rows of workers"):
        jaxsparse.check(optax.chain(optax.clip_by_global_norm(0.5), EXCHANGE), START)


@pytest.mark.parametrize("name", [n for n in MIXED if n not in ("behind per_worker",)])
def test_check_refuses_the_same(name):
    front = optax.stateless(lambda g, p: MIXED[name](g))
    with pytest.raises(ValueError, match="In front of the exchange"):
        jaxsparse.check(optax.chain(front, jaxsparse.dense()), START)


def test_check_tells_what_optax_raises():
    tx = optax.chain(optax.adaptive_grad_clip(0.1), jaxsparse.dense())
    with pytest.raises(ValueError, match=r"does not take gradients with a row .*Shape mismatch"):
        jaxsparse.check(tx, START)


def test_a_compiled_step_has_nothing_of_it():
    step = jax.jit(lambda p, x: EXCHANGE.update(ROWS(p, x), EXCHANGE.init(p), p)[0])
    text = step.lower(START, INPUTS).as_text(debug_info=True)
    assert "jaxsparse_gradient" not in text
    assert "jaxsparse_exchange" in text


MOMENT = "adds a state of one worker"


def own_momentum(grads, state, params=None):
    made = jax.tree.map(lambda g, m: g + 0.9 * m, grads, state)
    return made, made


@pytest.mark.parametrize(
    "tx",
    [
        optax.trace(0.9),
        optax.scale_by_adam(),
        optax.ema(0.9),
        optax.scale_by_lion(),
        optax.GradientTransformation(lambda params: params, own_momentum),
    ],
)
def test_moments_in_front_are_warned_of(tx):
    chain = optax.chain(tx, EXCHANGE)
    update = lambda p, s, x: chain.update(ROWS(p, x), s, p)
    with pytest.warns(UserWarning, match=rf"(accumulation|transform|front)\.py:\d.*{MOMENT}"):
        jax.eval_shape(update, START, chain.init(START), INPUTS)


HELD = jax.tree.map(lambda x: np.ones((WORKERS, *x.shape), "f"), START)
# Elementwise, with other arrays of the step: a decay, a mask, control variates, a state with rows.
WITH = {
    "decay": lambda g, p, c, held: jax.tree.map(lambda g, p: g + 0.1 * p, g, p),
    "to where it began": lambda g, p, c, held: jax.tree.map(
        lambda g, p, c: g + 0.1 * (p - c), g, p, c
    ),
    "mask": lambda g, p, c, held: jax.tree.map(lambda g, c: g * c, g, c),
    "control variates": lambda g, p, c, held: jax.tree.map(lambda g, c, h: g - h + c, g, c, held),
    "half a control variate": lambda g, p, c, held: jax.tree.map(lambda g, c: g + c / 2, g, c),
    "momentum with rows": lambda g, p, c, held: jax.tree.map(lambda g, h: g + 0.9 * h, g, held),
}


@pytest.mark.parametrize("name", WITH)
def test_other_arrays_beside_rows_stay_allowed(name):
    front = WITH[name]
    step = lambda p, x, c, held: EXCHANGE.update(front(ROWS(p, x), p, c, held), EXCHANGE.init(p), p)
    jax.eval_shape(step, START, INPUTS, START, HELD)


STACKED = {"layers": jnp.float32(np.random.default_rng(0).normal(size=(WORKERS, 4, 5)))}
OF_LAYERS = {
    "decay": jax.vmap(lambda g, w: g + 0.1 * w),
    "ratio": jax.vmap(lambda g, w: g * jnp.linalg.norm(w)),
    "jit": jax.jit(jax.vmap(lambda g, w: g * jnp.tanh(w))),
}
OF_WORKERS = {
    "decay": lambda g, w: g + 0.1 * w,
    "over workers": jax.vmap(lambda g, w: g * jnp.tanh(w), in_axes=(0, None)),
    "ratio of a layer": lambda g, w: g * jnp.linalg.norm(w, axis=(1, 2))[None, :, None, None],
}


@pytest.mark.parametrize("name", [*OF_LAYERS, *(f"right {name}" for name in OF_WORKERS)])
def test_as_many_layers_as_workers_are_not_taken_for_these(name):
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params["layers"][:, :, 0].T) ** 2)
    rows = jaxsparse.grad(loss, workers=WORKERS)
    is_right = name.startswith("right ")
    f = OF_WORKERS[name.removeprefix("right ")] if is_right else OF_LAYERS[name]
    front = lambda params, grads: jax.tree.map(f, grads, params)
    step = lambda p, x: EXCHANGE.update(front(p, rows(p, x)), EXCHANGE.init(p), p)[0]
    with jax.numpy_rank_promotion("allow"):
        if not is_right:
            with pytest.raises(ValueError, match=r"test_front.py:\d+.*with a layer of parameters"):
                jax.jit(step)(STACKED, INPUTS[:, :4])
            return
        found = jax.jit(step)(STACKED, INPUTS[:, :4])
        plain = jax.grad(loss)(STACKED, INPUTS[:, :4])["layers"][None]
        np.testing.assert_allclose(
            found["layers"], f(plain, STACKED["layers"])[0], rtol=1e-5, atol=1e-6
        )


def test_a_scalar_parameter_may_decay_in_front():
    params = {**START, "scale": jnp.float32(2)}
    loss = lambda params, x: loss_of(params, x) * params["scale"]
    rows, decay = jaxsparse.grad(loss, workers=WORKERS), optax.add_decayed_weights(0.1)

    def step(p, x):
        grads = decay.update(rows(p, x), decay.init(p), p)[0]
        return EXCHANGE.update(grads, EXCHANGE.init(p), p)[0]

    with jax.numpy_rank_promotion("allow"):
        found = jax.jit(step)(params, INPUTS)
        plain = jax.grad(loss)(params, INPUTS)
    np.testing.assert_allclose(found["scale"], plain["scale"] + 0.2, rtol=1e-5)
