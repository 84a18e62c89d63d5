"""Losses with parallel programs inside, as trainers have them, and the same mathematics without.

Each form is a loss of a net of two layers, `(w, x) -> mean((f(x a) b - x) ** 2)` unless it says
otherwise. `Way` tells how a `jax.shard_map` is written. The plain loss uses collectives over the
workers' axis alone, under `jax.vmap(axis_name="data")`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

ROWS, WIDTH, HIDDEN = 4, 8, 16  # a worker's rows
RNG = np.random.default_rng(5)
W = {
    "a": (RNG.normal(size=(WIDTH, HIDDEN)) / 3).astype(np.float32),
    "b": (RNG.normal(size=(HIDDEN, WIDTH)) / 4).astype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """How a form writes its `shard_map`: the mesh, whether specs name "data", and its checks."""

    mesh: Mesh
    is_named: bool
    check_vma: bool
    is_given: bool  # or the mesh is that in context
    axis_names: frozenset[str] = frozenset()

    @property
    def tp(self) -> str | None:
        """The axis that cuts features, if there is one."""
        return "tp" if "tp" in self.mesh.axis_names else None

    @property
    def parts(self) -> int:
        return self.mesh.shape.get("tp", 1)

    @property
    def rows(self) -> Any:
        """The axes that cut a batch."""
        names = tuple(n for n in ("data", "fsdp") if n in self.mesh.axis_names)
        return (names if self.is_named else names[1:]) or None

    def map(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        options = {"mesh": self.mesh} if self.is_given else {}
        if self.axis_names:
            options["axis_names"] = set(self.axis_names)
        return jax.shard_map(
            f, in_specs=in_specs, out_specs=out_specs, check_vma=self.check_vma, **options
        )

    def typed(self, x: Any) -> Any:
        """A constant of a body, typed as values of the batch are."""
        if not self.check_vma:
            return x
        rows = self.rows if isinstance(self.rows, tuple) else ()
        return lax.pcast(x, (*rows, *((self.tp,) if self.tp else ())), to="varying")

    def sum(self, x: Any) -> Any:
        return lax.psum(x, self.tp) if self.tp else x

    def sharding(self, *spec: Any) -> Any:
        return NamedSharding(self.mesh, P(*spec)) if self.is_given else P(*spec)


FORMS: dict[str, Callable[[Way | None], Callable[..., Any]]] = {}


def form(make: Callable[[Way | None], Callable[..., Any]]) -> Any:
    FORMS[make.__name__] = make
    return make


def net(f: Callable[[Any, dict[str, Any]], Any]) -> Callable[..., Any]:
    return lambda w, x: jnp.mean((f(x @ w["a"], w) @ w["b"] - x) ** 2)


def mapped(way: Way | None, f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`f` of hidden values, each device with its features."""
    if way is None:
        return f
    spec = P(way.rows, way.tp)
    return way.map(f, spec, spec)


@form
def elementwise(way):
    return net(lambda h, w: mapped(way, jnp.tanh)(h))


@form
def layers_in_a_scan(way):
    layer = mapped(way, jnp.tanh)

    def body(h, _):
        return h + jax.checkpoint(layer)(h), None

    return net(lambda h, w: lax.scan(body, h, None, length=3)[0])


@form
def remat_policy(way):
    def inner(h):
        return jnp.sin(checkpoint_name(jnp.tanh(h), "kept"))

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    return net(lambda h, w: jax.checkpoint(mapped(way, inner), policy=policy)(h))


def attend(h: Any) -> Any:  # rows, places, heads, features
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", h, h), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, h)


@form
def flash_attention(way):
    kernel = jax.custom_vjp(attend)
    kernel.defvjp(lambda h: (attend(h), h), lambda h, g: jax.vjp(attend, h)[1](g))
    f = kernel
    if way is not None:
        spec = P(way.rows, None, way.tp)
        f = way.map(kernel, spec, spec)
    return net(lambda h, w: f(h.reshape(-1, 2, 4, 2)).reshape(-1, HIDDEN))


@form
def derivative_in_halves(way):
    """Forward and backward function of a custom derivative have a `shard_map` each."""
    run = lambda f: mapped(way, f)
    f = jax.custom_vjp(lambda h: run(jnp.tanh)(h))
    back = lambda h, g: g * (1 - jnp.tanh(h) ** 2)

    def backward(h, g):
        if way is None:
            return (back(h, g),)
        spec = P(way.rows, way.tp)
        return (way.map(back, (spec, spec), spec)(h, g),)

    f.defvjp(lambda h: (run(jnp.tanh)(h), h), backward)
    return net(lambda h, w: f(h))


