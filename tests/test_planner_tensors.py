"""Efficiency-aware tensor selection against DRAGONN's equation, and the profile that it takes."""

import dataclasses
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxsparse import codecs, planner
from jaxsparse.arrays.layout import small_or_vector
from jaxsparse.arrays.stream import SparseStream
from jaxsparse.feedback import error_feedback
from jaxsparse.planner import TensorPoint, TensorProfile, profile_tensors, select_tensors
from jaxsparse.planner.computing import _line
from jaxsparse.systems import TopK


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def norm(channels):
    return {"scale": shape(channels), "bias": shape(channels)}


def resnet50():
    """Shapes of He et al. (2015), table 1: convolutions, batch norms, one dense layer."""
    tree = {"stem": {"kernel": shape(7, 7, 3, 64), "norm": norm(64)}}
    inputs = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            kernels = [(1, 1, inputs, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                kernels.append((1, 1, inputs, 4 * width))
            tree[f"stage{stage}_block{block}"] = [
                {"kernel": shape(*kernel), "norm": norm(kernel[-1])} for kernel in kernels
            ]
            inputs = 4 * width
    return tree | {"head": {"kernel": shape(2048, 1000), "bias": shape(1000)}}


# Rough times of a processor: a few passes over the memory to encode, one to decode.
MEASURED = TensorProfile(
    (
        TensorPoint(4096, 6e-5, 1e-5, 1e-9),
        TensorPoint(2**18, 3e-4, 5e-5, 1e-9),
        TensorPoint(2**22, 1e-2, 5e-4, 5e-9),
        TensorPoint(2**24, 7e-2, 5e-2, 5e-9),
    )
)


def select(tree, workers=8, link=None, density=0.001, profile=MEASURED, **settings):
    link = planner.Link() if link is None else link
    return select_tensors(
        tree, workers=workers, link=link, density=density, profile=profile, **settings
    )


def test_resnet50_has_its_published_size():
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(resnet50())]
    assert len(sizes) == 161
    assert sum(sizes) == 25_557_032


def by_the_equation(size, workers, alpha, bandwidth, density):
    """T_full, T_spr and gamma of the paper's section 4.2, in COO, with whole entries."""
    gamma = 2 * np.ceil(density * size - 1e-9) / size
    gamma = np.minimum(gamma, 1)  # a message is never longer than the tensor
    full = 2 * (workers - 1) * (alpha + 4 * size / (workers * bandwidth))
    sparse = (workers - 1) * (alpha + gamma * 4 * size / bandwidth)
    return full, sparse, gamma


LATENCIES, BANDWIDTHS = (1e-6, 1e-3), (1.25e8, 1.25e9, 3e11)
WORKERS, DENSITIES = (1, 2, 8, 45, 1000), (0.0001, 0.01, 1.0)


@pytest.mark.parametrize(
    "rule",
    [None, pytest.param(lambda path, shape: False, marks=pytest.mark.slow)],
    ids=["default", "none"],
)
def test_decisions_are_those_of_the_equation(rule):
    tree = resnet50()
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    sizes = np.array([math.prod(shape) for shape in shapes])
    free = np.array([rule is not None or not small_or_vector("", shape) for shape in shapes])
    kinds = set()
    for alpha, bandwidth, workers, density in itertools.product(
        LATENCIES, BANDWIDTHS, WORKERS, DENSITIES
    ):
        selection = select(tree, workers, planner.Link(alpha, bandwidth), density, is_dense=rule)
        seen = np.array([(t.dense, t.exchange, t.codec) for t in selection.tensors]).T
        full, sparse, gamma = by_the_equation(sizes, workers, alpha, bandwidth, density)
        codec = [
            MEASURED.encode_seconds(size)
            + MEASURED.decode_seconds(size, workers * math.ceil(density * size - 1e-9))
            for size in sizes.tolist()
        ]
        np.testing.assert_allclose(seen, [full, sparse, codec], rtol=1e-9)
        saved = (workers - 1) * (alpha + (2 / workers - gamma) * 4 * sizes / bandwidth)
        np.testing.assert_allclose(seen[0] - seen[1], saved, rtol=1e-6, atol=1e-9 * full.max())
        chosen = np.array([t.is_compressed for t in selection.tensors])
        np.testing.assert_array_equal(chosen, free & (seen[2] < seen[0] - seen[1]))
        # Never slower than the better of the two.
        assert selection.seconds <= min(selection.dense_seconds, selection.compressed_seconds)
        assert selection.seconds == pytest.approx(
            np.where(chosen, seen[1] + seen[2], seen[0]).sum()
        )
        kinds.add(chosen.sum())
    assert {0, free.sum()} < kinds  # none, all, and numbers between


@pytest.mark.parametrize("gamma", [0.002, 0.0002])
def test_the_saving_peaks_near_the_root_of_two_over_gamma(gamma):
    free = TensorProfile((TensorPoint(1, 0.0, 0.0, 0.0),))
    tree = {"w": shape(1000, 10000)}
    link = planner.Link(latency=1e-12)
    saving = {
        workers: select(tree, workers, link, gamma / 2, free).tensors[0].saving
        for workers in range(2, 200)
    }
    best = max(saving, key=saving.get)
    assert abs(best - math.sqrt(2 / gamma)) <= 1
    assert saving[199] < saving[best]


def test_one_worker_compresses_nothing_and_small_tensors_go_dense():
    assert all(not t.is_compressed for t in select(resnet50(), workers=1).tensors)
    selection = select(resnet50())
    assert not selection.is_dense("['head']['kernel']", (2048, 1000))
    bias = ("['stage0_block0'][0]['norm']['bias']", (64,))
    assert selection.is_dense(*bias)
    # The equation alone counts a latency for each small leaf, which costs none here.
    assert not select(resnet50(), is_dense=lambda path, shape: False).is_dense(*bias)


def test_codec_shortens_messages():
    whole, packed = select(resnet50()), select(resnet50(), codec=codecs.Packed())
    assert all(
        p.exchange < c.exchange for p, c in zip(packed.tensors, whole.tensors) if c.elements > 2000
    )


def test_selection_is_the_is_dense_of_a_transformation():
    tree = {"a": jnp.ones((64, 32)), "big": jnp.ones((300, 300)), "empty": jnp.ones((0, 3))}
    free = TensorProfile((TensorPoint(2048, 1e-3, 0.0, 0.0), TensorPoint(90_000, 1e-5, 0.0, 0.0)))
    for chosen, dense in ((free, 2048), (TensorProfile((TensorPoint(1, 1.0, 0.0, 0.0),)), 92_048)):
        selection = select(tree, profile=chosen, link=planner.Link(1e-6, 1e8))
        tx = error_feedback(TopK(0.01), axis_name=None, is_dense=selection.is_dense)
        updates, state = jax.jit(tx.update)(tree, tx.init(tree))
        assert np.count_nonzero(updates["big"]) + np.count_nonzero(updates["a"]) == (
            92_048 if dense == 92_048 else 2048 + 900
        )
        assert int(state.info.delivered) == (92_048 if dense == 92_048 else 2048 + 900)
        assert optax.tree.sum(state.residual) == 92_048 - int(state.info.delivered)


def test_table_is_aligned_and_totals():
    lines = str(select(resnet50())).splitlines()
    assert len(lines) == 1 + 161 + 2
    ends = [lines[0].index(title) + len(title) for title in ("elements", "codec ms", "saving ms")]
    for line in lines[:162]:
        assert all(line[end - 1] != " " and line[end] == " " for end in ends), line
        assert line == line.rstrip()
    assert lines[0].split()[0] == "leaf"
    assert lines[162].startswith("all dense ")
    assert "of 161 compressed)" in lines[162]
    assert "8 workers, 5e-05 s, 1.25e+09 bytes/s, density 0.001" in lines[163]


def test_profile_interpolates_and_extrapolates():
    p = TensorProfile((TensorPoint(100, 1.0, 2.0, 0.5), TensorPoint(300, 3.0, 4.0, 0.25)))
    assert [p.encode_seconds(d) for d in (1, 100, 150, 300, 600)] == [1, 1, 1.5, 3, 6]
    assert [p.decode_seconds(d, 0) for d in (1, 100, 150, 300, 600)] == [2, 2, 2.5, 4, 8]
    # Time is in proportion to the entries. Past the largest size, it is the same for an entry.
    assert [p.decode_seconds(d, 8) - p.decode_seconds(d, 0) for d in (1, 200, 300, 900)] == [
        4, 3, 2, 2
    ]  # fmt: skip


def test_profile_is_kept_in_a_file(tmp_path):
    words = {"device": "cpu: cpu", "jax": "0.10", "date": "2026-01-01", "settings": "s"}
    for more in ({}, {"density": 0.01, "codec": repr(codecs.COO)}):
        p = TensorProfile(MEASURED.points, **words, **more)
        p.save(tmp_path / "profile.json")
        assert TensorProfile.load(tmp_path / "profile.json") == p
    content = json.loads((tmp_path / "profile.json").read_text())
    assert "seconds to encode" in content["units"]["points"]
    assert content["points"][0][0] == 4096


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda c: "{", "JSONDecodeError"),
        (lambda c: "[1]", "TypeError"),
        (lambda c: json.dumps(c | {"jaxsparse_profile": 9}), "its jaxsparse_profile is 9, not 3"),
        (lambda c: json.dumps(c | {"density": 2.0}), r"density=2\.0 must lie"),
        (lambda c: json.dumps(c | {"codec": 3}), "codec=3 must be a text"),
        (lambda c: json.dumps({k: v for k, v in c.items() if k != "points"}), "'points'"),
        (lambda c: json.dumps(c | {"points": []}), "at least one size"),
        (lambda c: json.dumps(c | {"points": [[3]]}), "encode"),
        (lambda c: json.dumps(c | {"points": c["points"][::-1]}), "increasing order"),
        (
            lambda c: json.dumps(c | {"points": [[4096, -1.0, 0.0, 0.0]]}),
            r"encode=-1\.0 at elements=4096 must be finite and at least 0",
        ),
        (lambda c: json.dumps(c | {"points": [[4096, 0.0, "1", 0.0]]}), "decode='1'"),
    ],
)
def test_bad_profiles_are_named(tmp_path, break_it, complaint):
    path = tmp_path / "profile.json"
    MEASURED.save(path)
    path.write_text(break_it(json.loads(path.read_text())))
    with pytest.raises(
        ValueError, match=rf"profile\.json is no profile of tensors that can be.*{complaint}"
    ):
        TensorProfile.load(path)


