"""Shared by the examples: scikit-learn's embedded digits, and devices that act as workers."""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn import datasets
from sklearn.model_selection import train_test_split


class Digits(NamedTuple):
    images: np.ndarray  # float32[n, 64], in [0, 1]
    labels: np.ndarray  # int32[n]


def load() -> tuple[Digits, Digits]:
    """Loads 1437 images to train on and 360 to test on. They are the same for every seed."""
    images, labels = datasets.load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return (
        Digits(train_images.astype(np.float32), train_labels.astype(np.int32)),
        Digits(test_images.astype(np.float32), test_labels.astype(np.int32)),
    )


def batches(data: Digits, size: int, steps: int, seed: int) -> Iterator[Digits]:
    """Random batches for all workers together."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.integers(len(data.labels), size=size)
        yield Digits(data.images[chosen], data.labels[chosen])


def shared_batch(size: int, workers: int) -> int:
    """`size`, rounded up to a multiple of `workers`, so that they can share it equally."""
    return -(-size // workers) * workers


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a script's docstring, as it stands."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_training_flags(
    parser: argparse.ArgumentParser, *, steps: int, lr: float, hidden: int
) -> None:
    """Flags of the examples that train on digits, with their own defaults."""
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=number(int, 1), default=steps, help=f"(default: {steps})")
    add("--batch-size", type=number(int, 1), default=256, metavar="IMAGES", help="of all workers "
        "together, rounded up to what they can share (default: 256)")  # fmt: skip
    add("--lr", type=number(float, 0), default=lr, help=f"first learning rate (default: {lr})")
    add("--hidden", type=number(int, 8), default=hidden, help=f"units (default: {hidden})")
    add("--seed", type=number(int, 0), default=0, help="(default: 0)")


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workers")
    group.add_argument("--platform", choices=["cpu", "gpu", "tpu"], default="cpu", help="cpu "
        "emulates the devices; gpu and tpu use those of this machine (default: cpu)")  # fmt: skip
    add = group.add_mutually_exclusive_group().add_argument
    add("--devices", type=number(int, 2), metavar="N", help="workers, one on each device "
        "(default: 8 on cpu, all there are elsewhere)")  # fmt: skip
    add("--simulate", type=number(int, 2), metavar="W", help="simulate W workers on one device, by "
        "jax.vmap instead of a mesh")  # fmt: skip


class Workers(NamedTuple):
    simulated: int | None  # for `workers=` of jaxsparse; None: they are on the mesh
    mesh: Mesh  # as many devices; those of simulated workers only count bytes

    @property
    def where(self) -> Mesh | int:
        """For `jaxsparse.shard` and `jaxsparse.LocalSteps`."""
        return self.simulated or self.mesh


def find_workers(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Workers:
    """The workers that the flags ask for. Call it before anything else touches JAX's devices."""
    emulated = args.simulate or args.devices or 8
    if args.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if args.platform == "cpu" or args.simulate:
        jax.config.update("jax_num_cpu_devices", emulated)
    try:
        devices = jax.devices(args.platform)
    except RuntimeError as error:
        parser.error(f"--platform {args.platform}: {error}. Use --platform cpu to emulate devices")
    if args.simulate:
        # A simulation on one device sends nothing. Its bytes are read from a program that is
        # compiled for as many emulated devices and never run.
        mesh = jax.make_mesh((args.simulate,), ("data",), devices=jax.devices("cpu"))
        return Workers(args.simulate, mesh)
    wanted = args.devices or len(devices)
    if not 2 <= wanted <= len(devices):
        parser.error(
            f"--devices {wanted}: at least 2 are needed and this machine has {len(devices)} of "
            f"platform {args.platform}. Use --simulate W to run W workers on one device, or "
            "--platform cpu to emulate devices"
        )
    return Workers(None, jax.make_mesh((wanted,), ("data",), devices=devices[:wanted]))


def number(kind: type, low: float, below: float = math.inf) -> Callable[[str], Any]:
    """An argparse type: an int or a float in [low, below)."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value < below:
            limit = "" if below == math.inf else f" and less than {below}"
            raise argparse.ArgumentTypeError(f"{value} is out of range: give at least {low}{limit}")
        return value

    parse.__name__ = kind.__name__  # argparse names the type if the text is no number
    return parse


# --- a perceptron, whose kernels may be sharded within a host

Params = list[dict[str, jax.Array]]


def init_params(hidden: int, seed: int, mesh: Mesh | None = None) -> Params:
    """Initial parameters. On a mesh kernels are sharded over "local", and small biases whole."""
    rng = np.random.default_rng(seed)

    def put(values: np.ndarray, *axes: str) -> jax.Array:
        placed = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
        return jax.device_put(values.astype(np.float32), placed)

    return [
        {
            "kernel": put(rng.normal(size=(n, m)) * (2 / n) ** 0.5, "local"),
            "bias": put(np.zeros(m)),
        }
        for n, m in itertools.pairwise((64, hidden, hidden, 10))
    ]


def logits_of(params: Params, images: Any) -> jax.Array:
    """Scores of the ten digits: float[n, 64] to float[n, 10]."""
    for each in params[:-1]:
        images = jax.nn.relu(images @ each["kernel"] + each["bias"])
    return images @ params[-1]["kernel"] + params[-1]["bias"]


def loss_of(params: Params, batch: Digits) -> jax.Array:
    logits = logits_of(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()


def bytes_held(tree: Any) -> int:
    """Bytes of `tree` on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
