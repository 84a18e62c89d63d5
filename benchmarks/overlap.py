"""Reads from a compiled training step what its collectives depend on.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --method sparcml --bucket-size 262144

For each collective of the step it prints how many computations of the backward pass the collective
depends on: by default, and with delay=1. Others may run beside it, if the backend runs several at
the same time. A computation belongs to the backward pass if JAX's name stack, which XLA keeps, says
so. The step is compiled for eight emulated devices.
"""

import os

# This stands before jax is imported, because a mesh needs devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import argparse
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from timing import parser_of, save, where

import jaxsparse
from jaxsparse.traffic import hlo

COLLECTIVES = {
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast"),
    *("collective-permute", "ragged-all-to-all", "reduce-scatter"),
}
METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {
    # In buckets, so that it is delayed as the others are.
    "dense": functools.partial(jaxsparse.exchange, jaxsparse.reducers.Dense()),
    "sketched_sgd": functools.partial(jaxsparse.sketched_sgd, 10),
    "spardl": functools.partial(jaxsparse.spardl, 0.01),
    "sparcml": functools.partial(jaxsparse.sparcml, 4),
}
MODES: dict[str, dict[str, Any]] = {"in order": {}, "delay": {"delay": 1}}


class Row(NamedTuple):
    """One collective of a compiled step."""

    op: str
    operand_bytes: int
    backward: int  # number of the backward pass's computations that it depends on


def rows(text: str) -> list[Row]:
    """The collectives of a compiled module's entry computation, in the order of its schedule."""
    module = hlo.parse(text)
    entry = module.computations[module.entry].instructions
    inside = {name: list(_inside(module, name)) for name in entry}
    ancestors: dict[str, frozenset[str]] = {}
    for name, instruction in entry.items():  # operands come first
        own = [o for o in instruction.operands if o in entry]
        ancestors[name] = frozenset(own).union(*(ancestors[o] for o in own))
    no_work = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
    backward = {
        name
        for name, instruction in entry.items()
        if instruction.opcode not in no_work
        and any("transpose(" in x.op_name for _, x in inside[name])
    }
    table = []
    for name in entry:
        sent = [(c, x) for c, x in inside[name] if x.opcode in COLLECTIVES]
        if sent:
            operands = sum(s.nbytes for c, x in sent for s in c.operand_shapes(x))
            table.append(Row(sent[0][1].opcode, operands, len(ancestors[name] & backward)))
    return table


def _inside(module: hlo.Module, name: str) -> Iterable[tuple[hlo.Computation, hlo.Instruction]]:
    """An entry instruction and those that it calls, each with the computation that holds it."""
    entry = module.computations[module.entry]
    todo = [(entry, entry.instructions[name])]
    while todo:
        computation, instruction = todo.pop()
        yield computation, instruction
        for role, callees in instruction.callees.items():
            if role != "to_apply" or instruction.opcode == "call":
                for callee in map(module.computations.__getitem__, callees):
                    todo += [(callee, x) for x in callee.instructions.values()]


def compiled(args: argparse.Namespace, mode: str) -> Any:
    """A training step of a multi-layer perceptron."""
    exchange = METHODS[args.method](bucket_size=args.bucket_size, **MODES[mode])
    tx = optax.chain(exchange, optax.sgd(0.01))

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(jnp.square(x))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jaxsparse.value_and_grad(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value.mean()

    mesh = jax.make_mesh((8,), ("data",))
    params = [jnp.zeros((args.width,) * 2)] * 4
    state = jaxsparse.shard((params, tx.init(params)), mesh)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batch = jax.device_put(jnp.ones((8 * 32, args.width)), split)
    return step.lower(state, batch).compile()


def main() -> None:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--method", choices=METHODS, default="spardl", help="(default: spardl)")
    add("--width", type=int, default=512, help="units of a layer (default: 512)")
    add("--bucket-size", type=int, default=None, help="elements (default: all in one)")
    add("--json", help="where to write the results")
    args = parser.parse_args()
    result: dict[str, Any] = {"where": where(), "settings": vars(args), "modes": {}}
    for mode in MODES:
        program = compiled(args, mode)
        table, memory = rows(program.as_text()), program.memory_analysis().temp_size_in_bytes
        print(f"{mode}: {memory:,} bytes of temporaries")
        for row in table:
            print(f"  {row.op:20} {row.operand_bytes:>12,} B  needs {row.backward:3} backward")
        collectives = [row._asdict() for row in table]
        result["modes"][mode] = {"collectives": collectives, "temporary_bytes": memory}
    save(result, args.json)


if __name__ == "__main__":
    main()
