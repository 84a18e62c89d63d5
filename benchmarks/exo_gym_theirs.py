"""One run by EXO Gym's own code, for exo_gym.py, which calls this by a Python that has PyTorch.

The Gym's files stay as they are. What this changes as it runs:

- The Gym gives gloo the network interface "lo0", which Linux does not have.
- Masks travel as bytes, because gloo of PyTorch 1.13 refuses booleans. They are as long.
- tqdm and einops need not be there: progress bars and DeMo are left out.
- Collectives of a strategy are counted, on rank 1. An all-reduce of n bytes by W nodes counts
  2 (W - 1) / W n received bytes, as a ring, and a broadcast n.

"Repaired" rows have no evaluation, and copy the master model of DiLoCo:

- The Gym evaluates before its first step. That leaves rank 0 in `eval()` for the whole run: without
  dropout, and with the first statistics of BatchNorm.
- `tensor.to("cpu")` copies nothing on a CPU. So after DiLoCo's first exchange the model of rank 0
  shares its memory with the master model, trains it, too, and all further displacements are zero.
  A GPU copies.
"""

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

NODES, STEPS = 4, 150

# Each node imports this file anew.
folder, (name, rate, seed, gym) = Path(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)
sys.path.insert(0, gym)
modules: dict[str, Any] = sys.modules
bar = types.SimpleNamespace(update=lambda n: None, set_postfix=lambda x: None)
modules["tqdm"] = types.SimpleNamespace(tqdm=lambda **settings: bar)
modules["einops"] = types.SimpleNamespace(rearrange=None)
trainer: Any = importlib.import_module("exogym.trainer")
trainer.init_process_group_portsafe = dist.init_process_group
strategies: Any = importlib.import_module("exogym.strategy")

received = {"values": 0.0, "masks": 0.0}
FACTORS = {"all_reduce": 2 * (NODES - 1) / NODES, "broadcast": 1.0}


def counted(name: str) -> Any:
    collective = getattr(dist, name)

    def run(tensor: torch.Tensor, *rest: Any, **more: Any) -> Any:
        caller = sys._getframe(3).f_code.co_filename  # behind the wrappers of communicate.py
        if "train_node" not in caller:  # evaluations, and the first broadcast
            kind = "masks" if tensor.dtype == torch.bool else "values"
            received[kind] += FACTORS[name] * tensor.numel() * tensor.element_size()
        sent = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        return collective(sent, *rest, **more)

    return run


def leave(destroy: Any = dist.destroy_process_group) -> None:
    if dist.get_rank() == 1:
        (folder / "received.json").write_text(json.dumps(received))
    destroy()


dist.all_reduce, dist.broadcast = map(counted, FACTORS)
dist.destroy_process_group = leave
states: dict[int, Any] = {}


def averaged(every: dict[int, Any], average: Any = trainer._average_model_states) -> Any:
    states.update(every)
    return average(every)


trainer._average_model_states = averaged


class Copying(strategies.DiLoCoCommunicator):
    """DiLoCo whose master model has a memory of its own on CPUs, too."""

    def _synchronize_master_model(self, model: nn.Module) -> None:
        super()._synchronize_master_model(model)
        for param in model.parameters():
            param.data = param.data.clone()


class Model(nn.Module):
    """The example's CNN, whose images are 8x8 here. Its result is the loss, as the Gym wants it."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, channels in ((1, 64), (64, 64), (64, 128), (128, 128)):
            conv = nn.Conv2d(before, channels, 3, padding=1)
            layers += [conv, nn.BatchNorm2d(channels), nn.ReLU()]
            if before == channels:
                layers += [nn.MaxPool2d(2), nn.Dropout2d(0.25)]
        layers += [nn.Flatten(), nn.Linear(128 * 2 * 2, 256), nn.ReLU(), nn.Dropout(0.5)]
        self.layers = nn.Sequential(*layers, nn.Linear(256, 10))
        count = {"Conv": 0, "Dense": 0}
        for layer in self.layers:
            kind = {nn.Conv2d: "Conv", nn.Linear: "Dense"}.get(type(layer))
            if kind:
                kernel, bias = (given[f"{kind}_{count[kind]}/{x}"] for x in ("kernel", "bias"))
                if kind == "Dense" and not count[kind]:  # of pixels of channels
                    kernel = kernel.reshape(2, 2, 128, 256).transpose(2, 0, 1, 3).reshape(512, 256)
                kernel = kernel.transpose(3, 2, 0, 1) if kind == "Conv" else kernel.T
                layer.weight.data = torch.tensor(kernel).contiguous()
                layer.bias.data = torch.tensor(bias)
                count[kind] += 1

    def forward(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def score(model: Any, test: Any) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        right = (model.layers(test[0]).argmax(1) == test[1]).float().mean()
        return {"loss": model(test).item(), "right": right.item()}


def strategy_of(name: str, **settings: Any) -> Any:
    kind, *more = name.replace(",", "").split()
    if kind == "SPARTA":
        return strategies.SPARTAStrategy(p_sparta=float(more[0]) / 100, **settings)
    if kind == "SimpleReduce":
        return importlib.import_module("exogym.strategy.strategy").SimpleReduceStrategy(**settings)
    strategy = strategies.DiLoCoStrategy(**settings)
    if "repaired" in more:
        strategy.diloco_comm.__class__ = Copying
    return strategy


def main() -> None:
    file = np.load(folder / "data.npz")
    own = lambda x: torch.tensor(x.transpose(0, 2, 1, *range(3, x.ndim)))  # [step, image, node]
    x, y = own(file["x"]).reshape(-1, 1, 8, 8), own(file["y"]).reshape(-1).long()
    test = torch.tensor(file["test_x"]).reshape(-1, 1, 8, 8), torch.tensor(file["test_y"]).long()
    strategy = strategy_of(
        name,
        optim_spec=strategies.OptimSpec(torch.optim.AdamW, lr=float(rate), weight_decay=1e-4),
        H=20,
        lr_scheduler="lambda_cosine",
        lr_scheduler_kwargs={"warmup_steps": 100, "cosine_anneal": True},
    )
    batch = file["y"].shape[2]
    pairs, model = torch.utils.data.TensorDataset, Model(file)
    os.chdir(folder)  # for logs
    port = 20_000 + os.getpid() % 10_000
    start = trainer.Trainer(model, pairs(x, y), pairs(*test), start_port=port, device="cpu")
    final = start.fit(
        max_steps=STEPS,
        num_epochs=1,
        strategy=strategy,
        num_nodes=NODES,
        batch_size=batch,
        minibatch_size=batch,
        shuffle=False,  # rank r takes items r, r + 4, ...: the batches that our node r has
        val_size=0 if "repaired" in name else batch,
        val_interval=STEPS,
        run_name="run",
        seed=int(seed),
    )
    # The mean of all nodes' parameters, with the mean of their statistics or those of rank 1. The
    # Gym's "global loss" takes the latter, and rank 0, if it is not repaired, has none.
    found: dict[str, Any] = {"with mean statistics": score(final, test)}
    first = {key: x for key, x in states[1].items() if "running" in key}
    final.load_state_dict(final.state_dict() | first)
    found["with rank 1's"] = score(final, test)
    moved = json.loads((folder / "received.json").read_text())
    if "SimpleReduce" not in name:  # the mean of parameters at the end, which the trainer takes
        moved["values"] += FACTORS["all_reduce"] * 4 * sum(p.numel() for p in model.parameters())
    found |= found["with mean statistics" if "repaired" in name else "with rank 1's"]
    found |= {"received": sum(moved.values()) / STEPS, "values": moved["values"] / STEPS}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
