import pytest
import torch
from torch import optim

import gradweave
from compiler.models import (
    CAPTURABLE_FORM,
    OPTIMIZERS,
    train,
)


class TrustRatio(torch.optim.Optimizer):
    """Changes a scalar of its own in place, by something that differs between parameters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                state["step"].add_(1)
                rate = group["lr"] / state["step"]
                rate.mul_(p.norm() + 0.1)
                p.add_(-p.grad * rate)


def test_a_scalar_that_is_changed_in_place_is_each_parameters_own():
    def train(lower):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        step = gradweave.compile(model, lambda m, x: m(x).square().mean(), TrustRatio(model.parameters()), lower=lower)
        return torch.stack([step(torch.linspace(0, 1, 24).view(4, 6)) for _ in range(6)])

    torch.testing.assert_close(train("inductor"), train("replay"), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *CAPTURABLE_FORM])
def test_inductor_with_every_optimizer_and_a_scheduler(name):
    def run(lower):
        return train(
            "linear",
            lower,
            {**OPTIMIZERS, **CAPTURABLE_FORM}[name],
            steps=7,
            max_norm=0.5,
            scheduler=lambda o: optim.lr_scheduler.ExponentialLR(o, 0.8),
        )

    made, expected = run("inductor"), run(None)
    torch.testing.assert_close(made[2], expected[2], rtol=1e-5, atol=0)
    for mine, theirs in zip(made[0].parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    state = made[1].state_dict()["state"]
    for index, entry in expected[1].state_dict()["state"].items():
        assert state[index].keys() == entry.keys()
        if "step" in entry:
            assert state[index]["step"] == entry["step"]
