"""Random transformations on random gradients keep the contract. (`fuzzing.py` says which.)

    pytest tests/test_fuzz.py --fuzz 10000 --fuzz-seed 7

runs as many cases on other programs, and prints what fails so that it can be run again.
"""

import time

import jax
import pytest
from fuzzing import SETTINGS, cases, check, compiled, draw_program
from hypothesis import HealthCheck, given, seed, settings
from workers import some

from jaxsparse.systems import SYSTEMS

# Of a program, which takes seconds to compile; a case takes milliseconds.
CASES = 300
# Numbers of programs of the seed 0, one of each transformation.
USUAL, SLOW, REST = (21, 24, 30), (19, 22, 23, 26, 29, 33), (17, 18, 20, 25, 27, 28, 31, 32)


def fuzz(program, run, count, number):
    """Checks `count` cases; raises AssertionError with the smallest that fails."""

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


@pytest.mark.parametrize("number", some([*USUAL, *SLOW, *REST], USUAL, SLOW))
def test_the_contract_holds(number):
    program = draw_program(0, number)
    fuzz(program, compiled(program), CASES // 3, number)
    jax.clear_caches()


def test_every_transformation_has_its_turn():
    assert set(SETTINGS) == set(SYSTEMS)
    names = [draw_program(0, number).name for number in (*USUAL, *SLOW, *REST)]
    assert sorted(names) == sorted(SYSTEMS)


def test_as_many_cases_as_are_asked_for(request, capsys):
    wanted, start = request.config.getoption("--fuzz"), request.config.getoption("--fuzz-seed")
    if not wanted:
        pytest.skip("give --fuzz 10000 to run as many cases")
    began, number, done, refused, failed = time.monotonic(), 0, 0, 0, []
    while done < wanted:
        program = draw_program(start, number)
        count, outcome = min(CASES, wanted - done), "kept"
        try:
            fuzz(program, compiled(program), count, number)
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
    """Whether it names a setting of the program."""
    named = any(f"{name}=" in str(error) for name in program.settings)
    return isinstance(error, ValueError) and named
