"""PowerSGD in NumPy: slow, in float64, one matrix at a time."""

import numpy as np


def powersgd(steps, left, right, iteration):
    """PowerSGD (Vogels et al., 2019), Algorithm 1, or the authors' later alternating form.

    Args:
        steps: gradients (W, n, m) of each step.
        left: P before the first step, (n, r), which the full form does not read.
        right: Q before the first step, (m, r).
        iteration: "full" or "alternating".

    Yields:
        The mean (n, m) and all residuals (W, n, m) of each step.
    """
    residual = np.zeros_like(steps[0])
    for number, gradients in enumerate(steps):
        a = residual + gradients
        if iteration == "full":
            left = np.linalg.qr(np.sum(a @ np.linalg.qr(right)[0], axis=0))[0]
            right = np.mean(a.transpose(0, 2, 1) @ left, axis=0)
            mean = left @ right.T
            residual = a - mean
        elif number % 2 == 0:
            basis = np.linalg.qr(left)[0]
            own = a.transpose(0, 2, 1) @ basis
            right = own.mean(0)
            mean = basis @ right.T
            residual = a - basis @ own.transpose(0, 2, 1)
        else:
            basis = np.linalg.qr(right)[0]
            own = a @ basis
            left = own.mean(0)
            mean = left @ basis.T
            residual = a - own @ basis.T
        yield mean, residual
