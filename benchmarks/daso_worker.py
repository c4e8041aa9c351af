"""One rank of the DASO benchmarks: reads jobs, one JSON object a line, and answers each with one."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from daso_variants import WAYS
from torch import nn
from torch.nn import functional as F

SNAPSHOT_STEPS = 5
WARM_UP_STEPS = 30
"""Of the learning rate, for every way."""


def make_model(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


class Mnist:
    """Images and labels, on rank 0 also those to test on; ranks draw different parts of each epoch."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            arrays = {name: torch.from_numpy(data[name]) for name in data.files}
        self.x, self.test_x = ((arrays[n].reshape(-1, 784).float() / 255 - 0.13) / 0.31 for n in ("x_train", "x_test"))
        self.y, self.test_y = (arrays[name].long().reshape(-1) for name in ("y_train", "y_test"))

    def epoch(self, seed: int, batch: int) -> list[torch.Tensor]:
        """Indices of this rank's batches."""
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(seed))
        world = dist.get_world_size()
        steps = len(order) // (batch * world)
        return list(order[: steps * batch * world].view(steps, world, batch)[:, dist.get_rank()])


def race(
    data: Mnist, *, way: str, lr: float, seed: int, epochs: int, batch: int, width: int, target: float, **options: Any
) -> dict[str, Any]:
    """Trains on MNIST; the clock runs over training alone, and accuracy is looked at afterwards."""
    torch.manual_seed(seed)
    model = make_model(width)
    steps = len(data.epoch(0, batch))
    chosen = WAYS[way](model, lr, epochs=epochs, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        getattr(chosen.optimizer, "optim", chosen.optimizer),
        lambda step: min((step + 1) / WARM_UP_STEPS, max(0.02, 1 - step / (epochs * steps))),
    )
    snapshots: list[tuple[float, int, list[torch.Tensor]]] = []
    durations = []
    dist.barrier()
    spent, count = 0.0, 0
    for epoch in range(epochs):
        losses = []
        for index in data.epoch(1000 * seed + epoch, batch):
            began = time.perf_counter()
            loss = F.cross_entropy(chosen.model(data.x[index]), data.y[index])
            loss.backward()
            chosen.optimizer.step()
            chosen.optimizer.zero_grad()
            chosen.after_step()
            schedule.step()
            losses.append(loss.detach())
            durations.append(time.perf_counter() - began)
            spent += durations[-1]
            count += 1
            if dist.get_rank() == 0 and count % SNAPSHOT_STEPS == 0:
                snapshots.append((spent, count, [p.detach().clone() for p in model.parameters()]))
        began = time.perf_counter()
        chosen.after_epoch(float(torch.stack(losses).mean()))
        spent += time.perf_counter() - began
    began = time.perf_counter()
    chosen.at_the_end()
    spent += time.perf_counter() - began
    snapshots.append((spent, count, [p.detach().clone() for p in model.parameters()]))
    if chosen.daso is not None:
        chosen.daso.detach()
    dist.barrier()
    found = {"seconds": spent, "step_seconds": statistics.median(durations), "steps": count}
    if dist.get_rank() == 0:
        found["final_accuracy"] = _accuracy(snapshots[-1][2], data)
        # Other ranks wait: their cores are free.
        torch.set_num_threads(2)
        reached = (at for at, _, weights in snapshots if _accuracy(weights, data) >= target)
        found["seconds_to_target"] = next(reached, float("nan"))
        torch.set_num_threads(1)
    dist.barrier()
    if chosen.daso is not None:
        found["stats"] = chosen.daso.stats()
        found["rhythm"] = chosen.daso.rhythm
    return found


@torch.no_grad()
def _accuracy(weights: list[torch.Tensor], data: Mnist) -> float:
    x = data.test_x
    for w, b in zip(weights[::2], weights[1::2], strict=True):
        x = F.linear(x if x is data.test_x else x.relu(), w, b)
    return float((x.argmax(1) == data.test_y).float().mean())


class Waits(nn.Module):
    """A model whose compute is waiting, so that nothing competes with communication."""

    def __init__(self, elements: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.seconds = seconds

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return (self.weight[:1000] * scale).sum() + self.weight.sum() * 1e-3


def expose(
    data: Mnist, *, steps: int, exchanges: bool, seconds: float | None, elements: int, batch: int, width: int,
    every: int | None, wait: int | None, picture: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Times of steps with exchanges between nodes, or without any; compute is real, or waiting."""
    torch.manual_seed(0)
    model: nn.Module = make_model(width) if seconds is None else Waits(elements, seconds)
    options = {"every": every, "wait": wait} if exchanges else {"every": 10**9, "wait": 0}
    chosen = WAYS["daso"](model, 0.01, **options)
    assert chosen.daso is not None  # noqa: S101
    daso = chosen.daso
    indices = data.epoch(0, batch)
    durations = []
    dist.barrier()
    sent = _sent_bytes()
    for step in range(steps):
        index = indices[step % len(indices)]
        began = time.perf_counter()
        loss = model(torch.ones(1)) if seconds else F.cross_entropy(model(data.x[index]), data.y[index])
        loss.backward()
        chosen.optimizer.step()
        chosen.optimizer.zero_grad()
        durations.append(time.perf_counter() - began)
    # Taking the state waits for what is under way, so that all that was sent is counted.
    daso.state_dict()
    stats, rhythm = daso.stats(), daso.rhythm
    dist.barrier()
    found = {"durations": durations, "stats": stats, "rhythm": rhythm, "sent": _sent_bytes() - sent}
    if exchanges and stats["exchanges"]:
        found["planned_step"] = daso.timelines()[0].step_time
        if picture is not None and dist.get_rank() == 0:
            daso.save_timeline(picture)
    dist.barrier()
    daso.detach()
    return found


def _sent_bytes() -> int:
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    address = f"tcp://{os.environ['MASTER_ADDR']}:29571"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    data = Mnist(Path(sys.argv[1]))
    for line in sys.stdin:
        job = json.loads(line)
        found = {"race": race, "expose": expose}[job.pop("job")](data, **job)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
