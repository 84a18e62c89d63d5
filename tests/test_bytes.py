"""The bytes that one step sends, read from the compiled program, and the memory that it takes."""

import pytest
from steps import COMPRESSED, DENSE, compiled_step
from table import EXCHANGES
from workers import mesh, some

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
def test_payload(name):
    (make, words), workers = SENT[name], 5
    sent = traffic.wire_bytes(compiled_step(make(), mesh(workers)))
    assert {c.op for c in sent.collectives} == {"all-reduce"}
    assert {c.group_size for c in sent.collectives} == {workers}
    flag = name != "dense"  # where what is not finite shows in the mean
    assert sent.payload == 4 * (words + DENSE + flag)
    assert sent.received == pytest.approx(2 * (workers - 1) / workers * sent.payload)


D = 2**24


SKETCH = {"k": D // 100, "cols": 2**18, "oversampling": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "floats", "leaves"),
    [
        ("sketched_sgd", SKETCH, 4.2, 16),
        ("sketched_sgd", {**SKETCH, "momentum": 0.9}, 5.8, 16),
        ("sketched_sgd", {**SKETCH, "bucket_size": D // 8}, 4.6, 16),
        ("dgc", {"density": 0.01}, 4.3, 1),
        ("dgc", {"density": 0.01}, 5.8, 16),
        ("top_k", {"density": 0.01}, 3.5, 1),
        ("chunked_top_k", {"k": 41}, 3.4, 1),
        ("gtopk", {"density": 0.01}, 5.2, 16),
        ("ok_topk", {"density": 0.01}, 4.2, 1),
    ],
)
def test_peak_memory_of_a_whole_step(name, settings, floats, leaves):
    """Arguments, outputs and temporaries together, in units of d float32, parameters included."""
    shapes = {f"kernel{i}": (D // leaves // 1024, 1024) for i in range(leaves)}
    tx = EXCHANGES[name].transformation(**settings)
    memory = compiled_step(tx, mesh(2), shapes, donate=0).memory_analysis()
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    assert total / (4 * D) <= floats
