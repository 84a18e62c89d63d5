"""What type checkers see of the transformations: each setting by name and type.

It is checked by mypy, not run. A comment that ignores an error is an error itself if there is none.
"""

from typing import assert_type

import jax.numpy as jnp

import jaxsparse
from jaxsparse import codecs, contrib, reducers


def settings_are_seen() -> None:
    assert_type(
        jaxsparse.spardl(
            0.01, teams=2, gather="bruck", codec=codecs.Packed(), momentum=0.9, delay=1
        ),
        jaxsparse.Exchange,
    )
    jaxsparse.exchange(jaxsparse.warm_up(reducers.SparDL(0.01), steps=100))
    jaxsparse.sketched_sgd(10, table_dtype="bfloat16", momentum=jnp.float32(0.9))
    jaxsparse.exchange(reducers.Staged((reducers.Dense(), reducers.PowerSGD(2)), (100,)))
    jaxsparse.exchange(reducers.TopK(0.01), axis_name=None)
    jaxsparse.partition({"embedding": reducers.TopK(0.01)}, bucket_size=2**20)
    contrib.ef21_sgdm(reducers.SparDL(0.01, teams=2), momentum=0.5)
    jaxsparse.chunked_top_k(512, decay=0.95, is_dense=lambda path, shape: False)

    jaxsparse.spardl()  # type: ignore[call-arg]
    jaxsparse.spardl(0.01, team=2)  # type: ignore[call-arg]
    jaxsparse.spardl("1 %")  # type: ignore[arg-type]
    jaxsparse.spardl(0.01, gather="tree")  # type: ignore[arg-type]
    jaxsparse.spardl(0.01, delay=2)  # type: ignore[arg-type]
