"""Which system is fastest for a model on a network, or whether dense is: predicted, not run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxsparse import layout as layouts, network as networks
from jaxsparse.cost.codecs import CodecProfile
from jaxsparse.cost.leaf_groups import Group, LeafGroups
from jaxsparse.cost.plans import BY_GROUP, Plan
from jaxsparse.cost.predicting import Model, Predictor
from jaxsparse.reducers.density import check_density
from jaxsparse.settings import static_float, static_int
from jaxsparse.systems import WITH_VARIANTS


def plan(
    params: Any,
    workers: int,
    *,
    network: networks.Network | networks.Link,
    density: float = 0.01,
    codecs: CodecProfile | None = None,
    memory_bandwidth: float | None = None,
    step_seconds: float = 0.0,
    groups: Mapping[str, Group | None] | None = None,
    is_dense: layouts.IsDense | None = None,
    systems: Sequence[str] | None = None,
) -> Plan:
    """Predicts what a step's exchange takes with dense all-reduce and with every system.

    Network times are those of the alpha-beta model for the collectives of the traced program, dense
    leaves and the flag of finite gradients included; times of computing are interpolated in
    measured ones, which of `sparcml` are those of the algorithm that suits a `Link()`, whatever the
    network. What is compressed travels as one vector, or from 2**31 elements on, which int32 can't
    index, in buckets of 2**30 at most. Steps are usual ones: what Ok-Topk does in one of 32 is left
    out. Nothing is said of contention, of stragglers, or of accuracy.

    Args:
        params: a tree of arrays or `jax.ShapeDtypeStruct`s like the gradients, or the number of
            elements of one matrix.
        workers: W.
        network: measured (`jaxsparse.cost.measure_network`, `Network.load`), or a `Link` of
            latency in seconds and bandwidth in bytes a second.
        density: share of the compressed elements that a step delivers, in (0, 1]; see
            `jaxsparse.systems.choose` for what each system makes of it.
        codecs: times of computing on the device; None for those of the CPU that
            `CodecProfile.shipped` has.
        memory_bandwidth: bytes a second: `codecs` are scaled to it, as if all were passes over
            memory. So a GPU's times are extrapolated from a CPU's, roughly.
        step_seconds: of forward and backward pass, which are the same whatever the system.
        groups: from regular expressions on key paths, of which the first one found counts, to
            groups of leaves that may travel in a way of their own; None for dense. All leaves that
            none is found in are a group, too.
        is_dense: given a leaf's key path and shape, whether it travels dense in any case. By
            default vectors, scalars and anything below 1024 elements do.
        systems: names to predict, keys of `jaxsparse.systems.WITH_VARIANTS`, and thereby to choose
            from; dense is always among them. None for all, of which those with a caveat are not
            chosen.

    Returns:
        The predictions and the choices, which print as a table.

    Raises:
        ValueError: settings out of range, an unknown system, an expression that no leaf is left
            for, or see `jaxsparse.layout.plan`.

    Example:
        >>> from jaxsparse.network import Link
        >>> slow = plan(10**7, 8, network=Link(50e-6, 12.5e6), systems=["spardl"])
        >>> slow.best, slow.transformation
        ('spardl', 'jaxsparse.spardl(0.01)')
        >>> fast = plan(10**7, 8, network=Link(1e-6, 1e12), systems=["spardl"])
        >>> fast.best
        'dense'
    """
    names = _names(systems)
    workers = static_int("workers", workers)
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    step_seconds = static_float("step_seconds", step_seconds)
    if not 0 <= step_seconds < math.inf:
        raise ValueError(f"step_seconds={step_seconds} must be finite and at least 0")
    check_density(density)
    model = Model(_network(network), workers, _codecs(codecs, memory_bandwidth))
    planner = Predictor(model, LeafGroups.of(params, groups, is_dense), density)

    conditions = [_written(model.network), f"computing: {model.codecs}"]
    if codecs is None:
        conditions.append(
            "  which is another device than yours: measure that by python -m jaxsparse profile"
            + (", or give its memory bandwidth" if memory_bandwidth is None else "")
        )
    if "sparcml" in names and model.network.link != networks.Link():
        conditions.append(
            f"  sparcml's is that of its algorithm for {_link_written(networks.Link())}: on this "
            "network it may choose another"
        )
    by_dense = planner.dense()
    found, left_out = [by_dense], []
    for name in names:
        try:
            found.append(
                planner.one(name, "" if systems is not None else WITH_VARIANTS[name].caveat)
            )
        except ValueError as error:
            left_out.append((name, str(error)))
    choices = None
    if groups:
        try:
            choices, together = planner.by_group(names, is_asked_for=systems is not None)
        except ValueError as error:
            left_out.append((BY_GROUP, str(error)))
        else:
            found.append(together)
    # Sorting is stable: nothing that is not faster comes before dense.
    found.sort(key=lambda prediction: prediction.exchange)
    best = next(prediction for prediction in found if not prediction.caveat)
    if choices is None:
        choices = planner.as_whole(best, by_dense)
    return Plan(
        predictions=tuple(found),
        groups=choices,
        best=best.system,
        left_out=tuple(left_out),
        elements=planner.compressed + planner.dense_size,
        dense_elements=planner.dense_size,
        workers=workers,
        density=density,
        step_seconds=step_seconds,
        conditions=tuple(conditions),
    )


def _names(systems: Sequence[str] | None) -> list[str]:
    """Without dense, which is always predicted."""
    names = list(WITH_VARIANTS) if systems is None else list(dict.fromkeys(systems))
    for name in names:
        if name not in WITH_VARIANTS:
            raise ValueError(
                f"systems has {name!r}, which is unknown: use {', '.join(WITH_VARIANTS)}"
            )
    return [name for name in names if name != "dense"]


def _network(given: Any) -> networks.Network:
    if isinstance(given, networks.Link):
        return networks.Network(given)
    if not isinstance(given, networks.Network):
        raise ValueError(
            f"network={given!r} must be a Network (jaxsparse.cost.measure_network, Network.load) "
            "or a Link(latency=..., bandwidth=...) in seconds and bytes a second"
        )
    return given


def _codecs(given: CodecProfile | None, memory_bandwidth: float | None) -> CodecProfile:
    codecs = CodecProfile.shipped() if given is None else given
    if not isinstance(codecs, CodecProfile):
        raise ValueError(
            f"codecs={given!r} must be a CodecProfile: measure one by "
            "jaxsparse.cost.profile_codecs(), or CodecProfile.load a saved one"
        )
    return codecs if memory_bandwidth is None else codecs.scaled(memory_bandwidth)


def _written(network: networks.Network) -> str:
    text = f"network: {_link_written(network.link)}"
    return text if network.device == "unknown" else f"{text}; measured: {network.device}"


def _link_written(link: networks.Link) -> str:
    return f"latency {1e6 * link.latency:g} us, {8e-9 * link.bandwidth:g} Gbit/s"
