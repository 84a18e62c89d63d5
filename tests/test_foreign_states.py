"""What a state was made for travels with it as names, and other states are refused by name."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from at_density import settings_at
from flax import serialization
from jax.sharding import PartitionSpec
from running import patient_loops
from table import EXCHANGES
from workers import mesh, some

import jaxsparse
from jaxsparse import contrib, reducers
from jaxsparse.comm.meshes import Placement
from jaxsparse.feedback import ErrorFeedbackState

PARAMS = {"w": jnp.ones((40, 30)), "b": jnp.ones((30,))}
SPECS = {"w": PartitionSpec("fsdp"), "b": PartitionSpec()}
# These are one reducer each, so that a residual means the same to both.
SAME = [{"top_k", "ms_topk"}, {"quantized", "sign_sgd"}]


def transformation(name):
    settings = settings_at(name, 0.05, 1200)
    if name != "dense":
        settings["is_dense"] = lambda path, shape: len(shape) < 2
    return EXCHANGES[name].transformation(**settings, axis_name=None)


def refusal(tx, state):
    """The error of an update with this state. None: it runs."""
    try:
        jax.eval_shape(tx.update, PARAMS, state, PARAMS)
    except ValueError as error:
        return str(error)
    return None


def origins(state):
    """The system of the only bucket, in an error's words. None: it is no state of feedback."""
    if not isinstance(state, ErrorFeedbackState):
        return None
    return ", ".join(state.reducer_names) or "no buckets"


NEXT = [*zip(EXCHANGES, [*EXCHANGES][1:]), *map(sorted, SAME)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs", some([NEXT, [*itertools.permutations(EXCHANGES, 2)]], [NEXT]), ids=["next", "all"]
)
def test_the_state_of_any_other_system_is_refused(pairs):
    made = {name: transformation(name) for name in EXCHANGES}
    states = {name: jax.eval_shape(tx.init, PARAMS) for name, tx in made.items()}
    for name, tx in made.items():
        assert refusal(tx, states[name]) is None, name
    for here, there in pairs:
        error = refusal(made[here], states[there])
        if {here, there} in SAME:
            assert error is None, (here, there, error)
            continue
        assert error is not None, f"{here} takes the state of {there}"
        kinds = [origins(states[name]) for name in (here, there)]
        if None in kinds:
            assert error.startswith("the state was made for another transformation"), error
        elif kinds[0] == kinds[1]:  # one reducer with other settings
            assert error.startswith(("the state was made for other settings", "the state's ")), (
                error
            )
        else:
            assert all(kind in error for kind in kinds), (here, there, error)


RANK_1 = {"min_compression_rate": 1}
OTHER_SETTINGS = {
    "rank": (
        jaxsparse.powersgd(2, **RANK_1, axis_name=None),
        jaxsparse.powersgd(1, **RANK_1, axis_name=None),
        r"PowerSGD's own state of bucket 0 is .*float32\[30\].* needs .*float32\[60\]",
    ),
    "number of buckets": (
        contrib.ok_topk(0.1, axis_name=None),
        contrib.ok_topk(0.1, bucket_size=600, axis_name=None),
        "its buckets are exchanged by OkTopk, OkTopk, and those of this transformation by OkTopk:",
    ),
    "warm-up": (
        jaxsparse.top_k(0.1, axis_name=None),
        jaxsparse.exchange(jaxsparse.warm_up(reducers.TopK(0.1), steps=4), axis_name=None),
        "TopK's own state of bucket 0 is .*step uint32.* needs nothing",
    ),
    "delay": (
        jaxsparse.top_k(0.1, delay=1, axis_name=None, is_dense=lambda path, shape: False),
        jaxsparse.top_k(0.1, axis_name=None, is_dense=lambda path, shape: False),
        "with delay=0, but this transformation has delay=1",
    ),
    "policy": (
        jaxsparse.partition({"w": reducers.SparDL(0.1)}, axis_name=None),
        jaxsparse.partition({"w": reducers.TopK(0.1)}, axis_name=None),
        "exchanged by TopK, and those of this transformation by SparDL",
    ),
    "Optax's own": (
        jaxsparse.spardl(0.1, axis_name=None),
        optax.adam(0.1),
        "it is a tuple, and no ErrorFeedbackState",
    ),
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_the_state_of_other_settings_is_refused(name):
    here, there, message = OTHER_SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(here.update, PARAMS, there.init(PARAMS), PARAMS)


def test_a_state_serves_another_density():
    here, there = (jaxsparse.spardl(density, axis_name=None) for density in (0.1, 0.2))
    assert refusal(here, there.init(PARAMS)) is None


def walked(tree, path=()):
    """The leaves of a walker that knows mappings, lists and tuples, as many trainers have one."""
    if hasattr(tree, "items"):
        parts = tree.items()
    elif isinstance(tree, list | tuple):
        parts = enumerate(tree)
    else:
        return [] if tree is None else [tree]
    return [leaf for key, part in parts for leaf in walked(part, (*path, key))]


EVERYTHING = {"momentum": 0.9, "accumulator_dtype": "bfloat16", "mesh": "here", "specs": SPECS}
WALKED = {
    "plain": lambda mesh: jaxsparse.spardl(0.1),
    "everything": lambda mesh: jaxsparse.exchange(
        jaxsparse.warm_up(reducers.SparDL(0.1), steps=4),
        bucket_size=700,
        **EVERYTHING | {"mesh": mesh},
    ),
    "delay": lambda mesh: jaxsparse.top_k(0.1, delay=1, mesh=mesh, specs=SPECS),
    "EF21": lambda mesh: contrib.ef21_sgdm(reducers.TopK(0.1), mesh=mesh, specs=SPECS),
    "factors": lambda mesh: jaxsparse.powersgd(1, mesh=mesh, specs=SPECS),
    "each worker's own": lambda mesh: optax.chain(
        jaxsparse.per_worker(optax.scale_by_adam(), mesh=mesh, specs=SPECS), jaxsparse.dense()
    ),
}


@pytest.mark.parametrize("name", WALKED)
def test_any_walker_sees_arrays_alone(name):
    state = WALKED[name](mesh((2, 2))).init(PARAMS)
    leaves = jax.tree.leaves(state)
    assert len(leaves) > 2
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert sorted(map(id, walked(state))) == sorted(map(id, leaves))
    saved = serialization.to_state_dict(state)
    assert sorted(map(id, walked(saved))) == sorted(map(id, leaves))
    back = serialization.from_bytes(
        jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state)
    )
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_partitions_travel_as_names():
    state = jaxsparse.spardl(0.1, mesh=mesh((2, 2)), specs=SPECS).init(PARAMS)
    placement = Placement.of(state.placement)
    assert placement == Placement((("fsdp", 2),), (PartitionSpec(), PartitionSpec("fsdp")))
    other = {axis: ("a, b", 'c"]', axis) for axis in ("x", "y.z/[0]")}
    odd = Placement(
        tuple((name, 2) for name in ("y.z/[0]", "x", "a, b", 'c"]')),
        (*(PartitionSpec(None, names) for names in other.values()), PartitionSpec("x", None)),
    )
    assert Placement.of(jax.tree.map(lambda x: x, odd.named)) == odd
    assert Placement.of(()) is None