@form
def tensor_parallel(way):
    """A column's and a row's product by hand."""

    def body(x, a, b):
        h = jnp.tanh(x @ a) @ b
        return h if way is None else way.sum(h)

    f = body
    if way is not None:
        specs = P(way.rows), P(None, way.tp), P(way.tp)
        f = way.map(body, specs, P(way.rows))
    return lambda w, x: jnp.mean((f(x, w["a"], w["b"]) - x) ** 2)


@form
def sequence_parallel(way):
    """Features are gathered, and the product is scattered over them."""

    def body(h, b):
        if way is None or way.tp is None:
            return h + jnp.tanh(h @ b)
        whole = lax.all_gather(h, way.tp, axis=1, tiled=True)
        part = HIDDEN // way.parts
        mine = lax.dynamic_slice_in_dim(whole, lax.axis_index(way.tp) * part, part, 1)
        return h + jnp.tanh(lax.psum_scatter(mine @ b, way.tp, scatter_dimension=1, tiled=True))

    f = body
    if way is not None:
        spec = P(way.rows, way.tp)
        f = way.map(body, (spec, P(way.tp)), spec)
    return net(lambda h, w: f(h, w["b"] @ w["a"]))


@form
def ring(way):
    """Ring attention: keys and values go round, in a scan."""

    def body(q, kv):
        n = 1 if way is None or way.tp is None else way.parts

        def step(carry, _):
            total, norm, kv = carry
            weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, kv))
            total = total + jnp.einsum("bqk,bkd->bqd", weights, kv)
            norm = norm + weights.sum(-1, keepdims=True)
            if n > 1:
                kv = lax.ppermute(kv, way.tp, [(i, (i + 1) % n) for i in range(n)])
            return (total, norm, kv), None

        typed = (lambda x: x) if way is None else way.typed
        zeros = typed(jnp.zeros(q.shape)), typed(jnp.zeros((*q.shape[:2], 1)))
        (total, norm, _), _ = lax.scan(step, (*zeros, kv), None, length=n)
        return total / norm

    f = body
    if way is not None:
        spec = P(way.rows, way.tp)
        f = way.map(body, (spec, spec), spec)

    def heads(h, w):
        h = h.reshape(-1, 4, 4)
        return f(h, jnp.sin(h)).reshape(-1, HIDDEN)

    return net(heads)


@form
def experts(way):
    """Soft experts by all_to_all, with a balance loss over the experts' axis."""

    def body(h, gates):
        if way is not None and way.tp:
            h = lax.all_to_all(h, way.tp, 1, 0, tiled=True)
            h = lax.all_to_all(jnp.tanh(h), way.tp, 0, 1, tiled=True)
            load = lax.pmean(gates.mean(1), way.tp)
        else:
            h, load = jnp.tanh(h), gates.mean(1)
        return h, load

    f = body
    if way is not None:
        rows, spec = P(way.rows), P(way.rows, way.tp)
        f = way.map(body, (spec, spec), (spec, rows))

    def loss(w, x):
        h, load = f(x @ w["a"], jax.nn.sigmoid(x @ w["a"]))
        return jnp.mean((h @ w["b"] - x) ** 2) + jnp.mean(load**2)

    return loss


@form
def vocabulary_parallel(way):
    """Cross entropy over a vocabulary that is cut: pmax, psum."""

    def body(logits, labels):
        tp = None if way is None else way.tp
        part = logits.shape[-1]
        start = lax.axis_index(tp) * part if tp else 0
        top = lax.stop_gradient(logits).max(-1)
        top = lax.pmax(top, tp) if tp else top
        own = (labels >= start) & (labels < start + part)
        at = jnp.clip(labels - start, 0, part - 1)
        picked = jnp.where(own, jnp.take_along_axis(logits, at[:, None], 1)[:, 0], 0)
        total = jnp.exp(logits - top[:, None]).sum(-1)
        if tp:
            picked, total = lax.psum((picked, total), tp)
        return jnp.log(total) + top - picked

    f = body
    if way is not None:
        f = way.map(body, (P(way.rows, way.tp), P(way.rows)), P(way.rows))
    return lambda w, x: jnp.mean(f(jnp.sin(x @ w["a"]), jnp.abs(x[:, 0] * 9).astype(int) % HIDDEN))


