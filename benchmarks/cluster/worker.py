"""One rank of the cluster: measures all cells together with the others. `run.py` starts it."""

import dataclasses
import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from cells import Cell
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from namespaces import Rate
from programs import Loaded, Program, Store, arguments, program
from records import Records

from jaxsparse import Link, fail_at_once, planner, traffic
from jaxsparse.comm import wire
from jaxsparse.planner import planning

_LEAST = 3  # least number of repetitions
_WORDS = (1, 2**10, 2**14, 2**17, 2**20)  # sizes of messages with which links are measured
_DEVICE = "eth0"


class Plan(NamedTuple):
    """The cells and settings that `run.py` asks for."""

    cells: list[list[Any]]
    rate: str
    repeats: int  # repetitions of a cell, at most
    seconds: float  # time for the repetitions of a cell, of which there are at least 3
    store: str  # folder of compiled programs
    results: str  # file of results


class Bench:
    """This rank's part in timing."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.mesh = jax.make_mesh((jax.device_count(),), ("data",))
        self.is_first = jax.process_index() == 0
        spec = PartitionSpec("data")
        self._sum = jax.jit(
            jax.shard_map(
                lambda x: wire.psum(x, "data"), mesh=self.mesh, in_specs=spec, out_specs=spec,
                check_vma=False,
            )
        )  # fmt: skip
        self._one = jax.make_array_from_process_local_data(
            NamedSharding(self.mesh, spec), np.zeros(1, np.float32), (self.mesh.size,)
        )
        for _ in range(3):
            self.barrier()
        before = counters()
        for _ in range(10):
            self.barrier()
        self._barrier_bytes = (counters() - before) / 10

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        jax.block_until_ready(self._sum(self._one))

    def everyone(self, values: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, stacked. Equal padding lets one program serve them all."""
        padded = np.zeros(max(self.plan.repeats, _LEAST, 2), np.float32)
        padded[: len(values)] = values
        gathered = np.asarray(multihost_utils.process_allgather(padded))
        return gathered.reshape(self.mesh.size, -1)[:, : len(values)].astype(np.float64)

    def time(self, loaded: Loaded, made: Program) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of each repetition until the last rank was done, and bytes sent and received.

        The state is carried from one repetition to the next.

        Returns:
            Seconds, [repeats], and bytes of each rank in a repetition, [ranks, 2].
        """
        carried, fixed = arguments(made)

        def once() -> float:
            nonlocal carried
            self.barrier()
            start = time.perf_counter()
            carried = jax.block_until_ready(loaded.run(*carried, *fixed))
            return time.perf_counter() - start

        once()  # makes connections, and touches memory for the first time
        slowest = float(self.everyone(np.array([once()])).max())
        for _ in range(min(3, int(self.plan.seconds / slowest))):
            once()  # for the state to settle
        repeats = int(min(self.plan.repeats, max(_LEAST, self.plan.seconds / slowest)))
        before = counters()
        seconds = np.array([once() for _ in range(repeats)])
        self.barrier()  # until all have received what was sent
        moved = (counters() - before - (repeats + 1) * self._barrier_bytes) / repeats
        return self.everyone(seconds).max(axis=0), self.everyone(moved)

    def measure(self, cell: Cell, store: Store, link: Link) -> dict[str, Any]:
        """Measures a cell. Returns its row."""
        began, before = time.monotonic(), busy()
        made = program(cell, self.mesh, alone=False)
        loaded = store.load(cell, False, self.mesh)
        seconds, moved = self.time(loaded, made)
        alone = store.load(cell, True, self.mesh), program(cell, self.mesh, alone=True)
        computing, _ = self.time(*alone)
        middle = statistics.median(seconds.tolist())
        usual = usual_seconds(loaded.moved, link)
        computed = statistics.median(computing.tolist())
        predicted = usual + computed
        sent, received = moved.max(axis=0)
        # What the machine computed, less what ranks did.
        machine, own = busy() - before
        own = self.everyone(np.array([own])).sum()
        others = max(0.0, (machine - own) / (time.monotonic() - began))
        return {
            **cell._asdict(),
            "hosts": self.mesh.size,
            "rate": self.plan.rate,
            "seconds": middle,
            "computing_seconds": computed,
            "predicted_network_seconds": usual,
            "predicted_seconds": predicted,
            "measured_over_predicted": middle / predicted,
            "collectives": loaded.moved.rounds,
            "messages": planning.Moved.counted(loaded.moved).messages,
            "received_bytes": loaded.moved.received,
            "interface_sent_bytes": float(sent),
            "interface_received_bytes": float(received),
            "others_cores": others,
            "jax": jax.__version__,
            "cores": os.cpu_count(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


def counters() -> np.ndarray:
    """Bytes that this host's interface has sent and received so far."""
    with open("/proc/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == _DEVICE:
                fields = numbers.split()
                return np.array([float(fields[8]), float(fields[0])])
    return np.zeros(2)


# Share of a link's rate that some collectives reach, at worst.
_LEAST_SHARE = 0.5


def fitted(link: Link, rate: Rate) -> Link:
    """The measured link with a bandwidth that it can have.

    The rate of a shaped link is known. On a busy machine, where messages wait for a core, a fit to
    short times can miss it by far. So the bandwidth is kept between half of the rate and the rate.
    """
    if rate.payload is None:
        return link
    bandwidth = min(rate.payload, max(_LEAST_SHARE * rate.payload, link.bandwidth))
    return dataclasses.replace(link, bandwidth=bandwidth)


def usual_seconds(moved: traffic.WireBytes, link: Link) -> float:
    """Seconds of a program in which each conditional takes its cheapest branch.

    The dear branches, in which Ok-Topk takes new thresholds, are taken in one step of 32.
    """
    return link.seconds(*planning.Moved.counted(moved.usual))


def busy() -> np.ndarray:
    """Seconds that all programs of this machine, and this one, have computed outside the kernel."""
    with open("/proc/stat") as file:
        _, user, nice, *_ = file.readline().split()
    return np.array([(int(user) + int(nice)) / os.sysconf("SC_CLK_TCK"), os.times().user])


def compile_all(cells: list[Cell], store: Store, mesh: Mesh) -> None:
    """Compiles each program on one rank, as many at a time as there are cores."""
    wanted = [(cell, alone) for cell in cells for alone in (False, True)]
    wanted = [each for each in wanted if not store.path(*each).exists()]
    # All ranks must have looked before the first program appears.
    multihost_utils.sync_global_devices("looked for programs")
    compilers = min(os.cpu_count() or 1, mesh.size)
    for i, each in enumerate(wanted):
        if i % compilers == jax.process_index():
            if jax.process_index() == 0:
                print(f"compiling {i + 1} of {len(wanted)}: {each[0].system}", flush=True)
            store.compile(*each, mesh)
    multihost_utils.sync_global_devices("compiled")


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    cells = [Cell(*each) for each in plan.cells]
    jax.distributed.initialize()
    bench = Bench(plan)
    store = Store(Path(plan.store), bench.mesh.size)
    compile_all(cells, store, bench.mesh)
    # The largest sizes are such that the rate counts, and not the first burst.
    measured = planner.measure_network(bench.mesh, words=_WORDS, seconds=15.0)
    link = fitted(measured, Rate(plan.rate))
    records = Records(Path(plan.results))
    if bench.is_first:
        size = {"hosts": bench.mesh.size, "rate": plan.rate}
        records.add("networks", size | dataclasses.asdict(link))
        print(link, flush=True)
    for i, cell in enumerate(cells):
        row = bench.measure(cell, store, link)
        if bench.is_first:
            records.add("rows", row)
            print(
                f"{i + 1}/{len(cells)} {cell.what} {cell.system} {cell.params} {cell.density:g}: "
                f"{1e3 * row['seconds']:.1f} ms, predicted {1e3 * row['predicted_seconds']:.1f} "
                f"(network {1e3 * row['predicted_network_seconds']:.1f}, computing "
                f"{1e3 * row['computing_seconds']:.1f}), sent "
                f"{row['interface_sent_bytes'] / 1e3:.1f} kB, others {row['others_cores']:.2f}",
                flush=True,
            )
    bench.barrier()


if __name__ == "__main__":
    with fail_at_once():
        main()
