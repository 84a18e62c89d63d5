"""Strict settings for every test: emulated devices, strict dtype and rank promotion."""

import gc
import importlib
import os
import sys
import types
from pathlib import Path

from running import MULTIHOST, QUICK_FLAG

# Set before jax is imported, because emulated devices are made when the backend starts. The timeout
# is long because on a busy machine one of them may reach a collective later than the 40 s after
# which XLA ends the process. To compile as users do, set JAX_DISABLE_MOST_OPTIMIZATIONS=0.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    + QUICK_FLAG * (os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "0")
)

import chex
import jax
import pytest

from jaxsparse.arrays import platforms

# Collecting makes objects that stay, so collecting garbage meanwhile takes a third of its time.
gc.disable()
# `--doctest-modules` would import modules that hold no tests, too.
FILES = Path(__file__).parent.glob("*.py")
collect_ignore = [path.name for path in FILES if not path.name.startswith("test_")]

MAPPINGS = Path("/proc/self/maps")  # memory mappings; only Linux has this file

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    # Compiling small programs takes most of the time, and LLVM takes a third of that.
    jax.config.update("jax_disable_most_optimizations", True)
    # Programs carry a line of the source each instruction, and no stack traces, which take long.
    jax.config.update("jax_traceback_in_locations_limit", 1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--gpu-forms", action="store_true", help="run what is for GPUs, wherever the tests run"
    )
    parser.addoption("--fuzz", type=int, default=0, help="cases of tests/test_fuzz.py to run, too")
    parser.addoption("--fuzz-seed", type=int, default=0, help="of these cases")
    parser.addoption(
        "--histories", type=int, default=0, help="histories of tests/test_histories.py to run, too"
    )
    parser.addoption("--histories-seed", type=int, default=0, help="of these histories")


def pytest_configure(config):
    if config.getoption("--gpu-forms"):
        platforms.platform_dependent = lambda *operands, cuda, **others: cuda(*operands)
    elif not config.getoption("--slow"):
        platforms.platform_dependent = form_that_runs


def form_that_runs(*operands, default, **others):
    """One form on a CPU, because tracing GPUs' beside it takes an eighth of the time.

    The slow tests trace both, and tests/test_gpu_forms.py compares them.
    """
    if jax.default_backend() == "cpu":
        return default(*operands)
    return jax.lax.platform_dependent(*operands, default=default, **others)


def pytest_collection_modifyitems(config, items):
    """Leaves out what runs with --slow only. Skipping thousands takes seconds."""
    if not config.getoption("--slow"):
        config.hook.pytest_deselected(items=[item for item in items if "slow" in item.keywords])
        items[:] = [item for item in items if "slow" not in item.keywords]


def pytest_collection_finish():
    """Keeps imported objects out of garbage collections. Tracing causes many of these."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Forgets compiled programs after each module. They would add up to gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def count_traces_from_here():
    """Counts traces anew in each test, because programs may be forgotten between tests."""
    chex.clear_trace_counter()


def pytest_runtest_teardown(item, nextitem):
    """Forgets programs within a module, too, before they use up the mappings that Linux allows.

    Each program takes about a dozen mappings. Past ``vm.max_map_count``, 65,530 by default, XLA's
    next program ends the process with a segmentation fault.
    """
    item.session.tests_since_count = getattr(item.session, "tests_since_count", 0) + 1
    if item.session.tests_since_count < 20:
        return
    item.session.tests_since_count = 0
    if MAPPINGS.exists() and len(MAPPINGS.read_bytes().splitlines()) > 30_000:
        jax.clear_caches()


@pytest.fixture(scope="module")
def multihost():
    """The multi-host example's own modules, which it imports from its folder."""
    names = ("checkpoints", "locks", "loops", "processes", "shares", "train", "digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(MULTIHOST)
        others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
        path = list(sys.path)
        importlib.import_module("train")
        yield types.SimpleNamespace(**{name: sys.modules[name] for name in names})
        sys.path[:] = path
        for name in names:
            del sys.modules[name]
        sys.modules.update(others)


@pytest.fixture
def key():
    return jax.random.key(0)
