"""Threads that read weights find whole updates, and run none."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn, optim

from _runtime.deferred.comparison import same
from fusion.loops import batches, loss_of, make_net
from gradweave.fusion import fuse


def test_threads_that_evaluate_after_step_see_whole_updates():
    with ThreadPoolExecutor(4) as pool:

        def evaluate(i, model, optimizer, x):
            with torch.no_grad():
                return [
                    out.tolist() for out in pool.map(lambda scale: nn.Module.__call__(model, x * scale), (1, 2, 3, 4))
                ]

        for _ in range(3):
            same(evaluate, steps=20)


def test_threads_that_read_single_weights_see_whole_updates():
    with ThreadPoolExecutor(4) as pool:

        def read(i, model, optimizer, x):
            jobs = [pool.submit(lambda p=p: float(p.detach().sum())) for p in model.parameters() for _ in range(3)]
            jobs += [pool.submit(lambda p=p: float(p.grad.sum())) for p in model.parameters()]
            jobs += [pool.submit(lambda p=p: float(optimizer.state[p]["exp_avg"].sum())) for p in model.parameters()]
            return [job.result() for job in jobs]

        for _ in range(3):
            same(read, steps=20)


class _Looks(optim.Optimizer):
    """Reads its parameters in several ways while it updates them."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.detach().clone()
                    p.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [optim.AdamW, _Looks])
def test_another_threads_look_does_not_make_it_update(kind):
    model = make_net()
    optimizer = kind(model.parameters())
    updated_in, looked_in = [], []

    @contextmanager
    def note(_):
        updated_in.append((threading.current_thread(), torch.get_num_threads()))
        yield

    def look():
        looked_in.append(threading.current_thread())
        model.scale.sum()

    with fuse(model, optimizer, "forward") as fusion:
        fusion.record(note)
        for x, y in batches(3):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        updated_in.clear()
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(100)
        assert not thread.is_alive()
        assert type(model.scale) is nn.Parameter
    (updated_by, threads_of_torch), *_ = updated_in
    assert updated_by not in (*looked_in, threading.current_thread())
    assert threads_of_torch == torch.get_num_threads()
