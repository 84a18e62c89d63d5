"""PowerSGD beside PyTorch's own: equal gradients, equal rank, the same two processes.

    pip install torch          # a CPU build is enough; nothing else of the project needs it
    python benchmarks/powersgd.py
    python benchmarks/powersgd.py --ranks 1 2 4 --sides 2048 2048 --layers 4

Two processes, bound to a core each, hold PyTorch's DistributedDataParallel with `powerSGD_hook` and
this library's step, both over gloo. In each step all methods get the same gradients, one after the
other. Gradients have a slowly turning spectrum that falls as 1/i, shared by the workers, and noise
of their own. The hook demands two dense steps before it compresses, which are not counted.

An error is the norm of the difference between a method's result and the exact mean, over the norm
of the exact mean. The table has the mean error of single steps, and the error of the sums over all
steps, which feedback keeps small. Times are medians. Each is also divided by the time of the same
framework's dense all-reduce, because DDP also copies gradients into its buckets. Words are those of
one worker's messages.
"""

import argparse
import functools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

PROCESSES = 2
DENSE_STEPS = 2  # dense steps that PyTorch's hook takes before it compresses


class Gradients:
    """The workers' gradients of each step, equal in all processes."""

    def __init__(self, args: argparse.Namespace):
        self.args, rng = args, np.random.default_rng(args.seed)
        n, m = args.sides
        self.left = rng.normal(size=(args.layers, n, 16)).astype(np.float32)
        self.right = rng.normal(size=(args.layers, 16, m)).astype(np.float32)
        self.spectrum = (1 / np.arange(1, 17)).astype(np.float32)

    def step(self, number: int) -> np.ndarray:
        """float32[W, layers, n, m]."""
        rng = np.random.default_rng((self.args.seed, number))
        self.left += 0.1 * rng.normal(size=self.left.shape).astype(np.float32)
        self.right += 0.1 * rng.normal(size=self.right.shape).astype(np.float32)
        shared = (self.left * self.spectrum) @ self.right
        shape = (PROCESSES, *shared.shape)
        return shared + self.args.noise * rng.standard_normal(shape, dtype=np.float32)


class Row(NamedTuple):
    """One method's function from a worker's gradients to means, and the words that it sends."""

    run: Callable[[Any], Any]
    put: Callable[[np.ndarray], Any]  # puts gradients into the method's form; it is not timed
    words: float
    dense: str  # the row whose time is the unit


def torch_rows(args: argparse.Namespace) -> dict[str, Row]:
    """DistributedDataParallel with the hooks that PyTorch has."""
    import torch
    import torch.distributed.algorithms.ddp_comm_hooks as hooks
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    n, m = args.sides

    class Leaves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = lambda: torch.nn.Parameter(torch.zeros(n, m))
            self.leaves = torch.nn.ParameterList([make() for _ in range(args.layers)])

        def forward(self, gradients: Any) -> Any:
            return sum((p * g).sum() for p, g in zip(self.leaves, gradients))

    def row(hook: Any, state: Any, words: float) -> Row:
        model = DistributedDataParallel(
            Leaves(),
            bucket_cap_mb=1 + 4 * args.layers * n * m // 2**20,
            gradient_as_bucket_view=True,
        )
        model.register_comm_hook(state, hook)

        def run(gradients: Any) -> Any:
            model.zero_grad()
            model(gradients).backward()
            return [p.grad for p in model.module.leaves]

        return Row(run, lambda x: list(torch.from_numpy(x)), words, "PyTorch, dense")

    rows = {"PyTorch, dense": row(hooks.default_hooks.allreduce_hook, None, args.layers * n * m)}
    for rank in args.ranks:
        state = hooks.powerSGD_hook.PowerSGDState(
            None, rank, DENSE_STEPS, orthogonalization_epsilon=1e-8
        )
        hook = hooks.powerSGD_hook.powerSGD_hook
        rows[f"PyTorch, rank {rank}"] = row(hook, state, args.layers * rank * (n + m))
    return rows


