"""Run in two processes by test_diagnostics: prints what checks say of each case.

At last process 0 calls it, and `diagnose`, alone.
"""

import jax
import numpy as np

import jaxsparse
from jaxsparse.processes import group


def array(values):
    """A replicated array of shape (3,), from the values on each device of this process."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    pieces = [jax.device_put(v, d) for v, d in zip(values, jax.local_devices())]
    return jax.make_array_from_single_device_arrays((3,), everywhere, pieces)


def say(name, tree, call=jaxsparse.check_replicas):
    try:
        call(tree)
    except (RuntimeError, FloatingPointError) as error:
        print(f"{name}: {str(error).split('. ')[0]}", flush=True)
    else:
        print(f"{name}: equal", flush=True)


def main():
    jax.distributed.initialize()
    rank = jax.process_index()
    x = np.float32([1, 2, 3])
    here = jax.device_put(x + rank, jax.local_devices()[0])
    say("equal", {"w": array([x, x]), "own": here})
    say("between", {"w": array([x, x]), "v": array([x + rank, x + rank])})
    # Only process 1 sees this difference on its own devices. Process 0 must not be left waiting.
    say("within", {"w": array([x, x]), "v": array([x, x + rank])})
    params = {"w": array([x, x])}
    tx = jaxsparse.top_k(0.5, is_dense=lambda *_: False)
    mesh = params["w"].sharding.mesh
    params, state = jaxsparse.shard((params, tx.init(params)), mesh)
    say("together", state, jaxsparse.diagnose)
    rows, split = np.float32([[1], [1], [np.nan], [1]]), jax.NamedSharding(mesh, jax.P("data"))
    grads = jax.make_array_from_callback(rows.shape, split, lambda index: rows[index])
    say("finite", {"w": grads}, jaxsparse.check_finite)
    group._SILENT, group.ProcessGroup.limit = 0.2, 1.0
    both = group.whole_group()
    if rank == 0:
        say("alone", params)
        say("alone", state, jaxsparse.diagnose)
        both.put("said", "")
    else:
        both.get("said", [0], seconds=60)


if __name__ == "__main__":
    with jaxsparse.fail_at_once():
        main()
