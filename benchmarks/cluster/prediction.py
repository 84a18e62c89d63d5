"""Predictions of the alpha-beta model for compiled programs on the emulated links."""

import dataclasses

from namespaces import Rate

from jaxsparse import planner, traffic

# Share of a link's rate that some collectives reach, at worst.
_LEAST_SHARE = 0.5


def fitted(link: planner.Link, rate: Rate) -> planner.Link:
    """The measured link with a bandwidth that it can have.

    The rate of a shaped link is known. On a busy machine, where messages wait for a core, a fit to
    short times can miss it by far. So the bandwidth is kept between half of the rate and the rate.
    """
    if rate.payload is None:
        return link
    bandwidth = min(rate.payload, max(_LEAST_SHARE * rate.payload, link.bandwidth))
    return dataclasses.replace(link, bandwidth=bandwidth)


def usual_seconds(moved: traffic.WireBytes, link: planner.Link) -> float:
    """Seconds of a program in which each conditional takes its cheapest branch.

    The dear branches, in which Ok-Topk takes new thresholds, are taken in one step of 32.
    """
    return link.seconds(*planner.Moved.counted(moved.usual))
