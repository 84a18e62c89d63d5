"""Programs traced for their bytes alone: short, of the right types, and never run."""

import jax
import jax.numpy as jnp
import pytest
from at_density import reducer_at
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from workers import mesh

from jaxsparse import codecs, select, sketch, traffic
from jaxsparse.arrays import bits, hashing, platforms, stream
from jaxsparse.arrays.platforms import only_shapes
from jaxsparse.quantize import means, packing
from jaxsparse.select import compaction
from jaxsparse.traffic import traced

D, K = 20_000, 50
SPEC = sketch.SketchSpec(rows=3, cols=1024)
KEPT = stream.SparseStream(jnp.arange(K), jnp.ones(K))
WORDS = jnp.zeros(K, jnp.uint32)
PACKED, FEW_BITS = codecs.Packed(), codecs.EliasFano()
FORMS = {
    "over_tiles": lambda x: platforms.over_tiles(D, 100, lambda b, carry, n: carry * n, x[:5]),
    "folded": lambda x: platforms.count_where(x, lambda x: x > 0),
    "kth_largest": lambda x: platforms.kth_largest(platforms.to_bits(x), K, bits=31),
    "compact": lambda x: compaction.compact(x > 0, K),
    "first_of_ranges": lambda x: compaction.first_of_ranges(
        platforms.to_bits(x), [jnp.uint32(9), jnp.uint32(5)], K
    ),
    "fast_top_k": lambda x: select.fast_top_k(x, K),
    "threshold_top_k": lambda x: select.threshold_top_k(x, K),
    "sampled_top_k": lambda x: select.sampled_top_k(x, K),
    "bisection_top_k": lambda x: select.bisection_top_k(x, K),
    "group_top_k": lambda x: select.group_top_k(x, 3, 150),
    "hash_extract": lambda x: select.counted_hash_extract(x, jnp.float32(0), K),
    "sampled_threshold": lambda x: select.sampled_threshold(x, K),
    "encode": lambda x: sketch.encode(x, SPEC),
    "heavy_hitters": lambda x: sketch.heavy_hitters(sketch.encode(x, SPEC), SPEC, D, K),
    "pack_fields": lambda x: bits.pack_fields(platforms.to_bits(x).reshape(2, -1), 12),
    "unpack_fields": lambda x: bits.unpack_fields(platforms.to_bits(x[:12])[None], 12, 32),
    "digits": lambda x: _digits(x),
    "means": lambda x: means.encoded(x.reshape(-1, 32), "int2", jnp.int32(D)),
    "mix": lambda x: hashing.drawn(7, platforms.to_bits(x)),
    "packed": lambda x: _sent(PACKED, x),
    "few bits": lambda x: _sent(FEW_BITS, x),
    "few bits, floats": lambda x: _sent(codecs.EliasFano(value_bits=16), x),
}


def _digits(x):
    words = packing.pack_digits((x > 0).astype(jnp.uint8), 3, D)
    return words, packing.unpack_digits(words, 3, D)


def _sent(codec, x):
    kept = KEPT._replace(values=x[:K])
    message = codec.encode(kept, D)
    return message, codec.decode(message, K, D, jnp.float32), codec.rounded(kept, D)


@pytest.mark.parametrize("name", FORMS)
def test_forms_have_the_types_of_their_functions(name):
    def types():
        found = []

        def body(x):
            found.append(jax.tree.map(jax.typeof, FORMS[name](x)))
            return x

        spec = PartitionSpec("data")
        axes = (AxisType.Auto,)
        abstract = AbstractMesh((2,), ("data",), axis_types=axes, abstract_device=traced._NO_DEVICE)
        mapped = jax.shard_map(body, mesh=abstract, in_specs=spec, out_specs=spec)
        program = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((2 * D,), jnp.float32))
        return found[0], equations(program.jaxpr)

    whole, many = types()
    jax.clear_caches()
    with only_shapes():
        shapes, few = types()
    jax.clear_caches()
    assert jax.tree.structure(shapes) == jax.tree.structure(whole)
    assert shapes == whole
    assert few < many


def equations(program):
    inner = (traced.compat.inner_programs(each.params) for each in program.eqns)
    return len(program.eqns) + sum(equations(each) for programs in inner for each in programs)


@pytest.mark.parametrize(("name", "most"), [("ok_topk_packed", 1500), ("chunked_top_k", 150)])
def test_traced_programs_are_short(name, most):
    """`python -m jaxsparse plan` traces all systems, at about 0.1 ms an equation."""
    size = 10**6
    reducer = reducer_at(name, 0.01, size)
    run = lambda x, state: reducer(x, state, axis_name="data")
    shapes = jax.ShapeDtypeStruct((size,), jnp.float32)
    program = traced._traced(run, lambda x: reducer.init(size), shapes, {"data": 8})
    assert equations(program) < most


@pytest.mark.slow
def test_no_program_that_runs_gets_such_a_trace():
    """Not even if it has the same shapes and an abstract mesh with the same axes."""
    run = lambda x: sketch.heavy_hitters(sketch.encode(x, SPEC), SPEC, D, K)
    traffic.traced_bytes(run, jax.ShapeDtypeStruct((D,), jnp.float32), 2)
    spec = PartitionSpec("data")
    abstract = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    over = lambda mesh: jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jax.random.normal(jax.random.key(0), (2, D))
    program = jax.make_jaxpr(over(abstract))(jax.ShapeDtypeStruct((2 * D,), jnp.float32))
    assert equations(program.jaxpr) > 500
    indices, _ = jax.jit(over(mesh(2)))(x.ravel())
    assert indices[:K].tolist() == jax.jit(run)(x[0])[0].tolist()
