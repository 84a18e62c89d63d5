"""Promises of each row in the table of systems, whatever its system does."""

import importlib
import inspect
import re
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import optax
import pytest
from at_density import reducer_at
from jax.sharding import PartitionSpec as P
from workers import mesh, some

import jaxsparse
from jaxsparse import traffic
from jaxsparse.feedback import error_feedback
from jaxsparse.feedback.options import OPTIONS, LeafOptions, Options, StepOptions
from jaxsparse.feedback.transformations import SystemOptions
from jaxsparse.systems import SYSTEMS

# Those whose reducers are made from other settings than their own, or whose options differ, and one
# of the others.
USUAL = ("dense", "spardl", "dgc", "ms_topk", "qsgd", "quantized", "sign_sgd", "demo", "ef21_sgdm")
ROWS = [
    pytest.param(
        system,
        case,
        id="_".join(filter(None, (name, variant))),
        marks=[pytest.mark.slow] if variant or name not in USUAL else [],
    )
    for name, system in SYSTEMS.items()
    for variant, case in cases.CASES[name].items()
]
GRADIENTS = {"kernel": jnp.ones((40, 32)), "bias": jnp.ones(7)}
systems = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)


def test_each_file_of_systems_has_a_row_and_cases():
    """A file that the package does not import would not be tested."""
    files = {path.stem for path in Path(jaxsparse.systems.__file__).parent.glob("[!_]*.py")}
    modules = {importlib.import_module(f"jaxsparse.systems.{file}") for file in files - {"table"}}
    made = {x for m in modules for x in vars(m).values() if hasattr(x, "settings")}
    assert {x.__name__ for x in made} == {*SYSTEMS} == {*cases.CASES}


def test_transformations_are_public():
    for name, system in SYSTEMS.items():
        assert name in jaxsparse.systems.__all__, "add the name to __all__"
        assert getattr(jaxsparse, name) is system.transformation
        assert name in jaxsparse.__all__


@systems
def test_all_shared_options_are_shown(system):
    parameters = inspect.signature(system.transformation).parameters
    for name, (default, description) in OPTIONS.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if name not in ("momentum", "decay"):  # dgc and demo have other defaults
            assert parameters[name].default == default
        words = f"{name}: {description}".split()
        assert " ".join(words) in " ".join(system.transformation.__doc__.split())
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    first = lambda described: inspect.getdoc(described).split("\n")[0]
    shared = (Options, StepOptions, LeafOptions, SystemOptions)
    assert first(system.transformation) not in [first(kind) for kind in shared]


@systems
def test_an_option_that_there_is_not_is_refused(system):
    with pytest.raises(TypeError, match=rf"{system.name}\(\) has no option 'axis'.*axis_name"):
        system.transformation(**cases.CASES[system.name][""].small, axis=None)


MEANT = [
    ("sketched_sgd", "density", "compression"),
    ("top_k", "compression", "density"),
    ("true_top_k", "densty", None),
    ("powersgd", "ratio", "rank"),
    ("quantized", "bits", "format"),
    ("dense", "momentum_correction", "momentum"),
    ("spardl", "error_feedback", "decay"),
    ("dgc", "nestrov", "nesterov"),
    ("gtopk", "learning_rate", None),
]


@pytest.mark.parametrize(("name", "given", "meant"), MEANT)
def test_the_option_that_is_meant_is_told(name, given, meant):
    with pytest.raises(TypeError, match=rf"^{name}\(\) has no option '{given}'") as caught:
        getattr(jaxsparse, name)(**{given: 0.1})
    said = str(caught.value)
    assert ("do you mean" in said) == bool(meant), said
    if meant:
        assert f"do you mean '{meant}', " in said


@pytest.mark.parametrize(("system", "case"), ROWS)
def test_inject_hyperparams_sees_options_by_name(system, case):
    numbers = {
        name
        for name, parameter in inspect.signature(system.transformation).parameters.items()
        if isinstance(parameter.default, (int, float)) and name != "momentum"
    }
    injected = optax.inject_hyperparams(
        system.transformation, static_args={*numbers, *case.small, *OPTIONS} - {"momentum"}
    )(**case.small, axis_name=None, momentum=0.5)
    state = injected.init(GRADIENTS)
    assert set(state.hyperparams) == {"momentum"}
    assert state.hyperparams["momentum"] == 0.5


