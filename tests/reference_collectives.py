"""The results of the sparse collectives in NumPy, from the papers, worker by worker."""

import math

import numpy as np


def largest(x, k):
    """Indices of the k largest magnitudes. Of equal ones the lower index comes first."""
    return np.argsort(-np.abs(x), kind="stable")[:k]


def cut(x, k):
    """`x` with all but its k largest entries zeroed."""
    kept = np.zeros_like(x)
    indices = largest(x, k)
    kept[indices] = x[indices]
    return kept


def spar_reduce_scatter(blocks, k):
    """The reduce-scatter of SparDL's figure 5 among the n workers of one team.

    Args:
        blocks: worker w's part of block b, blocks[w][b].
        k: number of entries of a block that may be sent.

    Returns:
        Each worker's own block, cut to k entries, and discards[w][b]: what w cut off block b.
    """
    n = len(blocks)
    held = [{b: np.array(blocks[w][b]) for b in range(n)} for w in range(n)]
    discards = [[np.zeros_like(blocks[w][b]) for b in range(n)] for w in range(n)]
    steps = math.ceil(math.log2(n)) if n > 1 else 0
    for i in range(1, steps + 1):
        distance = 2 ** (steps - i)
        bags = []
        for w in range(n):
            bag = {}
            for relative in range(distance, min(2 * distance, n)):
                b = (w + relative) % n
                block = held[w].pop(b)
                bag[b] = cut(block, k)
                discards[w][b] += block - bag[b]
            bags.append(bag)
        for w in range(n):
            for b, block in bags[w].items():
                held[(w + distance) % n][b] += block
    own = []
    for w in range(n):
        (b,) = held[w]
        assert b == w
        own.append(cut(held[w][b], k))
        discards[w][b] += held[w][b] - own[w]
    return own, discards


def spardl(x, density, teams=1, gather="recursive", h=None):
    """Delivered sum and residuals with global residual collection (Alg. 1).

    Args:
        x: the workers' vectors, float64 (W, d).
        density: density of the delivered sum.
        teams: number of teams, a divisor of W.
        gather: "recursive" or "bruck".
        h: number of entries that a worker sends with "bruck".

    Returns:
        The total (d,), the residuals (W, d), and the number of entries after B-SAG for each rank.
    """
    workers, d = x.shape
    n = workers // teams
    size = -(-d // n)
    k = min(size, math.ceil(density * d / n - 1e-9))
    padded = np.zeros((workers, n * size))
    padded[:, :d] = x
    blocks = padded.reshape(workers, n, size)
    own, discards = [], []
    for team in range(teams):
        some, lost = spar_reduce_scatter(blocks[team * n : (team + 1) * n], k)
        own += some
        discards += lost
    entries = []
    for rank in range(n):
        members = [team * n + rank for team in range(teams)]
        if gather == "recursive":
            distance = 1
            while distance < teams:
                sums = [own[w] + own[members[i ^ distance]] for i, w in enumerate(members)]
                for w, total in zip(members, sums):
                    own[w] = cut(total, k)
                    discards[w][rank] += (total - own[w]) / (2 * distance)
                distance *= 2
        elif teams > 1:
            total = np.zeros(size)
            for w in members:
                sent = cut(own[w], h)
                discards[w][rank] += own[w] - sent
                total += sent
            entries.append(np.count_nonzero(total))
            for w in members:
                own[w] = cut(total, k)
                discards[w][rank] += (total - own[w]) / teams
    total = np.concatenate(own[:n])[:d]
    collected = np.stack([np.concatenate(discards[w])[:d] for w in range(workers)])
    return total, np.where(total != 0, collected, x), entries


def gtopk(x, k):
    """gTop-k in which the workers that hold a sum share its discards (SparDL's rule for R-SAG).

    Args:
        x: the workers' vectors, float64 (W, d).
        k: number of entries that are kept of each sum.

    Returns:
        The total (d,) and the residuals (W, d).
    """
    workers = len(x)
    power = 2 ** int(math.log2(workers))
    held = [cut(row, k) for row in x]
    discards = x - np.stack(held)
    for w in range(power, workers):
        total = held[w - power] + held[w]
        held[w - power] = cut(total, k)
        discards[w - power] += total - held[w - power]
    distance = 1
    while distance < power:
        sums = [held[w] + held[w ^ distance] for w in range(power)]
        for w, total in enumerate(sums):
            held[w] = cut(total, k)
            discards[w] += (total - held[w]) / (2 * distance)
        distance *= 2
    return held[0], np.where(held[0] != 0, discards, x)


def ok_topk(x, k, threshold=None):
    """Ok-Topk with room for everything. Without a threshold it takes one from the sums.

    Returns:
        The total (d,), the residuals (W, d), and the threshold for the next step. It is None if too
        few sums reached it.
    """
    offered = np.stack([cut(row, k) for row in x])
    sums = offered.sum(0)
    if threshold is None:
        threshold = np.sort(np.abs(sums))[-k]
    total = np.where(np.abs(sums) >= threshold, sums, 0)
    residuals = np.where((offered != 0) & (total != 0), 0, x)
    return total, residuals, None if 2 * np.count_nonzero(total) < k else threshold
