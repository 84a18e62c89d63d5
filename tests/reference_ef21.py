"""EF21-SGDM in NumPy, from the paper, worker by worker."""

import numpy as np


def ef21_sgdm(steps, eta, compress):
    """EF21-SGDM (Fatkhullin et al., 2023), Algorithm 1.

    Args:
        steps: gradients (W, d) of each step.
        eta: weight of a new gradient in the momentum.
        compress: function from a worker's vector (d,) to what the others receive.

    Yields:
        The estimate g, and all workers' momenta v and estimates g_w, after each step.
    """
    momenta = estimates = total = None
    for gradients in steps:
        if momenta is None:
            momenta = gradients.copy()
            estimates, total = np.zeros_like(gradients), np.zeros_like(gradients[0])
        else:
            momenta = (1 - eta) * momenta + eta * gradients
        sent = np.stack([compress(v - g) for v, g in zip(momenta, estimates)])
        estimates = estimates + sent
        total = total + sent.mean(0)
        yield total, momenta, estimates


def top_k(x, k):
    """`x` with all but its k largest magnitudes zeroed. Of equal ones, the lower indices count."""
    kept = np.argsort(-np.abs(x), kind="stable")[:k]
    return np.where(np.isin(np.arange(len(x)), kept), x, 0)