@form
def pipeline(way):
    """Stages hand micro-batches on."""
    stages = 2

    def body(h):
        if way is None or way.tp is None or way.parts == 1:
            for i in range(stages if way is None or way.tp is None else way.parts):
                h = jnp.tanh(h * (1.0 + i))
            return h
        n, rank = way.parts, lax.axis_index(way.tp)
        for i in range(n):
            h = jnp.where(rank == i, jnp.tanh(h * (1.0 + rank)), h)
            h = lax.ppermute(h, way.tp, [(j, (j + 1) % n) for j in range(n)])
        return way.sum(jnp.where(rank == 0, h, 0))

    f = body
    if way is not None:
        f = way.map(body, P(way.rows), P(way.rows))
        if way.parts == 1 and way.tp:
            f = lambda h: jnp.tanh(2 * way.map(body, P(way.rows), P(way.rows))(h))
    return net(lambda h, w: f(h))


@form
def weights_gathered(way):
    def body(x, a):
        if way is not None and way.tp:
            a = lax.all_gather(a, way.tp, tiled=True)
        return jnp.tanh(x @ a)

    f = body
    if way is not None:
        f = way.map(body, (P(way.rows), P(way.tp)), P(way.rows))
    return lambda w, x: jnp.mean((f(x, w["a"]) @ w["b"] - x) ** 2)


@form
def pallas(way):
    def kernel(x, y):
        y[...] = jnp.tanh(x[...])

    def call(h):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True
        )(h)

    f = jax.custom_vjp(call)
    f.defvjp(lambda h: (y := call(h), y), lambda y, g: (g * (1 - y * y),))
    return net(lambda h, w: mapped(way, jnp.tanh if way is None else f)(h))


@form
def nested_jit(way):
    f = jax.jit(mapped(way, lambda h: jax.jit(jnp.tanh)(h)))
    return net(lambda h, w: f(f(h)))


@form
def jit_with_shardings(way):
    f = mapped(way, jnp.tanh)
    if way is not None and way.is_given:
        where = NamedSharding(way.mesh, P(way.rows, way.tp))
        f = jax.jit(f, in_shardings=where, out_shardings=where)
    return net(lambda h, w: f(h))


@form
def in_a_cond(way):
    f = mapped(way, jnp.tanh)
    return net(lambda h, w: lax.cond(h.sum() > 0, f, lambda h: f(2 * h), h))


@form
def gradient_penalty(way):
    f = mapped(way, jnp.tanh)
    slope = jax.grad(lambda x, w: jnp.sum(f(x @ w["a"])))
    return lambda w, x: jnp.mean(slope(x, w) ** 2) + jnp.mean(f(x @ w["a"]) ** 2)


@form
def vmapped(way):
    f = mapped(way, jnp.tanh)
    return net(lambda h, w: jax.vmap(f, in_axes=2, out_axes=2)(jnp.stack([h, 2 * h], 2)).sum(2))


@form
def mean_of_workers_outside(way):
    f = mapped(way, jnp.tanh)
    plain = net(lambda h, w: f(h))
    return lambda w, x: lax.pmean(plain(w, x), "data") * (1 + jnp.float32(lax.axis_index("data")))


@form
def mean_of_workers_inside(way):
    axes = ["data"] if way is None else [n for n in way.mesh.axis_names if n != "tp"]

    def body(h):
        return jnp.tanh(h - lax.pmean(h.mean(0, keepdims=True), tuple(axes)))

    return net(lambda h, w: mapped(way, body)(h))


@form
def workers_in_a_jit(way):
    """JAX keeps the trace of an inner jit. It is another one where types are."""

    def body(h):
        rank = 1 + jnp.float32(lax.axis_index("data"))
        return jnp.tanh(h) * lax.pmean(rank * jnp.tanh(h), "data")

    f = jax.jit(mapped(way, body))
    return net(lambda h, w: f(h))


@form
def index_of_worker_inside(way):
    return net(
        lambda h, w: mapped(way, lambda h: jnp.tanh(h * (1 + jnp.float32(lax.axis_index("data")))))(
            h
        )
    )