def test_missing_profile_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        TensorProfile.load(tmp_path / "none.json")


def first(x, k):
    return SparseStream(jnp.arange(k, dtype=jnp.int32), x[:k])


@pytest.mark.parametrize(
    "extract", [pytest.param(None, marks=pytest.mark.slow), first], ids=["dragonn", "first"]
)
def test_profile_measures_this_device(extract):
    sizes = (1000,) if extract is None else (1000, 50_000)
    p = profile_tensors(extract, sizes=sizes[::-1], workers=(8, 2), density=0.01, repeats=3)
    assert tuple(point.elements for point in p.points) == sizes
    assert all(1e-7 < point.encode < 10 for point in p.points)
    assert all(1e-7 < p.decode_seconds(d, d // 10) < 10 for d in sizes)
    assert p.device.startswith(jax.devices()[0].platform)
    assert p.jax == jax.__version__
    assert p.density == 0.01
    assert p.codec == repr(codecs.COO)
    assert p.settings == "workers=[2, 8]"


def test_a_profile_of_other_messages_is_refused():
    p = dataclasses.replace(MEASURED, density=0.01, codec=repr(codecs.COO), settings="workers=[2]")
    for density in (0.01, np.float32(0.01)):
        conditions = str(select(resnet50(), density=density, profile=p)).splitlines()[-1]
        assert conditions.endswith("codec: workers=[2], density 0.01, Coo()")
    with pytest.raises(
        ValueError, match=r"density=0\.001 differs from the profile's, 0\.01: .*meas"
    ):
        select(resnet50(), profile=p)
    with pytest.raises(ValueError, match=r"codec=Packed\(.*\) differs from .*, Coo\(\): .*measure"):
        select(resnet50(), density=0.01, profile=p, codec=codecs.Packed())
    packed = dataclasses.replace(p, codec=repr(codecs.Packed()))
    select(resnet50(), density=0.01, profile=packed, codec=codecs.Packed("bfloat16"))
    # The profile's density or codec may be unknown.
    select(resnet50(), profile=dataclasses.replace(p, density=None))
    select(
        resnet50(),
        density=0.01,
        profile=dataclasses.replace(p, codec=None),
        codec=codecs.Packed(),
    )


@pytest.mark.parametrize(
    ("points", "complaint"),
    [
        (
            ((1000, 1e-5),),
            r"point=\(1000, 1e-05\) must have 4 values: give TensorPoint\(elements, encode",
        ),
        ((5,), r"point=5 is no sequence: give TensorProfile\(\(TensorPoint\(elements"),
        (5, r"points=5 is no sequence: give TensorProfile\(\(TensorPoint\(elements"),
    ],
)
def test_points_are_checked(points, complaint):
    with pytest.raises(ValueError, match=complaint):
        TensorProfile(points)


def test_the_time_of_an_entry_is_a_slope_that_is_not_negative():
    assert _line([2, 4, 8], [5.0, 9.0, 17.0]) == pytest.approx((1.0, 2.0))
    assert _line([2, 4], [3.0, 3.0]) == pytest.approx((3.0, 0.0))
    fixed, slope = _line([2, 4], [6.0, 3.0])
    assert 3 < fixed < 6
    assert slope == 0
    fixed, slope = _line([2, 4], [1.0, 4.0])
    assert fixed == 0
    assert 0.5 < slope < 1


def test_settings_are_checked():
    tree = {"w": shape(100, 100)}
    for settings, complaint in [
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"workers": 2.0}, r"workers=2\.0 must be an int"),
        ({"density": 0.0}, r"density=0\.0 must lie in \(0, 1\]"),
        ({"link": 1e9}, r"link=1000000000\.0 must be a Link: give jaxsparse\.planner\.Link\("),
        ({"profile": "p.json"}, r"profile='p\.json' must be a TensorProfile"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            select(tree, **settings)
    with pytest.raises(ValueError, match="dtype int32"):
        select({"w": jax.ShapeDtypeStruct((3, 4), jnp.int32)})
    selection = select(tree)
    with pytest.raises(ValueError, match=r"leaf\['b'\] of shape \(3,\).*no such leaf"):
        selection.is_dense("['b']", (3,))
    with pytest.raises(ValueError, match=r"leaf\['w'\].*it had shape \(100, 100\)"):
        selection.is_dense("['w']", (3,))
    for settings, complaint in [
        ({"sizes": ()}, r"sizes=\(\) must be 1 or more distinct ints"),
        ({"sizes": 4096}, "sizes=4096 must be 1 or more distinct ints from 1 on: pass a sequence"),
        ({"sizes": (0,)}, r"sizes=\(0,\) must be"),
        ({"workers": (4, 4)}, r"workers=\(4, 4\) must be 2 or more distinct ints"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"density": 2}, "density=2 must lie"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            profile_tensors(**settings)
