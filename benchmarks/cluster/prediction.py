"""Predictions of the alpha-beta model for compiled programs on the emulated links."""

import dataclasses
import statistics
from typing import Any

from namespaces import Rate

from jaxsparse import planner, traffic

_OPS = ("all_reduce", "all_gather", "all_to_all", "collective_permute", "reduce_scatter")
# Share of a link's rate that some collectives reach, at worst.
_LEAST_SHARE = 0.5


def fitted(network: planner.Network, rate: Rate) -> planner.Network:
    """The measured network with bandwidths that its links can have.

    The rate of a shaped link is known. On a busy machine, where messages wait for a core, a fit to
    short times can miss it by far. Bandwidths are therefore kept between half of the rate and the
    rate. Each latency is the median of the rest of the times.

    Args:
        network: network as measured, with its timings.
        rate: rate of its links.
    """
    if rate.payload is None:
        return network
    links: dict[str, Any] = {}
    for name in _OPS:
        op = name.replace("_", "-")
        bandwidth = min(rate.payload, max(_LEAST_SHARE * rate.payload, network.of(op).bandwidth))
        waits = [
            (timing.seconds - timing.received / bandwidth) / planner.rounds(op, timing.workers)
            for timing in network.timings
            if timing.op == op
        ]
        if waits:
            links[name] = planner.Link(max(1e-6, statistics.median(waits)), bandwidth)
    return dataclasses.replace(network, link=links["collective_permute"], **links)


def usual_seconds(moved: traffic.WireBytes, network: planner.Network) -> float:
    """Seconds of a program in which each conditional takes its cheapest branch.

    The dear branches, in which Ok-Topk takes new thresholds, are taken in one step of 32.
    """
    return network.seconds(moved.usual)
