"""An island of MaxText's: a job of its own on four emulated devices, fsdp and tensor inside.

Lines that end in "# +" let it exchange displacements with other islands through a folder. Without
them, MaxText trains alone. Islands have the same model, and each its own half of the rows that
MaxText's synthetic data have on eight devices. `compare_islands.py` runs the script, with these
lines and without them.
"""

import hashlib
import os
import signal
import time

import jax
import jax.numpy as jnp
import maxtext_tiny
import numpy as np
from jax.tree_util import keystr, tree_map_with_path
from maxtext.common import checkpointing
from maxtext.input_pipeline.synthetic_data_processing import SyntheticDataIterator
from maxtext.trainers.pre_train import train
from maxtext.utils import exceptions, train_utils

import jaxsparse  # +

NAME, STORE = os.environ.get("NAME", "oslo"), os.environ.get("STORE", "memory://")
DENSITY = float(os.environ.get("DENSITY", "0.01"))
QUORUM, GRACE = int(os.environ.get("QUORUM", "1")), float(os.environ.get("GRACE", "0"))
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds after a step
VARIANT = os.environ.get("VARIANT", "plain")
COUNT = "['optimizer']['opt_state'][2]['count'].value"  # of the schedule behind Adam
SETTINGS = dict(maxtext_tiny.SETTINGS)

sent = jaxsparse.top_k(DENSITY, axis_name=None, is_dense=lambda *_: False)  # +
outer = jaxsparse.outer.diloco(0.3, 0.9, exchange=sent)  # +
how = {"name": NAME, "every": 5, "quorum": QUORUM, "grace": GRACE}  # +
how["params"] = lambda state: train.nnx.filter_state(state, train.nnx.Param)  # +
jit, store = train_utils.jit_train_step, jaxsparse.islands.Store(STORE)  # +
run = lambda step: jaxsparse.islands.Islands(step, outer, store, **how)  # +
train_utils.jit_train_step = lambda *a, **named: run(jit(*a, **named))  # +

if VARIANT == "returning":
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: ends.append(True))

    class Returning(jaxsparse.islands.Islands):
        """An island whose learning rate follows the rounds, and which leaves at SIGTERM."""

        def join(self, state):
            joined = super().join(state)
            done = how["every"] * joined.round
            later = lambda path, x: x + done if keystr(path) == COUNT else x
            return joined._replace(worker=tree_map_with_path(later, joined.worker))

        def __call__(self, state, batch):
            if ends and isinstance(state, jaxsparse.islands.IslandState):
                self.leave(state, patience=20.0)
                raise exceptions.StopTraining("SIGTERM")
            return super().__call__(state, batch)

    run = lambda step: Returning(step, outer, store, **how)


def halved(self, config, mesh, make=SyntheticDataIterator.__init__):
    """This island's half of the rows that MaxText makes for twice as many devices."""
    make(self, config, mesh)
    shape = 2 * config.global_batch_size_to_load, config.max_target_length + 1
    rows = jax.random.randint(jax.random.PRNGKey(0), shape, 0, config.vocab_size, dtype=jnp.int32)
    self.data = jnp.split(rows, 2)[NAME == "rome"], *self.data[1:]


def told(_manager, state, *_):
    """Prints the parameters' digest after each round, and sleeps."""
    if getattr(state, "steps", None) == 0:
        arrays = (np.asarray(x).tobytes() for x in jax.tree.leaves(state.params))
        print("round", state.round, hashlib.sha256(b"".join(arrays)).hexdigest()[:16], flush=True)
    time.sleep(PAUSE)


SyntheticDataIterator.__init__ = halved
checkpointing.maybe_save_checkpoint = told
maxtext_tiny.run(SETTINGS)