def test_checkpoints_know_the_system_and_the_delay(tmp_path):
    """Into the state of another one, neither Orbax nor Flax restores."""
    make = lambda system, **settings: system(0.1, axis_name=None, **settings).init(PARAMS)
    state = make(jaxsparse.top_k)
    others = {"0_SparDL": make(jaxsparse.spardl), "pending": make(jaxsparse.top_k, delay=1)}
    with ocp.CheckpointManager(tmp_path) as saved:
        saved.save(1, args=ocp.args.StandardSave(state))
        restored = saved.restore(1, args=ocp.args.StandardRestore(state))
        by_name = saved.restore(1, args=ocp.args.StandardRestore())
        for key, target in others.items():
            with patient_loops(), pytest.raises(ValueError, match=key):
                saved.restore(1, args=ocp.args.StandardRestore(target))
    assert (restored.reducer_names, restored.is_delayed) == (("TopK",), False)
    assert list(by_name["reducers"]) == ["0_TopK"]
    with pytest.raises(ValueError, match="0_SparDL"):
        serialization.from_bytes(others["0_SparDL"], serialization.to_bytes(state))


ONE_WORKER = {
    **{name: transformation(name) for name in EXCHANGES},
    "partition": jaxsparse.partition({"w": reducers.TopK(0.1)}, axis_name=None),
    "delay": jaxsparse.top_k(0.1, momentum=0.9, delay=1, axis_name=None),
    "chain": optax.chain(
        jaxsparse.per_worker(optax.trace(0.5), axis_name=None),
        jaxsparse.spardl(0.1, axis_name=None),
        optax.trace(0.9),
    ),
}


@pytest.mark.parametrize(
    "name", some(ONE_WORKER, ["spardl", "ef21_sgdm", "powersgd", "partition", "delay", "chain"])
)
def test_what_is_like_parameters_is_mapped_and_nothing_else(name):
    """Moments behind the exchange are like parameters; what is a worker's own is not."""
    tx, seen = ONE_WORKER[name], []
    state = tx.init(PARAMS)
    mapped = optax.tree.map_params(
        tx, lambda x, spec: seen.append((x.shape, spec)) or x, state, SPECS
    )
    jax.tree.map(np.testing.assert_array_equal, mapped, state)
    is_like = name in ("ef21_sgdm", "chain")
    assert seen == ([(x.shape, SPECS[key]) for key, x in sorted(PARAMS.items())] if is_like else [])
    specs = optax.tree.map_params(
        tx, lambda _, spec: spec, state, SPECS, transform_non_params=lambda _: PartitionSpec()
    )
    jax.tree.map(lambda spec, _: spec, specs, state)  # raises unless they are a prefix of the state


@pytest.mark.parametrize("leafless", [{}, {"w": optax.MaskedNode(), "b": None}], ids=str)
def test_a_tree_without_leaves_is_taken(leafless):
    """As optax.multi_transform gives it to the transformation of a group of no leaf."""
    for name, tx in ONE_WORKER.items():
        state = tx.init(leafless)
        updates, after = tx.update(leafless, state, leafless)
        assert updates == leafless, name
        assert jax.tree.structure(after) == jax.tree.structure(state), name
    with pytest.raises(ValueError, match="buckets are exchanged by no buckets, and"):
        ONE_WORKER["spardl"].update(PARAMS, ONE_WORKER["spardl"].init(leafless))
