"""Times of computing: that they are those of whole exchanges, and how they are interpolated."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsparse.__main__ as shell
from jaxsparse.planner.computing import profile_systems, time_exchange
from jaxsparse.planner.profiles import Floor, SystemPoint, SystemProfile
from jaxsparse.systems import Dense, TopK
from jaxsparse.systems.sparcml import ALGORITHMS

SIZES, WORKERS, DENSITIES = (2**10, 2**14), (2, 8, 32), (0.001, 0.01)


def law(size, workers, density):
    """A product of powers, which lines between logarithms follow exactly."""
    return 3e-9 * size * workers**0.5 * density**0.25


def measured(holes=()):
    floors = {size: 1e-9 * size for size in SIZES}
    points = [
        SystemPoint("top_k", size, workers, density, law(size, workers, density) / floors[size])
        for size in SIZES
        for workers in WORKERS
        for density in DENSITIES
        if (size, workers, density) not in holes
    ]
    points.append(SystemPoint("dense", SIZES[0], 2, None, 2.0))
    return SystemProfile(tuple(points), tuple(floors.items()), device="a CPU")


@pytest.mark.parametrize("holes", [(), ((2**14, 8, 0.01), (2**14, 2, 0.001))])
def test_powers_are_recovered(holes):
    profile = measured(holes)
    rng = np.random.default_rng(0)
    for _ in range(50):
        size = int(2 ** rng.uniform(10, 20))  # beyond the largest, times are in proportion
        workers, density = int(2 ** rng.uniform(0, 10)), 10 ** rng.uniform(-4, 0)
        expected = law(size, workers, density)
        assert profile.seconds("top_k", size, workers, density) == pytest.approx(expected)


def test_ends():
    profile = measured()
    at = lambda size: profile.seconds("top_k", size, 8, 0.01)
    assert at(10) == at(2**10)
    assert at(2**16) == pytest.approx(4 * at(2**14))
    assert profile.seconds("dense", 2**10, 500, 0.5) == pytest.approx(2e-9 * 2**10)
    steep = SystemProfile(
        (
            SystemPoint("a", 8, 2, None, 1.0),
            SystemPoint("a", 8, 4, None, 8.0),
            SystemPoint("a", 8, 8, None, 4.0),
        ),
        (Floor(8, 1e-6),),
    )
    times = [steep.seconds("a", 8, workers, 1) for workers in (1, 2, 3, 4, 6, 8, 16)]
    assert times[0] == pytest.approx(0.5e-6)  # falls in proportion at most
    assert times[2] == pytest.approx(1e-6 * 1.5**3)
    assert times[-1] == times[-2]  # does not fall past the last point


def test_another_memory_bandwidth_scales_all():
    profile = measured()
    assert profile.memory_bandwidth == pytest.approx(8e9)
    faster = profile.scaled(16e9)
    assert faster.memory_bandwidth == pytest.approx(16e9)
    for size in (10, 10**4, 10**6):
        before = profile.seconds("top_k", size, 8, 0.01)
        assert faster.seconds("top_k", size, 8, 0.01) == pytest.approx(before / 2)
    assert "extrapolated from a CPU" in str(faster)


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "profile.json"
    profile = measured()
    profile.save(path)
    assert SystemProfile.load(path) == profile
    for text in ("{}", "[]", "no JSON", path.read_text().replace('"top_k", 1024', "1024", 1)):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no profile of systems that can be read"):
            SystemProfile.load(path)


@pytest.mark.parametrize(
    ("points", "floors", "message"),
    [
        ((), (), "give at least one point"),
        ((SystemPoint("a", 8, 2, None, 1.0),), (), "lack sizes"),
        ((SystemPoint("a", 8, 0, None, 1.0),), ((8, 1.0),), "at least 1"),
        ((SystemPoint("a", 8, 2, None, math.inf),), ((8, 1.0),), "passes=inf must be positive"),
        ((SystemPoint("a", 8, 2, 0.0, 1.0),), ((8, 1.0),), "density=0.0 must be positive"),
        ((SystemPoint("a", 8, 2, None, 1.0),), ((8, -1.0),), "seconds=-1.0 must be positive"),
    ],
)
def test_checks(points, floors, message):
    with pytest.raises(ValueError, match=message):
        SystemProfile(points, floors)


def test_unknown_system():
    with pytest.raises(ValueError, match="'b' is not in this profile, which has top_k, dense"):
        measured().seconds("b", 1, 1, 1)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_what_is_shipped_is_extrapolated_within_reason(device):
    profile = SystemProfile.shipped(device)
    assert device in profile.device.lower()
    wanted = {f"sparcml:{name}" for name in ALGORITHMS} if device == "cpu" else {"chunked_top_k"}
    assert {"dense", *wanted} <= set(profile.systems)
    for name in profile.systems:
        for workers in (2, 16, 1024):
            assert 0 < profile.seconds(name, 10**8, workers, 0.01) < 600


def test_a_device_of_which_nothing_is_shipped():
    with pytest.raises(ValueError, match=r"profile='v100' is not one of the library's, cpu, h100"):
        SystemProfile.shipped("v100")


@pytest.mark.slow
def test_the_whole_exchange_is_computed(monkeypatch):
    """Nothing is optimised away: mean, residual and state leave the program."""
    from jaxsparse.comm import wire

    seen = []
    real = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda x: seen.append(x) or real(x))
    time_exchange(TopK(0.05), 601, 3, repeats=1, warm_up=0)
    (_, residual), mean = seen[0]
    x = jax.random.normal(jax.random.key(601), (601,)) ** 3
    with wire.dry_run(3):
        expected = TopK(0.05)(x, (), axis_name="data")
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(residual, expected.kept.whole(x).residual, rtol=1e-6)
    assert jnp.count_nonzero(mean) == 31
    seen.clear()
    time_exchange(Dense(), 601, 3, repeats=1, warm_up=0)
    (_, residual), mean = seen[0]
    assert residual.size == 0
    np.testing.assert_allclose(mean, x, rtol=1e-6)


@pytest.mark.slow
def test_profiles_are_measured_from_the_shell(tmp_path, capsys):
    path = tmp_path / "profile.json"
    arguments = f"profile --out {path} --systems random_k --sizes 1k 3k --workers 2 4"
    assert shell.main([*arguments.split(), "--repeats", "1", "--density", "0.01"]) == 0
    profile = SystemProfile.load(path)
    assert profile.systems == ("dense", "random_k")  # dense is needed by any plan
    assert {(p.elements, p.workers) for p in profile.points} == {
        (size, workers) for size in (1000, 3000) for workers in (2, 4)
    }
    assert {p.density for p in profile.points} == {None, 0.01}
    assert "random_k, 3,000 elements, 4 workers, density 0.01: " in capsys.readouterr().out
    arguments = f"profile --out {path} --systems sign_sgd --sizes 1k --workers 2 --repeats 1"
    assert shell.main(arguments.split()) == 0
    assert SystemProfile.load(path).systems == ("dense", "random_k", "sign_sgd")


def test_a_profile_takes_a_newer_ones_systems():
    profile = measured()
    newer = SystemProfile(
        (
            SystemPoint("top_k", 2**10, 2, 0.01, 7.0),
            SystemPoint("new", 2**12, 2, 0.01, 5.0),
            SystemPoint("dense", 2**12, 2, None, 9.0),
        ),
        (Floor(2**10, 1.0), Floor(2**12, 3e-6)),
        device="a CPU",
        date="today",
    )
    found = profile.updated(newer)
    assert found.systems == ("dense", "top_k", "new")
    assert [p.passes for p in found.points] == [2.0, 7.0, 5.0]  # dense has the older profile's
    assert dict(found.floors) == {2**10: 1e-9 * 2**10, 2**12: 3e-6, 2**14: 1e-9 * 2**14}
    assert found.settings == "unknown; new, top_k on today"
    assert found.seconds("top_k", 2**10, 2, 0.01) == pytest.approx(7e-9 * 2**10)
    alone = dataclasses.replace(profile, points=profile.points[:-1])  # without dense
    assert alone.updated(newer).systems == ("top_k", "new", "dense")
    with pytest.raises(ValueError, match="is of 'a CPU', and the newer one of 'another'"):
        profile.updated(dataclasses.replace(newer, device="another"))


def test_systems_of_matrices_are_left_out():
    lines = []
    profile = profile_systems(
        ["powersgd"], sizes=[1000], workers=[2], repeats=1, progress=lines.append
    )
    assert profile.systems == ("dense",)
    assert any("powersgd" in line and "depends on the shapes of leaves" in line for line in lines)


def test_what_a_system_cannot_do_is_left_out():
    lines = []
    profile = profile_systems(
        ["random_k", "sketched_sgd"],
        sizes=[1000],
        workers=[2],
        density=0.3,
        repeats=1,
        progress=lines.append,
    )
    assert profile.systems == ("dense", "random_k")
    assert any("left out: density=0.3" in line for line in lines)
    with pytest.raises(ValueError, match="system 'best' is unknown"):
        profile_systems(["best"], sizes=[1000])


@pytest.mark.slow
def test_each_of_sparcml_s_algorithms_is_measured():
    lines = []
    profile = profile_systems(
        ["sparcml"], sizes=[2000], workers=[2], density=0.01, repeats=1, progress=lines.append
    )
    assert profile.systems == ("dense", *(f"sparcml:{name}" for name in ALGORITHMS))
    assert [line.partition(",")[0] for line in lines] == list(profile.systems)