@pytest.mark.parametrize("name", some(SYSTEMS, ["spardl", "sketched_sgd", "demo"]))
def test_updates_are_typed_as_equal_in_a_shard_map_of_ones_own(name):
    """So JAX, which checks types there (check_vma), allows adding them to replicated parameters."""
    small = cases.CASES[name][""].small
    tx = optax.chain(SYSTEMS[name].transformation(**small), optax.sgd(0.1))
    state = jax.eval_shape(lambda: jaxsparse.shard(tx.init(GRADIENTS), 4))
    specs = jaxsparse.specs(state)

    def step(gradients, state):
        updates, state = tx.update(jaxsparse.local(gradients), state, gradients)
        return optax.apply_updates(gradients, updates), state

    run = jax.shard_map(step, mesh=mesh(4), in_specs=(P(), specs), out_specs=(P(), specs))
    params, after = jax.eval_shape(run, GRADIENTS, state)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, GRADIENTS)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def program(tx):
    """The programs of `init` and `update`, without the names of functions."""
    state = jax.eval_shape(tx.init, GRADIENTS)
    return (
        jax.make_jaxpr(tx.init)(GRADIENTS).pretty_print(name_stack=False),
        jax.make_jaxpr(tx.update)(GRADIENTS, state).pretty_print(name_stack=False),
    )


@pytest.mark.parametrize(("system", "case"), ROWS)
def test_the_reducer_exchanges_what_the_transformation_does(system, case):
    # These are given, because systems have defaults of their own.
    options = {"axis_name": None, "momentum": 0.9, "decay": 0.9}
    options["is_dense"] = lambda path, shape: "bias" in path
    if system.law == "differences":  # it computes more, but sends nothing more
        options |= {"axis_name": "data", "decay": None}
    tx = system.transformation(**case.small, **options)
    feedback = error_feedback(system.reducer(**case.small), **options)
    if system.law == "sums":
        assert program(tx) == program(feedback)
    else:
        bytes_of = lambda tx: jaxsparse.traffic.traced_bytes(tx, GRADIENTS, 4)
        assert bytes_of(tx) == bytes_of(feedback)
        assert bytes_of(tx).received > 0


# Systems whose formulas have words, or depend on more than settings.
IN_WORDS = {
    "sparcml",
    "gtopk",
    "omni_reduce",
    "s2_reducer",
    "sketched_sgd",
    "powersgd",
    "ef21_sgdm",
}


def formula(text, names):
    """The value of a row's formula: `8 k (W-1)`, or `24 C (W-1), C = 2 k/W`."""
    total, _, room = text.partition(", C = ")
    times = lambda part: re.sub(r"(?<=[\w)]) +(?=[\w(])", "*", part)
    if room:
        names = {**names, "C": eval(times(room), {"__builtins__": {}}, names)}
    return eval(times(total), {"__builtins__": {}}, names)


@systems
def test_bytes_are_those_of_the_formula_that_users_read(system):
    size, workers, name = 2**20, 8, system.name
    reducer = reducer_at(name, 0.01, size)
    names = {"d": size, "W": workers, "k": round(0.01 * size)}
    quantizer = getattr(reducer, "quantizer", None)
    for field in ("bits", "group_size", "block_size"):
        for owner in (reducer, quantizer):
            names |= {field: getattr(owner, field)} if hasattr(owner, field) else {}
    received = traffic.traced_bytes(reducer, size, workers).usual.received
    if name in IN_WORDS:
        with pytest.raises((NameError, SyntaxError)):
            formula(system.received, names)
        return
    try:
        expected = formula(system.received, names)
    except (NameError, SyntaxError) as error:
        pytest.fail(f"{system.received!r} is no formula of {[*names]} ({error}): see IN_WORDS")
    assert received == pytest.approx(expected, rel=0.01)
