"""The contract in real processes: the numbers are those of simulated workers."""

import functools
import sys
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from run_contract import STEPS
from running import in_processes
from workers import feedback_loop

WORKERS = 4
TIMEOUT = 400
SYSTEMS = tuple(name for name in contract.CASES if name not in contract.VARIANTS)
FEW = contract.REPRESENTATIVES
# Numbers of processes and of devices of each, and cases. In each layout a system's variants send as
# the system does, and with two devices each its messages go as those of a representative.
LAYOUTS = [
    pytest.param(4, 1, SYSTEMS, id="4 processes", marks=pytest.mark.slow),
    pytest.param(2, 2, FEW, id="2 devices each", marks=pytest.mark.slow),
    pytest.param(
        4, 1, tuple(contract.VARIANTS), id="4 processes, variants", marks=pytest.mark.thorough
    ),
    pytest.param(
        2,
        2,
        tuple(name for name in contract.CASES if name not in FEW),
        id="2 devices each, others",
        marks=pytest.mark.thorough,
    ),
]


@functools.cache
def results(name):
    """Those of simulated workers, checked."""
    stacked = jnp.asarray(contract.gradients(WORKERS, STEPS).swapaxes(0, 1))
    reducer = contract.CASES[name].reducer
    found = feedback_loop(reducer, WORKERS)(stacked)
    contract.check_laws(reducer, found, WORKERS)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def simulated(names, path):
    """Writes the results of simulated workers for each case to a file."""
    expected = {f"{name} {i}": leaf for name in names for i, leaf in enumerate(results(name))}
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
    names = ["top_k"]
    check(names, simulated(names, tmp_path / "expected.npz"), 2, 2)


@pytest.mark.parametrize(("processes", "devices", "names"), LAYOUTS)
def test_every_reducer_obeys_its_contract_in_processes(tmp_path, processes, devices, names):
    check(names, simulated(names, tmp_path / "expected.npz"), processes, devices)


# Besides the representatives those that exchange matrices, which an inner axis cuts.
ON_MESHES = (*FEW, "powersgd", "demo")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ON_MESHES, marks=pytest.mark.slow),
        pytest.param(
            tuple(name for name in SYSTEMS if name not in ON_MESHES), marks=pytest.mark.thorough
        ),
    ],
    ids=["few", "others"],
)
def test_nothing_is_lost_on_a_mesh_with_an_inner_axis(names):
    script = Path(__file__).with_name("run_meshes.py")
    outcome, lines = in_processes(
        [sys.executable, script, *names], 4, devices=2, timeout=2 * TIMEOUT
    )
    assert outcome.status == 0, outcome.report
    for each in lines:
        assert [line for line in each if line.endswith("equal")] == [f"{n} equal" for n in names]
