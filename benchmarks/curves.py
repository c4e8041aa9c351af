"""Training a small GPT on the bytes of a text, in ways that should give one and the same loss curve."""

from __future__ import annotations

from pathlib import Path

import torch
from step_variants import loss_of

import gradweave
from gradweave.compare.models import GPT

STEPS, BATCH, LENGTH = 300, 16, 256


def train_on_text(path: Path, how: str) -> list[float]:
    """The losses of 300 steps in bf16, from one start and on the same batches whatever the way."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = GPT(vocabulary=256, width=384, blocks=6, heads=6, tokens=LENGTH).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = gradweave.compile(model, loss_of, optimizer) if how == "step" else None
    forward = torch.compile(model) if how == "compile" else model
    losses = []
    for _ in range(STEPS):
        places = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[place : place + LENGTH + 1] for place in places]).cuda()
        if "rows moved by" in how:
            rows = rows.roll(int(how.split()[-1]), 0)
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if step is not None:
            losses.append(step(x, y))
            continue
        loss = loss_of(forward, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()
