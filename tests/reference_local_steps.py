"""Local steps in NumPy, worker by worker: DiLoCo (2311.08105), Streaming DiLoCo (2501.18512)."""

import numpy as np


def nesterov(rate, momentum):
    """m <- mu m + D and theta <- theta - rate (D + mu m), for one fragment at a time."""
    memory = {}

    def step(fragment, theta, mean):
        memory[fragment] = momentum * memory.get(fragment, 0) + mean
        return theta - rate * (mean + momentum * memory[fragment])

    return step


def heavy_ball(rate, momentum):
    """m <- mu m + D and theta <- theta - rate m."""
    memory = {}

    def step(fragment, theta, mean):
        memory[fragment] = momentum * memory.get(fragment, 0) + mean
        return theta - rate * memory[fragment]

    return step


def due(steps, every, fragments=1):
    """The fragment whose turn it is after so many steps, or None."""
    turns = {p * every // fragments: p for p in range(fragments)}
    return turns.get(steps % every) if steps else None


def train(
    start, moves, outer, every, exchange=None, fragments=None, overlap=0, mixing=0.0, weights=None
):
    """The global parameters, and the workers' own, after each step, and once more at the end.

    Args:
        start: the initial parameters, float64[d].
        moves: what worker w's step t takes off its parameters, moves[t, w, d].
        outer: the outer optimizer, see `nesterov`.
        every: number of steps between outer steps, H, or a list of it for each step and the end.
        exchange: function of a fragment and its displacements [w, n] that returns their mean as it
            arrives. None: the mean.
        fragments: indices of each fragment's parameters. None: one fragment of all.
        overlap: number of steps from an exchange to its use, or a list as `every`.
        mixing: weight of a worker's own values.
        weights: what worker w's step t counts, weights[t, w]. None: all count alike.

    An exchange that finds a worker's values not finite counts for nothing, and that worker goes
    back to the global ones. At the end, exchanges arrive, and fragments that have moved since their
    last one are exchanged, twice if the first time does not count.
    """
    exchange = exchange or (lambda _, displacements: displacements.mean(0))
    fragments = [np.arange(len(start))] if fragments is None else fragments
    theta, own = start.astype(np.float64), np.stack([start.astype(np.float64)] * moves.shape[1])
    of_steps = lambda x: x if isinstance(x, list) else [x] * (len(moves) + 1)
    every, overlap = of_steps(every), of_steps(overlap)
    arrived, arrives = [True] * len(fragments), [0] * len(fragments)
    since = np.zeros((len(fragments), moves.shape[1]))  # what was done since the last exchange
    globals_, locals_ = [], []

    def try_to_exchange(p):
        """Fragment p after an exchange, and which workers are broken. If one is, p stays."""
        part, broken = fragments[p], ~np.isfinite(own).all(1)
        arrived[p] = not broken.any()
        since[:, broken] = 0
        if not arrived[p]:
            return theta[part], broken
        moved = theta[part] - own[:, part]
        if weights is not None:
            moved *= since[p][:, None] / (since[p].mean() or 1)
        since[p] = 0
        return outer(p, theta[part], exchange(p, moved)), broken

    def mix(parts):
        for p in parts:
            arrives[p] = 0
            if arrived[p]:
                part = fragments[p]
                to = theta[part]
                own[:, part] = own[:, part] + (1 - mixing) * (to - own[:, part]) if mixing else to

    for t, move in enumerate(moves):
        begins = due(t, every[t], len(fragments)) if overlap[t] else None
        if begins is not None and arrives[begins] > t:
            mix([begins])
        after, dropped = own - move, False
        if begins is not None:
            arriving, dropped = try_to_exchange(begins)
            after[dropped] = theta
            theta[fragments[begins]] = arriving
            arrives[begins] = t + overlap[t]
        own = after
        since += 0 if weights is None else np.where(dropped, 0, weights[t])
        mix([p for p, at in enumerate(arrives) if at == t + 1])
        done = None
        if not overlap[t] and (p := due(t + 1, every[t], len(fragments))) is not None:
            done = p
            if arrives[p] > t + 1:
                mix([p])
            theta[fragments[p]], broken = try_to_exchange(p)
            own[broken] = theta
            mix([p])
        globals_.append(theta.copy())
        locals_.append(own.copy())
    mix([p for p, at in enumerate(arrives) if at > len(moves)])
    for p, part in enumerate(fragments):
        for _ in range(2):
            if (own[:, part] != theta[part]).any() and (p != done or not arrived[p]):
                theta[part], broken = try_to_exchange(p)
                own[broken] = theta
            if arrived[p]:
                own[:, part] = theta[part]
    return np.stack([*globals_, theta]), np.stack([*locals_, own])
