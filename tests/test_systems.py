"""Promises of each row in the table of exchanges, whatever its reducer does."""

import copy
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_density import reducer_at
from jax.sharding import PartitionSpec as P
from table import EXCHANGES, Row
from workers import by_step, feedback_loop, mesh, some

import jaxsparse
from jaxsparse import contrib, exchange, exchanges, reducers, traffic
from jaxsparse.arrays.settings import Density
from jaxsparse.comm import wire
from jaxsparse.feedback.options import Options, Settings
from jaxsparse.reducers import Kept, Reducer, Sums

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
    for name, system in EXCHANGES.items()
    for variant, case in EXCHANGES[name].cases.items()
]
GRADIENTS = {"kernel": jnp.ones((40, 32)), "bias": jnp.ones(7)}
systems = pytest.mark.parametrize("system", EXCHANGES.values(), ids=EXCHANGES)


def test_each_exchange_has_a_row_and_cases():
    """A file that nothing imports would not be tested."""
    functions = {
        name
        for module in (exchanges, contrib)
        for name, x in vars(module).items()
        if inspect.isfunction(x) and x is not jaxsparse.exchange
    }
    assert functions - {"static_bool"} == {*EXCHANGES}
    is_own = lambda x: isinstance(x, type) and issubclass(x, Reducer) and not inspect.isabstract(x)
    made = {type(case.reducer) for case in contract.CASES.values()} | {reducers.Staged}
    folders = [Path(module.__file__).parent for module in (reducers, contrib)]
    files = [path for folder in folders for path in folder.glob("[!_]*.py")]
    for path in files:
        module = importlib.import_module(f"jaxsparse.{path.parent.name}.{path.stem}")
        own = {x for x in vars(module).values() if is_own(x) and x.__module__ == module.__name__}
        assert own <= made, path


def test_transformations_are_public():
    for name, system in EXCHANGES.items():
        home, _, last = system.path.rpartition(".")
        assert getattr(importlib.import_module(home), last) is system.transformation
        assert home != "jaxsparse" or name in jaxsparse.__all__


