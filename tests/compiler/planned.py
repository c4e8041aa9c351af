"""Small random models, costs of their layers, and what a step by a schedule has run."""

import random

import torch
from hypothesis import strategies as st
from torch import nn

import gradweave
from compiler.models import adamw, batches, loss_fn
from gradweave.schedule import Costs, Demand, LayerCost

POLICIES = ("in_order", "backward_fusion", "forward_fusion", "side_stream", "joint", "cross_step", "side_region")
WIDTH = 12
BLOCKS = ("linear", "residual", "norm", "batchnorm", "dropout", "again", "scale", "frozen")


class Chain(nn.Module):
    """Blocks in a row: residual branches, a layer used again, a bare parameter, a frozen layer."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks
        self.first = nn.Linear(48, WIDTH)
        made = {"norm": nn.LayerNorm, "batchnorm": nn.BatchNorm1d}
        self.layers = nn.ModuleList(made[kind](WIDTH) if kind in made else nn.Linear(WIDTH, WIDTH) for kind in blocks)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, 5)
        for kind, layer in zip(blocks, self.layers, strict=True):
            layer.requires_grad_(kind != "frozen")

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for kind, layer in zip(self.blocks, self.layers, strict=True):
            if kind == "residual":
                x = x + torch.relu(layer(x))
            elif kind == "again":
                x = torch.tanh(layer(torch.tanh(layer(x))))
            elif kind == "dropout":
                x = nn.functional.dropout(layer(x), 0.3)
            elif kind == "scale":
                x = x * self.scale
            else:
                x = torch.relu(layer(x))
        return self.last(x)


chains = st.lists(st.sampled_from(BLOCKS), max_size=4).map(tuple)


def make_chain(blocks, device="cpu"):
    torch.manual_seed(0)
    return Chain(blocks).to(device)


def layer_names(model, device="cpu"):
    """The layers of a step in their order, as a schedule that needs no costs names them."""
    step = gradweave.compile(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.0), lower="replay", policy="in_order"
    )
    for batch in batches(3):
        step(*(x.to(device) for x in batch))
    names = [layer.name for layer in step.schedule.graph.costs.layers]
    step.detach()
    return names


def random_costs(names, seed):
    """Costs under which tasks gain by running side by side, or do not."""
    draw = random.Random(seed).random
    parts = ("forward", "input_grad", "weight_grad", "update")
    layers = [
        LayerCost(
            name, *(draw() for _ in parts), 1, 1, 1, **{f"{part}_demand": Demand(draw(), draw()) for part in parts}
        )
        for name in names
    ]
    return Costs(tuple(layers), name="random")


def train(model, steps=7, make_optimizer=adamw, device="cpu", **options):
    """Losses of some compiled steps, and the step."""
    options = {"lower": "replay"} | options
    step = gradweave.compile(model, loss_fn, make_optimizer(model.parameters()), **options)
    torch.manual_seed(7)
    losses = [step(*(x.to(device) for x in batch)) for batch in batches(steps)]
    return torch.stack(losses), step


def events_of(step, given):
    """Events of all tasks of the step's schedule, from as many measured steps as it has, and one more.

    A step that leaves work leaves what the next one begins with.
    """
    graph = step.schedule.graph
    step.flush()
    events = []
    clock = 0.0
    for number, batch in zip(range(graph.steps + 1), given, strict=False):
        timeline = step.timeline(*batch)
        base = max(span.task.step for span in timeline.spans)
        for span in timeline.spans:
            task = graph.index.get((span.task.kind, span.task.layer, 0, number + span.task.step - base))
            if task is not None:
                events.append((span.lane, task, clock + span.start, clock + span.end))
        clock += timeline.makespan + 1
    return events
