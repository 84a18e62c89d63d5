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
from running import cache_in, in_processes, python
from workers import feedback_loop

WORKERS = 4
TIMEOUT = 400
EXCHANGES = tuple(name for name in contract.CASES if name not in contract.VARIANTS)
FEW = contract.REPRESENTATIVES
# Numbers of processes and of devices of each, and cases. In each layout a system's variants send as
# the system does, and with two devices each its messages go as those of a representative.
LAYOUTS = [
    pytest.param(4, 1, EXCHANGES, id="4 processes"),
    pytest.param(2, 2, FEW, id="2 devices each"),
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


def check(script, names, processes, devices, *given, timeout=TIMEOUT):
    command = [sys.executable, Path(__file__).with_name(script), *given, *names]
    outcome, lines = in_processes(command, processes, devices=devices, timeout=timeout)
    assert outcome.status == 0, outcome.report
    for each in lines:
        assert [line for line in each if line.endswith("equal")] == [f"{n} equal" for n in names]


@pytest.mark.slow
def test_processes_compute_what_simulated_workers_do(tmp_path):
    names = ["top_k"]
    check("run_contract.py", names, 2, 2, simulated(names, tmp_path / "expected.npz"))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "names"), LAYOUTS)
def test_every_reducer_obeys_its_contract_in_processes(tmp_path, processes, devices, names):
    expected = simulated(names, tmp_path / "expected.npz")
    check("run_contract.py", names, processes, devices, expected)


# Besides the representatives those that exchange matrices, which an inner axis cuts.
ON_MESHES = (*FEW, "powersgd", "demo")


@pytest.mark.slow
def test_nothing_is_lost_on_a_mesh_with_an_inner_axis():
    check("run_meshes.py", ON_MESHES, 4, 2, timeout=2 * TIMEOUT)


@pytest.mark.slow
def test_programs_that_a_cache_kept_run_as_they_did(tmp_path):
    """XLA:CPU orders the collectives of such a program by their data alone, if they branch."""
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    script = Path(__file__).with_name("run_twice.py")
    printed = python(script, settings=cache_in(tmp_path) | devices)
    assert printed.count("equal") == 5
    assert any((tmp_path / "cache").iterdir())