@form
def noise_of_worker_inside(way):
    """No argument differs between workers, but the result does."""

    def body(key, a):
        return (
            a
            * jax.random.uniform(jax.random.fold_in(key, lax.axis_index("data")), (1, WIDTH)).sum()
        )

    f = body
    if way is not None:
        f = way.map(body, (P(), P(None, way.tp)), P(None, way.tp))
    return lambda w, x: jnp.mean((x @ f(jax.random.key(3), w["a"])) ** 2)


@form
def loss_inside(way):
    """The whole loss in a body, a mean over all axes that share the batch."""

    def body(x, a, b):
        total, count = jnp.sum((jnp.tanh(x @ a) @ b - x) ** 2), jnp.float32(x.size)
        return lax.psum(total, tuple(axes)) / lax.psum(count, tuple(axes))

    axes = ["data"] if way is None else [n for n in way.mesh.axis_names if n != "tp"]
    f = body
    if way is not None:
        f = way.map(body, (P(way.rows), P(), P()), P())
    return lambda w, x: f(x, w["a"], w["b"])


@form
def constraint_in_a_scan(way):
    f = mapped(way, jnp.tanh)

    def body(h, _):
        if way is not None:
            names = tuple(n for n in ("data", "fsdp") if n in way.mesh.axis_names)
            h = lax.with_sharding_constraint(h, way.sharding(names, way.tp))
        return f(h), None

    return net(lambda h, w: lax.scan(body, h, None, length=2)[0])


@form
def convolution_beside(way):
    f = mapped(way, jnp.tanh)

    def loss(w, x):
        h = f(x @ w["a"])[:, :, None]
        kernel = w["b"][:3, :1].reshape(3, 1, 1)
        h = lax.conv_general_dilated(
            h, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.mean((h[:, :, 0] @ w["b"] - x) ** 2)

    return loss


@functools.cache
def partitioned():
    kernel = custom_partitioning(jnp.tanh)
    kernel.def_partition(
        partition=lambda mesh, args, result: (mesh, jnp.tanh, result.sharding, (args[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="b h -> b h",
    )
    f = jax.custom_vjp(kernel)
    f.defvjp(lambda h: (y := kernel(h), y), lambda y, g: (g * (1 - y * y),))
    return f


@form
def custom_partitioning_beside(way):
    f, g = mapped(way, jnp.sin), jnp.tanh if way is None else partitioned()
    return net(lambda h, w: f(g(h)))


@form
def some_axes(way):
    """Manual over one axis, the others are left to JAX."""
    if way is None or way.tp is None:
        return elementwise(way)
    some = dataclasses.replace(way, is_named=False, axis_names=frozenset({"tp"}))
    f = some.map(lambda h: jnp.tanh(h) * lax.pmean(1.0, "tp"), P(None, "tp"), P(None, "tp"))
    return net(lambda h, w: f(h))


@form
def nested_maps(way):
    """A `shard_map` of one axis, and one of the others inside."""
    if way is None or way.tp is None:
        return elementwise(way)
    outer = dataclasses.replace(way, is_named=False, axis_names=frozenset({"tp"}))
    others = frozenset(way.mesh.axis_names) - {"tp"}
    inner = dataclasses.replace(way, is_given=False, axis_names=others)
    inside = lambda h: inner.map(jnp.tanh, P(way.rows), P(way.rows))(h)
    f = outer.map(inside, P(None, "tp"), P(None, "tp"))
    return net(lambda h, w: f(h))


@form
def wrapped_outside(way):
    """The `shard_map` was made before the loss is traced, as a module's attribute."""
    f = mapped(way, jnp.tanh)
    return net(lambda h, w: f(h))


def inputs(workers: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(workers * ROWS, WIDTH)).astype(np.float32)


def by_worker(f: Callable[..., Any], workers: int = 4, w: Any = W) -> Any:
    """What `f` of weights and of a worker's rows gives for each worker, by plain JAX."""
    each = jax.vmap(f, (None, 0), axis_name="data")
    found = jax.jit(each)(w, inputs(workers).reshape(workers, ROWS, WIDTH))
    return jax.tree.map(np.asarray, found)


@functools.cache
def right(name: str, workers: int) -> tuple[Any, Any]:
    """Each worker's loss and gradients, by plain JAX."""
    return by_worker(jax.value_and_grad(FORMS[name](None)), workers)
