"""Slow, plain NumPy twins, written from the papers."""

import numpy as np


def alg3_with_exact_selection(gradients, momentum, k):
    """Sketched-SGD, Alg. 3, with the sketch replaced by an oracle that finds the true top k.

    Takes one array (W, d) of gradients for each step. After each step it yields (update, u, v),
    where the update is a mean.
    """
    u = np.zeros_like(gradients[0])
    v = np.zeros_like(gradients[0])
    for g in gradients:
        u = momentum * u + g
        v = v + u
        total = v.sum(0)
        update = np.zeros_like(total)
        top = np.argsort(-np.abs(total), kind="stable")[:k]
        update[top] = total[top] / len(g)
        u = np.where(update != 0, 0, u)
        v = np.where(update != 0, 0, v)
        yield update, u, v
