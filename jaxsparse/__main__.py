"""The command line: it predicts, measures and watches. See python -m jaxsparse --help."""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxsparse.planner import units
from jaxsparse.planner.computing import profile_systems
from jaxsparse.planner.forecasts import plan_recipes
from jaxsparse.planner.islands import plan_islands
from jaxsparse.planner.network import Link, Network
from jaxsparse.planner.planning import plan
from jaxsparse.planner.plans import Plan, compared
from jaxsparse.planner.profiles import SystemProfile
from jaxsparse.systems import WITH_VARIANTS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    Args:
        argv: arguments. None: the process's own.

    Returns:
        The exit code: 0, or 2 if settings don't fit together.

    Raises:
        SystemExit: an argument can't be read.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxsparse", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    planning = commands.add_parser(
        "plan",
        help="predict times on a network: of exchanges by system, or of whole runs by recipe",
        description="Predicts the time of an exchange with dense all-reduce and with every system. "
        "With --steps, it predicts the hours of a run by each recipe, and says what that costs.",
    )
    planning.set_defaults(run=_plan)
    add = planning.add_argument
    add("--params", type=_read(units.count), required=True, help="number of elements: 110M, 1.5B")
    add(
        "--workers",
        type=_read(units.whole),
        help="number of workers that exchange: hosts or sites, or the devices of one host",
    )
    add(
        "--islands",
        type=_read(units.whole),
        metavar="N",
        help="instead of --workers: islands that meet in an object store (jaxsparse.islands)",
    )
    add(
        "--every", type=_read(units.whole), metavar="H", help="steps of islands in a round (chosen)"
    )
    add("--overlap", type=int, metavar="STEPS", help="steps of islands beside an exchange (chosen)")
    add("--failures", type=float, metavar="RATE", help="of an island in an hour (0)")
    add("--grace", type=_read(units.seconds), metavar="TIME", help="see jaxsparse.islands (chosen)")
    add("--poll", type=_read(units.seconds), metavar="TIME", help="see jaxsparse.islands (200ms)")
    add(
        "--decided-after",
        type=_read(units.seconds),
        metavar="TIME",
        help="from an island's message to the decision, in the mean (all are equally fast)",
    )
    add("--snapshots", type=_read(units.whole), metavar="ROUNDS", help="from one to the next (10)")
    add(
        "--bandwidth",
        type=_read(lambda text: (text, units.bytes_per_second(text))),
        nargs="+",
        help="bandwidth of a worker: 10Gbit, 1.25GB/s; several make a table, or a plan each with "
        "--steps; NVLink of a host: 450GB/s",
    )
    add("--latency", type=_read(_latency), help="latency of a message (50us)")
    add("--network", metavar="FILE", help="a measured Network, instead of these two")
    add("--density", type=_read(units.share), help="share of the elements delivered (0.01)")
    add("--step", type=_read(units.seconds), help="time of a step without its exchange: 120ms")
    add(
        "--local-steps",
        type=_read(units.whole),
        metavar="H",
        help="steps from one exchange of displacements to the next; 1 exchanges gradients (1; with "
        "--steps, all that were measured)",
    )
    add(
        "--steps",
        type=_read(units.count),
        metavar="N",
        help="of the whole run: print recipes, or a run of islands, with hours and measured losses",
    )
    add("--nats", type=float, help="of held-out loss that a recipe may cost at most (0.1)")
    add("--optimizer", help="of recipes: adamw or muon (adamw)")
    add("--dtype", help="in which gradients travel now: float32 or bfloat16 (float32)")
    add(
        "--profile",
        metavar="FILE",
        help="of the device, made by the profile command; or h100 or cpu (two cores)",
    )
    add(
        "--memory-bandwidth",
        type=_read(units.bytes_per_second),
        help="memory bandwidth of the device: 2TB/s",
    )
    _add_systems(add)
    add("--json", action="store_true", help="print JSON instead of a table")

    profiling = commands.add_parser(
        "profile",
        help="measure computing times on this machine, for plan --profile",
        description="Times the computations of one worker in an exchange. It takes some minutes on "
        "a CPU.",
    )
    profiling.set_defaults(run=_profile)
    add = profiling.add_argument
    add(
        "--out",
        metavar="FILE",
        required=True,
        help="the JSON file to write; with --systems, it keeps its other ones",
    )
    sizes = [2**18, 2**22]
    add("--sizes", type=_read(units.count), nargs="+", default=sizes, help="numbers of elements")
    whole, share = _read(units.whole), _read(units.share)
    add("--workers", type=whole, nargs="+", default=[4, 16, 64], help="numbers of workers")
    add("--density", type=share, nargs="+", default=[0.001, 0.01], help="shares delivered")
    add("--repeats", type=whole, default=9, help="number of timed steps (9)")
    _add_systems(add)

    watching = commands.add_parser(
        "islands",
        help="show who takes part in a run of islands, from its store",
        description="Shows the last rounds of a run of islands: whose messages counted, who was "
        "late, and who has posted in the open round. It reads the store alone.",
    )
    watching.set_defaults(run=_islands)
    add = watching.add_argument
    add("url", help="the run's folder, or s3://bucket/run, gs://bucket/run, az://container/run")
    add("--rounds", type=_read(units.whole), default=20, help="number of rounds to show (20)")
    add(
        "--every",
        type=_read(units.seconds),
        metavar="TIME",
        help="look again after this time, until interrupted: 5s",
    )
    return parser


