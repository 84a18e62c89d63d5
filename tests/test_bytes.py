"""The bytes that one step sends, read from the compiled program, and the memory that it takes."""

import pytest
from steps import COMPRESSED, DENSE, compiled_step
from workers import few, mesh, some

import jaxsparse
from jaxsparse import traffic

SKETCHED = {"k": 50, "rows": 3, "cols": 211, "oversampling": 7}
SENT = {  # words of one step beside the dense leaves and the finite flag
    "dense": (lambda: jaxsparse.dense(), COMPRESSED),
    "true_top_k": (lambda: jaxsparse.true_top_k(50), COMPRESSED),
    "random_k": (lambda: jaxsparse.random_k(0.01), 603),
    "sketched": (lambda: jaxsparse.sketched_sgd(**SKETCHED), 3 * 211 + 7 * 50),
    "heavymix": (
        lambda: jaxsparse.sketched_sgd(k=50, rows=3, cols=211, selection="heavymix"),
        3 * 211 + 50,
    ),
    "sketched, momentum, buckets": (
        lambda: jaxsparse.sketched_sgd(**SKETCHED, momentum=0.9, bucket_size=COMPRESSED // 2),
        3 * 211 + 7 * 50,
    ),
    "sketched, no savings": (lambda: jaxsparse.sketched_sgd(k=50, cols=COMPRESSED), COMPRESSED),
}


@pytest.mark.parametrize("name", some(SENT, ("dense", "random_k")))
@pytest.mark.parametrize("workers", few([2, 5, 8], [5]))
def test_payload(name, workers):
    make, words = SENT[name]
    sent = traffic.wire_bytes(compiled_step(make(), mesh(workers)))
    assert {c.op for c in sent.collectives} == {"all-reduce"}
    assert {c.group_size for c in sent.collectives} == {workers}
    assert sent.payload == 4 * (words + DENSE + 1)
    assert sent.received == pytest.approx(2 * (workers - 1) / workers * sent.payload)


@pytest.mark.parametrize("name", some(SENT, ["dense"]))
def test_one_worker_sends_nothing(name):
    assert traffic.wire_bytes(compiled_step(SENT[name][0](), mesh(1))).payload == 0


GIVEN = ({}, {"k": 60}, {"cols": 150}, {"selection": "heavymix"})


@pytest.mark.parametrize(
    "case",
    some(
        [(compression, given) for compression in (1.5, 5, 10, 20.0) for given in GIVEN],
        [],
        slow=[(1.5, GIVEN[0]), (20.0, GIVEN[0]), (20.0, GIVEN[1]), (20.0, GIVEN[3])],
    ),
    ids=str,
)
def test_compression_is_met_and_used(case):
    compression, given = case
    tx = jaxsparse.sketched_sgd(compression, **given)
    payload = traffic.wire_bytes(compiled_step(tx, mesh(2))).payload
    wanted = 4 * (COMPRESSED + DENSE) / compression
    assert wanted - 4 * (5 + 4) < payload <= wanted  # less than one column and one k unused


D = 2**24


@pytest.mark.parametrize(
    ("settings", "floats", "leaves"),
    [
        pytest.param({}, 4.2, 16, marks=pytest.mark.slow),
        pytest.param({"momentum": 0.9}, 5.5, 16, marks=pytest.mark.slow),
        pytest.param({}, 3.5, 1, marks=pytest.mark.thorough),
        pytest.param({"momentum": 0.9}, 4.5, 1, marks=pytest.mark.thorough),
        pytest.param({"bucket_size": D // 8}, 4.6, 16, marks=pytest.mark.slow),
        pytest.param({"bucket_size": D // 8}, 4.6, 1, marks=pytest.mark.thorough),
    ],
)
def test_peak_memory_of_a_whole_step(settings, floats, leaves):
    """Arguments, outputs and temporaries together, in units of d float32, parameters included."""
    shapes = {f"kernel{i}": (D // leaves // 1024, 1024) for i in range(leaves)}
    tx = jaxsparse.sketched_sgd(k=D // 100, cols=2**18, oversampling=1, **settings)
    assert peak(tx, shapes) <= floats


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget", "floats", "leaves"),
    [
        ("dgc", 0.01, 4.3, 1),
        ("dgc", 0.01, 5.5, 16),
        ("top_k", 0.01, 3.5, 1),
        ("chunked_top_k", 41, 3.4, 1),
        ("gtopk", 0.01, 5.3, 1),
        ("ok_topk", 0.01, 4.2, 1),
    ],
)
def test_peak_memory_of_a_system(name, budget, floats, leaves):
    """The same for systems that send 1 % of the elements."""
    shapes = {f"kernel{i}": (D // leaves // 1024, 1024) for i in range(leaves)}
    assert peak(getattr(jaxsparse, name)(budget), shapes) <= floats


def peak(tx, shapes):
    """The peak memory of a step, in units of d float32."""
    memory = compiled_step(tx, mesh(2), shapes, donate=0).memory_analysis()
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return total / (4 * D)
