"""MaxText's DiLoCo on eight emulated devices: two hosts, fsdp and tensor inside.

Without the lines that end in "# +", it is MaxText's own. With them, MaxText's plain step runs in
`LocalSteps`, whose outer optimizer is the same, and displacements are compressed. The block of a
variant is added, too: it saves the state and restores it. `compare.py` runs the script with these
lines and without them.
"""

import os
import tempfile

import jax
import maxtext_tiny
import optax  # +
import orbax.checkpoint as ocp
from maxtext.common import checkpointing
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils

import jaxsparse  # +

DENSITY = float(os.environ.get("DENSITY", "0.01"))
VARIANT = globals().get("VARIANT", "plain")
SETTINGS = maxtext_tiny.SETTINGS | {
    "enable_diloco": True,
    "diloco_sync_period": 5,
    "diloco_outer_lr": 0.3,
    "diloco_outer_momentum": 0.9,
    "ici_diloco_parallelism": 2,
}
SETTINGS |= maxtext_tiny.VARIANTS[VARIANT]

SETTINGS |= {"enable_diloco": False} | maxtext_tiny.APART  # +
sent = jaxsparse.spardl(DENSITY, axis_name="diloco")  # +
how = {"axis_name": "diloco", "exchange": sent, "optimizer": optax.sgd(0.3, 0.9, True)}  # +
how |= {"every": 5, "params": lambda state: train.nnx.filter_state(state, train.nnx.Param)}  # +
plain = lambda *a: lambda *b: a[5](a[1], a[0], a[3], a[6], *b)  # +


class Local(jaxsparse.LocalSteps):  # +
    """Shows MaxText numbers: means over workers."""  # +

    def __call__(self, *a):  # +
        state, shown = super().__call__(*a)  # +
        return state, jax.tree.map(lambda x: x.mean(0), shown)  # +


train_utils.jit_train_step = lambda *a, mesh: Local(plain(*a), mesh=mesh, **how)  # +

if VARIANT in ("streaming", "streaming_resumed"):
    SETTINGS["enable_streaming_diloco"] = False
    split = lambda path: int("layers" in path)
    how |= {"every": 4, "streaming": jaxsparse.outer.Streaming(2, 1, mixing=0.5, split=split)}

if VARIANT in ("resumed", "streaming_resumed"):
    SETTINGS["enable_checkpointing"] = False
    store = ocp.CheckpointManager(tempfile.mkdtemp())

    class Resuming(Local):
        """Local steps that go on where the last run stopped."""

        def init(self, state):
            new, done = super().init(state), store.latest_step()
            like = ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, new))
            return new if done is None else store.restore(done, args=like)

    def save(_manager, state, _config, _data, step=None):
        if step is not None:
            store.save(step + 1, args=ocp.args.StandardSave(state))

    train_utils.jit_train_step = lambda *a, mesh: Resuming(plain(*a), mesh=mesh, **how)
    train.get_first_step = lambda model, state: store.latest_step() or 0
    checkpointing.maybe_save_checkpoint = save

maxtext_tiny.run(SETTINGS, VARIANT)