def _islands(args: argparse.Namespace) -> None:
    from jaxsparse.islands import Store, watch

    if "://" not in args.url and not Path(args.url).is_dir():  # a store would make it
        raise ValueError(f"{args.url!r} is no folder: give that of a run, or a URL")
    watch.show(Store(args.url), args.rounds, args.every)


def _add_systems(add: Callable[..., Any]) -> None:
    add("--systems", nargs="+", metavar="NAME", help=f"systems: {', '.join(WITH_VARIANTS)}")


def _latency(text: str) -> float:
    if not (seconds := units.seconds(text)):
        raise ValueError(f"{text!r} is no latency: write 50us, and 1ns for almost none")
    return seconds


def _read(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _plan(args: argparse.Namespace) -> None:
    if (args.workers is None) == (args.islands is None):
        raise ValueError("give either --workers or --islands")
    if args.islands is not None:
        _plan_islands(args)
        return
    _refuse(args, _OF_ISLANDS, "--islands")
    if args.workers == 1:
        raise ValueError("--workers 1 exchanges nothing: leave your trainer as it is")
    if (args.network is None) == (args.bandwidth is None):
        raise ValueError("give either --bandwidth (10Gbit) or --network FILE")
    if args.network is not None and args.latency is not None:
        raise ValueError(
            "--latency has no effect on --network FILE, which has its own: leave it out"
        )
    if args.network is not None:
        networks: dict[str, Any] = {args.network: _loaded(Network, "--network", args.network)}
    else:
        latency = 50e-6 if args.latency is None else args.latency
        networks = {text: Link(latency, bandwidth) for text, bandwidth in args.bandwidth}
    if args.profile is None and args.memory_bandwidth is None:
        raise ValueError(
            "exchanges compute, too: give the device's --profile (h100, cpu, or a FILE that python "
            "-m jaxsparse profile wrote), or its --memory-bandwidth"
        )
    is_file = args.profile is not None and args.profile not in SystemProfile.shipped_devices
    profile = _loaded(SystemProfile, "--profile", args.profile) if is_file else args.profile
    if args.steps is not None:
        _plan_recipes(args, networks, profile)
        return
    _refuse(args, _OF_RECIPES, "--steps N")
    try:
        with _uncollected():
            plans = _plans(args, networks, profile)
    finally:
        _tell("")
    if args.json:
        content = [_as_dict(found) for found in plans.values()]
        print(json.dumps(content[0] if len(content) == 1 else content, indent=1))
    elif len(plans) == 1:
        print(*plans.values())
    else:
        print(compared(plans))


# Flags of `plan` that only some of its tables have.
_OF_ISLANDS = ("every", "overlap", "failures", "grace", "poll", "decided_after", "snapshots")
_OF_RECIPES = ("nats", "optimizer", "dtype")
_OF_BOTH = ("steps", "optimizer", "nats")  # recipes and islands
_OF_SYSTEMS = ("density", "systems")
_OF_WORKERS = (
    "network",
    "local_steps",
    "profile",
    "memory_bandwidth",
    *(name for name in _OF_RECIPES if name not in _OF_BOTH),
    *_OF_SYSTEMS,
)


def _refuse(args: argparse.Namespace, names: Sequence[str], other: str) -> None:
    """Raises ValueError if a flag is given that has no effect."""
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} is for {other}: leave it out")


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _plan_recipes(args: argparse.Namespace, networks: dict[str, Any], profile: Any) -> None:
    _refuse(args, _OF_SYSTEMS, "plans without --steps")
    if not args.step:
        raise ValueError("--steps needs --step (1.5s), the time of a step without its exchange")
    plans = {}
    try:
        with _uncollected():
            for text, network in networks.items():
                plans[text] = plan_recipes(
                    args.params,
                    args.workers,
                    network=network,
                    step_seconds=args.step,
                    steps=args.steps,
                    profile=profile,
                    memory_bandwidth=args.memory_bandwidth,
                    on_recipe=_tell,
                    **_given(args, ("local_steps", *_OF_RECIPES)),
                )
    finally:
        _tell("")
    if args.json:
        content = [found.as_dict() for found in plans.values()]
        print(json.dumps(content[0] if len(content) == 1 else content, indent=1))
        return
    print("\n\n".join(map(str, plans.values())))