def jax_rows(args: argparse.Namespace) -> dict[str, Row]:
    """This library's step, without the optimizer."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxsparse
    from jaxsparse import shard
    from jaxsparse.outer.parallel import run_on_workers

    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    n, m = args.sides

    def row(tx: Any, words: float) -> Row:
        params = [jnp.zeros((n, m)) for _ in range(args.layers)]
        step = lambda state, g: tx.update(jax.tree.map(lambda x: x[0], g), state)
        compiled = run_on_workers(step, mesh, donate_argnums=0)
        held = [shard(tx.init(params), mesh)]

        def run(gradients: Any) -> Any:
            means, held[0] = compiled(held[0], gradients)
            return jax.block_until_ready(means)

        def put(x: np.ndarray) -> Any:
            make = functools.partial(jax.make_array_from_process_local_data, split)
            return jax.block_until_ready([make(each[None]) for each in x])

        return Row(run, put, words, "jaxsparse, dense")

    rows = {"jaxsparse, dense": row(jaxsparse.dense(), args.layers * n * m)}
    for rank in args.ranks:
        for form, share in (("full", 1.0), ("alternating", 0.5)):
            tx = jaxsparse.powersgd(rank, iteration=form)  # type: ignore[arg-type]
            words = share * args.layers * rank * (n + m)
            rows[f"jaxsparse, rank {rank}, {form}"] = row(tx, words)
    return rows


def work(args: argparse.Namespace) -> None:
    """Runs one of the processes."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[args.process % os.cpu_count()]})
    import jax
    import torch.distributed

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    host, ports = "127.0.0.1", args.ports
    jax.distributed.initialize(f"{host}:{ports[0]}", PROCESSES, args.process)
    torch.distributed.init_process_group(
        "gloo", f"tcp://{host}:{ports[1]}", rank=args.process, world_size=PROCESSES
    )
    rows = torch_rows(args) | jax_rows(args)
    source = Gradients(args)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    errors: dict[str, list[float]] = {name: [] for name in rows}
    sums: dict[str, Any] = dict.fromkeys(rows, 0.0)
    exact_sum: Any = 0.0
    for number in range(DENSE_STEPS + args.steps):
        gradients = source.step(number)
        exact = gradients.mean(0, dtype=np.float64)
        is_counted = number >= DENSE_STEPS
        exact_sum = exact_sum + exact * is_counted
        for name, row in rows.items():
            if not is_counted and name.startswith("jaxsparse"):
                continue
            given = row.put(gradients[args.process])
            torch.distributed.barrier()
            start = time.perf_counter()
            means = row.run(given)
            seconds[name].append(time.perf_counter() - start)
            local = lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x
            mean = np.stack([np.asarray(local(x), np.float64) for x in means])
            if is_counted:
                errors[name].append(float(np.linalg.norm(mean - exact) / np.linalg.norm(exact)))
                sums[name] = sums[name] + mean
    if args.process:
        return
    units = {name: statistics.median(seconds[name][-args.steps + 2 :]) for name in rows}
    size = args.layers * args.sides[0] * args.sides[1]
    print(f"torch {torch.__version__}, jax {jax.__version__}, {size} elements, {args.steps} steps")
    print("| | words / d | error of a step | error of the sum | ms | over own dense |")
    print("|---|---|---|---|---|---|")
    for name, row in rows.items():
        of_sum = np.linalg.norm(sums[name] - exact_sum) / np.linalg.norm(exact_sum)
        print(
            f"| {name} | {row.words / size:.4f} | {np.mean(errors[name]):.4f} | {of_sum:.4f} "
            f"| {1e3 * units[name]:.1f} | {units[name] / units[row.dense]:.2f} |"
        )


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[1, 4])
    add("--sides", type=int, nargs=2, default=[1024, 1024], help="rows and columns of a layer")
    add("--layers", type=int, default=4)
    add("--steps", type=int, default=50)
    add("--noise", type=float, default=0.3, help="of each worker's own")
    add("--seed", type=int, default=0)
    add("--process", type=int, help=argparse.SUPPRESS)
    add("--ports", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.process is not None:
        work(args)
        return
    ports = [str(free_port()), str(free_port())]
    command = [sys.executable, *sys.argv, "--ports", *ports, "--process"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(PROCESSES)]
    sys.exit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()
