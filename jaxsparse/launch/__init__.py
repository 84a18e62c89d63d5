"""Starts the processes of a multi-process run on this machine, and ends all when one fails.

    python -m jaxsparse.launch -n 4 -- python examples/multihost/train.py

For tests, demonstrations and emulated clusters; across machines use Slurm, mpirun or Kubernetes.
`jax.distributed.initialize()` needs no arguments in a process started here: besides
`JAX_COORDINATOR_ADDRESS`, which JAX reads, the variables of Open MPI tell it how many processes
there are and which one it is (`OMPI_COMM_WORLD_SIZE`, `OMPI_COMM_WORLD_RANK`), because Open MPI's
are the only ones that JAX reads from the environment alone and prefers to those of a surrounding
Slurm job. A program that starts MPI itself therefore needs mpirun instead.

A process that raises would, in JAX's orderly exit, wait minutes for the others, which wait for its
part of a collective: `fail_at_once` ends it, here and under any other launcher.

CPU devices are emulated by `JAX_NUM_CPU_DEVICES`, which JAX prefers to what XLA_FLAGS say; on GPUs
rank r sees devices r n to r n + n - 1 (`JAX_LOCAL_DEVICE_IDS`) for n devices a process.
"""

from jaxsparse.launch.leaving import fail_at_once as fail_at_once
from jaxsparse.launch.running import Outcome as Outcome, launch as launch

__all__ = ["Outcome", "fail_at_once", "launch"]
