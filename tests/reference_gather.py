"""A NumPy twin of gathering in few bits, written from ZeRO++ (arXiv 2306.10209, section 3)."""

import numpy as np


def shards_of(whole, axis, workers):
    """Each worker's part of a leaf that is cut along `axis`."""
    return np.split(whole, workers, axis)


def gathered(whole, axis, workers, rule):
    """The leaf as all workers see it: each worker rounds its own shard, read along its rows."""
    parts = [rule(x.ravel()).reshape(x.shape) for x in shards_of(whole, axis, workers)]
    return np.concatenate(parts, axis)


def averaged(gradients, axis, rule):
    """Each worker's shard of the mean of gradients[W, ...], and residuals[W, ...].

    A worker rounds the part of each other worker, and sends it to it. Its own does not travel.
    """
    workers = len(gradients)
    parts = np.array([shards_of(x, axis, workers) for x in gradients])  # [sender, owner, ...]
    sent = np.array(parts, np.float64)
    for sender in range(workers):
        for owner in range(workers):
            if sender != owner:
                part = parts[sender, owner]
                sent[sender, owner] = rule(part.ravel()).reshape(part.shape)
    residuals = [np.concatenate(list(lost), axis) for lost in parts - sent]
    return list(sent.mean(axis=0)), np.array(residuals)
