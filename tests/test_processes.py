"""The contract in real processes: the numbers are those of simulated workers."""

import sys
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_contract import STEPS
from running import in_processes

WORKERS = 4
TIMEOUT = 400
# Numbers of processes and of devices of each, and cases.
LAYOUTS = [
    pytest.param(4, 1, tuple(contract.CASES), id="4 processes"),
    pytest.param(2, 2, tuple(contract.CASES), id="2 devices each"),
]


def simulated(names, path):
    """Checks the results of simulated workers for each case, and writes them to a file."""
    expected = {}
    stacked = jnp.asarray(contract.gradients(WORKERS, STEPS).swapaxes(0, 1))
    for name in names:
        reducer = contract.CASES[name].reducer
        results = contract.runner(reducer, WORKERS, "vmap")(stacked)
        contract.check_laws(reducer, results, WORKERS)
        leaves = enumerate(jax.tree.leaves(results))
        expected |= {f"{name} {i}": np.asarray(leaf) for i, leaf in leaves}
    np.savez(path, **expected)
    return path


def check(names, expected, processes, devices):
    script = Path(__file__).with_name("run_contract.py")
    command = [sys.executable, script, expected, *names]
    outcome, lines = in_processes(command, processes, devices=devices, timeout=TIMEOUT)
    assert outcome.status == 0, outcome.report
    for each in lines:
        assert [line for line in each if line.endswith("equal")] == [f"{n} equal" for n in names]


def test_processes_compute_what_simulated_workers_do(tmp_path):
    names = ["spardl"]
    check(names, simulated(names, tmp_path / "expected.npz"), 2, 2)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return simulated(contract.CASES, tmp_path_factory.mktemp("contract") / "expected.npz")


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "names"), LAYOUTS)
def test_every_reducer_obeys_its_contract_in_processes(expected, processes, devices, names):
    check(names, expected, processes, devices)


@pytest.mark.slow
def test_nothing_is_lost_on_a_mesh_with_an_inner_axis():
    names = [name for name in contract.CASES if name not in contract.VARIANTS]
    script = Path(__file__).with_name("run_meshes.py")
    outcome, lines = in_processes(
        [sys.executable, script, *names], 4, devices=2, timeout=2 * TIMEOUT
    )
    assert outcome.status == 0, outcome.report
    for each in lines:
        assert [line for line in each if line.endswith("equal")] == [f"{n} equal" for n in names]
