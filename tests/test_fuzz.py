"""Random transformations on random gradients keep the contract. (`fuzzing.py` says which.)

    pytest tests/test_fuzz.py --fuzz 10000 --fuzz-seed 7

runs as many cases on other programs, and prints what fails so that it can be run again.
"""

import dataclasses
import itertools
import time
import zlib

import jax
import numpy as np
import pytest
from fuzzing import (
    Data,
    Leaf,
    Program,
    all_cases,
    check,
    compiled,
    draw_program,
    special_cases,
    usual_cases,
)
from hypothesis import HealthCheck, given, seed, settings
from jax.sharding import PartitionSpec
from table import EXCHANGES
from workers import some

# Most cases of a program. A program takes seconds to compile, a case takes milliseconds.
CASES = 300
USUAL = ("qsgd",)  # the only one whose values are rounded at random
WORKERS = (3, 7, 4)  # of one system after the other; gTop-k adds up 3 and 7 in other ways than 4


def fuzz(program, run, cases, count, number):
    """Checks `count` of the cases; raises AssertionError with the smallest that fails."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def each(data):
        try:
            check(program, data, run)
        except AssertionError as error:
            error.add_note(f"{program}\n{data}")
            raise

    each()


def first_program(name, is_on_mesh=False):
    """The first program that is not refused, from a number on that depends on the system's name.

    Simulated workers are as many as WORKERS say. Many compressed elements are float32.
    """
    workers = WORKERS[list(EXCHANGES).index(name) % len(WORKERS)]
    for number in itertools.count(zlib.crc32(name.encode()) % 1000):
        program = draw_program(0, number, name, is_on_mesh)
        if not is_on_mesh and (program.workers != workers or not has_many_floats(program)):
            continue
        try:
            return number, program, compiled(program)
        except ValueError as error:
            if not _is_refusal(program, error):
                raise


def has_many_floats(program):
    """Whether enough elements reach float32's limits for sums to overflow in all ways."""
    is_float = program.by_leaf(lambda dtype: dtype == "float32") > 0
    return np.count_nonzero(is_float & program.is_compressed) >= 260 or program.name == "dense"


@pytest.mark.slow
@pytest.mark.parametrize("name", some(EXCHANGES, USUAL))
def test_the_contract_holds(name):
    number, program, run = first_program(name)
    fuzz(program, run, usual_cases, CASES // 3, number)
    fuzz(program, run, special_cases, CASES // 6, number)  # 1,100 for all systems
    jax.clear_caches()


@pytest.mark.parametrize("name", some(EXCHANGES, []))
def test_the_contract_holds_on_a_mesh_with_inner_axes(name):
    number, program, run = first_program(name, is_on_mesh=True)
    assert program.devices > 1
    fuzz(program, run, all_cases, CASES // 10, number)
    jax.clear_caches()


# Cases that failed once, and why.
FOUND = {
    "the checker knew of no clip before a delayed gradient": (
        Program(
            "powersgd",
            {"rank": 1, "min_compression_rate": 0.0},
            workers=1,
            leaves=(Leaf((11,), "float32"), Leaf((1,), "float16"), Leaf((7,), "float16")),
            delay=1,
        ),
        {"seed": 1, "support": "random", "filled": 0.1, "magnitude": "largest"},
    ),
    "a scale over its levels was subnormal in one program alone": (
        Program(
            "sparcml",
            {"k": 4, "group_size": 4, "bits": 8, "rounding": "nearest"},
            workers=2,
            leaves=(Leaf((48, 40), "float32"),),
            momentum=0.9,
            delay=1,
            inner=(4,),
            cuts=(PartitionSpec(None, "fsdp"),),
        ),
        {"exponent": -37},
    ),
}
USUAL_DATA = Data(0, "all", 0.01, 0.0, 0.3, False, False, False, None)


@pytest.mark.parametrize("name", some(FOUND, []))
def test_what_was_found_once(name):
    program, data = FOUND[name]
    check(program, dataclasses.replace(USUAL_DATA, **data), compiled(program))
    jax.clear_caches()


def test_as_many_cases_as_are_asked_for(request, capsys):
    wanted, start = request.config.getoption("--fuzz"), request.config.getoption("--fuzz-seed")
    if not wanted:
        pytest.skip("give --fuzz 10000 to run as many cases")
    began, number, done, refused, failed = time.monotonic(), 0, 0, 0, []
    while done < wanted:
        # All systems on simulated workers, then all on meshes with inner axes, and so on.
        program = draw_program(start, number, is_on_mesh=number // len(EXCHANGES) % 2 == 1)
        count, outcome = min(CASES, wanted - done), "kept"
        try:
            fuzz(program, compiled(program), all_cases, count, number)
            done += count
        except Exception as error:
            if _is_refusal(program, error):
                outcome = f"refused: {error}"
                refused += 1
            else:
                outcome = "\n".join([repr(error), *getattr(error, "__notes__", [str(program)])])
                failed.append(f"program {number}: {outcome}")
                done += count
        with capsys.disabled():
            minutes = (time.monotonic() - began) / 60
            print(f"\n{minutes:.1f} min, {done} cases, {number} {program.name}: {outcome}", end="")
        number += 1
        jax.clear_caches()
    with capsys.disabled():
        print(
            f"\n{done} cases, {number - refused} programs (and {refused} refused), "
            f"--fuzz-seed {start}, {len(failed)} failed, {minutes:.1f} minutes"
        )
    assert not failed, "\n\n".join(failed)


def _is_refusal(program, error):
    """Whether the error is a refusal, which names a setting of the program."""
    named = any(f"{name}=" in str(error) for name in program.settings)
    return isinstance(error, ValueError) and named
