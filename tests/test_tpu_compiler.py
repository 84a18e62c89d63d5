"""What XLA:TPU makes of an exchange. It compiles without a TPU: `pip install 'jax[tpu]'`."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from table import EXCHANGES

import jaxsparse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="XLA:TPU is not installed: pip install 'jax[tpu]'",
    ),
]


def devices(**topology):
    from jax.experimental.topologies import get_topology_desc

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TPU_SKIP_MDS_QUERY", "1")  # there is no machine to ask
        environment.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-16")
        environment.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        found = get_topology_desc("v5e:2x4", "tpu", **topology).devices
    return np.array(sorted(found, key=lambda device: device.id))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(devices(), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", ["spardl", "powersgd"])
def test_a_leaf_of_few_columns_does_not_pad_its_bucket(name, mesh):
    """An array's last axis takes 128 lanes, so a bucket as rows of 4 takes 32 times its bytes."""
    make = EXCHANGES[name].transformation
    shapes = {"w": (1000, 1024), "norm": (500, 4)}
    at = lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    params = {n: at(P(), jax.ShapeDtypeStruct(s, jnp.float32)) for n, s in shapes.items()}
    rows = {n: jax.ShapeDtypeStruct((8, *s), jnp.float32) for n, s in shapes.items()}
    tx = make(2 if name == "powersgd" else 0.01, mesh=mesh, specs=params)
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x, spec: at(spec, x), state, jaxsparse.specs(state))
    update = jax.jit(lambda *given: tx.update(*given), donate_argnums=(0, 1))
    rows = {n: at(P("data"), x) for n, x in rows.items()}
    memory = update.lower(rows, state, params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * sum(4 * x.size for x in params.values())


@pytest.mark.parametrize("name", ["dense", "int4", "spardl"])
def test_bytes_between_two_slices(name):
    """They are those of the formulas, in the workers' order of any mesh, but for padding."""
    places = devices(num_slices=2).reshape(2, 8)[:, [3, 1, 0, 2, 7, 5, 4, 6]]
    mesh = Mesh(places, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    count = 96 * 1100  # of one device
    size = {"dense": 4 * count, "int4": count / 2, "spardl": 8 * count / 100}[name]
    spec = P("fsdp")
    make = {
        "dense": jaxsparse.dense,
        "int4": lambda **cut: jaxsparse.quantized("int4", **cut),
        "spardl": lambda **cut: jaxsparse.spardl(0.01, **cut),
    }
    at = lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    params = at(spec, jax.ShapeDtypeStruct((8 * 96, 1100), jnp.float32))
    tx = make[name](mesh=mesh, specs=spec)
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x, spec: at(spec, x), state, jaxsparse.specs(state))
    rows = at(P("data", "fsdp"), jax.ShapeDtypeStruct((2, *params.shape), jnp.float32))
    program = jax.jit(lambda *given: tx.update(*given)).lower(rows, state, params).compile()
    moved = jaxsparse.wire_bytes(program, mesh=mesh)
    assert size <= moved.across("data").received < 1.15 * size  # scales, the flag, and padding
    assert all(each.axes == ("data",) for each in moved.across("data").collectives)


def test_a_step_with_a_flash_kernel_and_a_narrow_leaf():
    """A step on two slices has Pallas' kernels, and int4's messages alone cross them."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    mesh = Mesh(
        devices(num_slices=2).reshape(2, 8), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    heads, length, width = 2, 128, 512
    both, of_model = P(("data", "fsdp")), P("fsdp")
    at = lambda spec, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    made = lambda spec, *shape: at(spec, jax.ShapeDtypeStruct(shape, jnp.float32))
    attend = jax.shard_map(
        lambda q, k, v: flash_attention(q, k, v, causal=True),
        mesh=mesh,
        in_specs=(both,) * 3,
        out_specs=both,
        check_vma=False,
    )

    def loss_of(params, x):
        made = (x * params["norm"].mean()) @ params["qkv"]
        split = made.reshape(-1, length, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
        y = attend(*split).transpose(0, 2, 1, 3).reshape(x.shape)
        return jnp.mean((y @ params["out"] - x) ** 2)

    params = {
        "qkv": made(of_model, width, 3 * width),
        "out": made(of_model, width, width),
        "norm": made(P(), 512, 4),
    }
    tx = jaxsparse.quantized("int4", mesh=mesh, specs=params)
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x, spec: at(spec, x), state, jaxsparse.specs(state))

    def step(params, state, x):
        loss, grads = jaxsparse.value_and_grad(loss_of, mesh=mesh)(params, x)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.subtract, params, updates), state, loss

    given = params, state, made(both, 16, length, width)
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 3  # and two backward
    moved = jaxsparse.wire_bytes(program, mesh=mesh).across("data")
    count = sum(x.size for x in params.values()) / 8  # of a device
    assert count / 2 <= moved.received < 1.15 * count / 2
    # If a narrow leaf padded its bucket, that alone would take 32 times the parameters.
    activations = 4 * 16 * length * 5 * width / 16
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < 2 * (4 * count + activations)


def test_slices_in_another_order():
    """A sum over the second and the third of four slices crosses one axis of two."""
    places = devices(num_slices=4).reshape(4, 8)[[0, 3, 1, 2]].reshape(2, 2, 8)
    mesh = Mesh(places, ("pods", "data", "tp"), axis_types=(AxisType.Auto,) * 3)
    x = jax.ShapeDtypeStruct((8, 1000), jnp.float32, sharding=NamedSharding(mesh, P()))
    total = lambda axis: jax.shard_map(
        lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    for axis in ("data", "tp"):
        program = jax.jit(total(axis)).lower(x).compile()
        moved = jaxsparse.wire_bytes(program, mesh=mesh)
        assert {each.axes for each in moved.collectives} == {(axis,)}