def _plan_islands(args: argparse.Namespace) -> None:
    _refuse(args, _OF_WORKERS, "--workers")
    if args.bandwidth is None or not args.step:
        raise ValueError("--islands needs --bandwidth (100Mbit) and --step (1s)")
    latency = 20e-3 if args.latency is None else args.latency
    plans = {
        text: plan_islands(
            args.params,
            args.islands,
            link=Link(latency, bandwidth),
            step_seconds=args.step,
            **_given(args, (*_OF_ISLANDS, *_OF_BOTH)),
        )
        for text, bandwidth in args.bandwidth
    }
    if args.json:
        content = [dataclasses.asdict(found) for found in plans.values()]
        for one, found in zip(content, plans.values()):
            one["rounds"] = [
                {**each.as_dict(), "hours": found.hours(each)} for each in found.rounds
            ]
        print(json.dumps(content[0] if len(content) == 1 else content, indent=1))
        return
    for text, found in plans.items():
        print(f"{text}, latency {latency:g} s: {found}", end="\n\n" if len(plans) > 1 else "\n")


def _plans(args: argparse.Namespace, networks: dict[str, Any], profile: Any) -> dict[str, Plan]:
    return {
        text: plan(
            args.params,
            args.workers,
            network=network,
            profile=profile,
            memory_bandwidth=args.memory_bandwidth,
            step_seconds=args.step or 0.0,
            systems=args.systems,
            on_system=_tell,
            **_given(args, ("density", "local_steps")),
        )
        for text, network in networks.items()
    }


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Tracing makes many objects that live on, and the garbage collector looks at all of them.

    Without it, a plan takes a fifth less time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tell(name: str) -> None:
    """Shows on a terminal what is predicted. Nothing: clears the line."""
    if sys.stderr.isatty():
        text = f"predicting {name} ..." if name else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _loaded(kind: Any, flag: str, path: str) -> Any:
    try:
        return kind.load(path)
    except OSError as error:
        raise ValueError(
            f"{flag} {path!r} can't be read ({error.strerror}): give a file made by {kind.how}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _as_dict(found: Plan) -> dict[str, Any]:
    content = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    rows = [
        {
            **prediction._asdict(),
            "exchange": prediction.exchange,
            "step": found.step(prediction.system),
            "delayed_step": found.delayed_step(prediction.system),
            "speedup": found.speedup(prediction.system),
        }
        for prediction in found.predictions
    ]
    return {
        **content,
        "predictions": rows,
        "left_out": dict(found.left_out),
        "units": "bytes, seconds",
    }


def _profile(args: argparse.Namespace) -> None:
    path = Path(args.out)
    # Measuring takes minutes, so find out before.
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--out {args.out!r} can't be written: name a file in a writable folder")
    is_kept = args.systems and path.exists()
    older = _loaded(SystemProfile, "--out", args.out) if is_kept else None
    found = profile_systems(
        args.systems,
        sizes=args.sizes,
        workers=args.workers,
        density=args.density,
        repeats=args.repeats,
        progress=lambda line: print(line, flush=True),
    )
    (older.updated(found) if older else found).save(args.out)


if __name__ == "__main__":
    sys.exit(main())