@systems
def test_signatures_show_the_settings_of_the_reducer(system):
    """With their defaults. A setting that a function left out could not be given."""
    parameters = inspect.signature(system.transformation).parameters
    reducer = system.reducer(**system.cases[""].small)
    doc = system.transformation.__doc__
    if (
        f"See `reducers.{type(reducer).__name__}`" in doc
        or f"See `{type(reducer).__name__}`" in doc
    ):
        fields = {f.name: f.default for f in dataclasses.fields(reducer)}
        shown = {n: p.default for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
        missing = lambda default: default in (dataclasses.MISSING, inspect.Parameter.empty)
        assert shown.keys() == fields.keys()
        for name, default in shown.items():
            if system.name not in ("dgc",):
                assert missing(default) == missing(fields[name])
                assert missing(default) or default == fields[name], name
    else:
        assert "Args:" in doc or system.name == "dgc"


def test_all_options_are_described_once():
    doc = " ".join(inspect.getdoc(jaxsparse.exchange).split())
    defaults = inspect.signature(Settings).parameters
    for name in Options.__annotations__:
        assert f" {name}: " in doc
        assert name in defaults


@systems
def test_an_option_that_there_is_not_is_refused(system):
    with pytest.raises(TypeError, match="'axis'"):
        system.transformation(**system.cases[""].small, axis=None)


MEANT = [
    ("sketched_sgd", {"compression": 10}, "density", "compression"),
    ("quantized", {}, "bits", "quantizer"),
    ("dense", {}, "momentum_correction", "momentum"),
    ("spardl", {"density": 0.1}, "error_feedback", "decay"),
    ("dgc", {}, "nestrov", "nesterov"),
    ("top_k", {"density": 0.1}, "learning_rate", None),
]


@pytest.mark.parametrize(("name", "settings", "given", "meant"), MEANT)
def test_the_option_that_is_meant_is_told(name, settings, given, meant):
    with pytest.raises(TypeError, match=rf"has no option '{given}'") as caught:
        getattr(jaxsparse, name)(**settings, **{given: 0.1})
    said = str(caught.value)
    assert ("do you mean" in said) == bool(meant), said
    if meant:
        assert f"do you mean '{meant}'?" in said


def test_inject_hyperparams_changes_an_option():
    make = lambda momentum: jaxsparse.top_k(0.1, axis_name=None, momentum=momentum)
    state = optax.inject_hyperparams(make)(momentum=0.5).init(GRADIENTS)
    assert set(state.hyperparams) == {"momentum"}
    assert state.hyperparams["momentum"] == 0.5
    injected = optax.inject_hyperparams(jaxsparse.top_k, static_args="density")(0.1, momentum=0.5)
    with pytest.raises(TypeError, match=r"Give it a function of what changes, as in optax.inject_"):
        injected.init(GRADIENTS)


def test_an_exchange_tells_what_it_is_and_outlives_trees():
    tx = jaxsparse.top_k(0.1, delay=1)
    assert (tx.reducer, tx.settings.is_delayed) == (reducers.TopK(0.1), True)
    assert repr(tx).startswith("Exchange(TopK(density=0.1")
    for again in (jax.tree.map(lambda x: x, tx), copy.deepcopy(tx)):
        assert isinstance(again, jaxsparse.Exchange)
        assert again.reducer == tx.reducer
    assert jaxsparse.partition({"kernel": reducers.TopK(0.1)}).reducer is None


@pytest.mark.parametrize("name", some(EXCHANGES, ["spardl", "sketched_sgd"]))
def test_updates_are_typed_as_equal_in_a_shard_map_of_ones_own(name):
    """So JAX, which checks types there (check_vma), allows adding them to replicated parameters."""
    small = EXCHANGES[name].cases[""].small
    tx = optax.chain(EXCHANGES[name].transformation(**small), optax.sgd(0.1))
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


@pytest.mark.slow
@pytest.mark.parametrize(("system", "case"), ROWS)
def test_the_reducer_exchanges_what_the_transformation_does(system, case):
    # These are given, because systems have defaults of their own.
    options = {"axis_name": None, "momentum": 0.9, "decay": 0.9}
    options["is_dense"] = lambda path, shape: "bias" in path
    if system.law == "differences":  # it computes more, but sends nothing more
        options |= {"axis_name": "data"}
        del options["decay"]
    tx = system.transformation(**case.small, **options)
    feedback = exchange(system.reducer(**case.small), **options)
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


@dataclasses.dataclass(frozen=True)
class Turns(Reducer):
    """Sends a share of the coordinates, another one in each step."""

    density: Density

    def init(self, size):
        return jnp.int32(0)

    def reduce(self, x, state, axis_name):
        sent = (jnp.arange(x.size) + state) % round(1 / self.density) == 0
        total = wire.psum(jnp.where(sent, x, 0), axis_name)
        return Sums(total, x.size), Kept(jnp.where(sent, 0, x), sent, state + 1)


def turns(gradients, density):
    """Its slow twin: means of steps, from float64[STEPS, W, d]."""
    residual, means = np.zeros_like(gradients[0]), []
    for t, step in enumerate(gradients):
        residual = residual + step
        sent = (np.arange(residual.shape[1]) + t) % round(1 / density) == 0
        means.append(np.where(sent, residual, 0).mean(0))
        residual = np.where(sent, 0, residual)
    return np.array(means)


def test_a_new_reducer_is_a_file_a_twin_and_a_row():
    """CONTRIBUTING says so. What a row leaves out suits a reducer with a density."""
    row = Row(lambda density, **options: exchange(Turns(density), **options), "in turns", "8 d")
    for settings in row.cases[""]:
        results = feedback_loop(row.reducer(**settings), 3)(
            jnp.asarray(contract.gradients(3).swapaxes(0, 1))
        )
        contract.check_laws(row.reducer(**settings), results, 3)
    reducer = row.reducer(**row.at_density(0.25, contract.SIZE, 0))
    assert reducer == Turns(0.25)
    given = contract.gradients(3)
    results = feedback_loop(reducer, 3)(jnp.asarray(given.swapaxes(0, 1)))
    found = np.array([reduced.mean[0] for _, reduced in by_step(results)])
    np.testing.assert_array_equal(found, turns(given.astype(np.float64), 0.25))
    tx = row.transformation(0.25, momentum=0.9, workers=2)
    rows = jax.tree.map(lambda x: jnp.stack([x, x]), GRADIENTS)
    updates, _ = jax.jit(tx.update)(rows, tx.init(GRADIENTS), GRADIENTS)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, GRADIENTS)
