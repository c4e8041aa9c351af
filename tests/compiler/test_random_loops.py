"""Random loops around a replayed step: what stock does, bit for bit, or a refusal before a weight has moved."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn import functional as F

import gradweave
from gradweave.errors import GradweaveError


class Scaled(optim.Optimizer):
    """Reads an attribute, and a momentum that may be off."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.0})
        self.scale = 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(p.grad)
                p.add_(mean * self.scale, alpha=-group["lr"])


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd without momentum": lambda p: optim.SGD(p, lr=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.05),
    "scaled": Scaled,
}


class Side:
    """A model in training: with a compiled step, or with the loop that it stands for."""

    def __init__(self, make_optimizer, *, compiled, policy="auto"):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
        )
        self.optimizer = make_optimizer(self.model.parameters())
        self.hooks = []
        self.saved = None
        self.compiled = compiled
        self.step = None
        if compiled:
            self.step = gradweave.compile(self.model, loss_fn, self.optimizer, lower="replay", policy=policy)

    def take(self, batch):
        return self.step(*batch) if self.compiled else self.eager(batch)

    def eager(self, batch):
        loss = loss_fn(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def everything(self):
        tensors = list(self.model.state_dict().values())
        for p in self.model.parameters():
            tensors += [x for x in self.optimizer.state.get(p, {}).values() if isinstance(x, torch.Tensor)]
        return [x.detach().clone() for x in tensors]


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def change_rate(side, value):
    side.optimizer.param_groups[0]["lr"] = 0.02 * (1 + value)


def change_momentum(side, value):
    for key in {"momentum", "weight_decay"} & side.optimizer.param_groups[0].keys():
        side.optimizer.param_groups[0][key] = (0.0, 0.5, 0.9)[value % 3]


def change_attribute(side, value):
    side.optimizer.scale = 1.0 + value


def halve(p):
    if p.grad is not None:
        p.grad.mul_(0.5)


def add_hook(side, value):
    layer = side.model[0]
    if value == 0:
        side.hooks.append(layer.register_forward_hook(lambda module, args, out: out * 0.5))
    elif value == 1:
        side.hooks.append(layer.register_full_backward_hook(lambda module, given, out: None))
    elif value == 2:
        if not layer.weight.requires_grad:  # torch takes no hooks on what is frozen
            return
        side.hooks.append(layer.weight.register_hook(lambda grad: grad * 0.5))
    else:
        side.hooks.append(side.optimizer.register_step_pre_hook(lambda *_: halve(layer.weight)))


def remove_hook(side, value):
    if side.hooks:
        side.hooks.pop(value % len(side.hooks)).remove()


def freeze(side, value):
    side.model[value % 2 * 4].requires_grad_(not side.model[value % 2 * 4].weight.requires_grad)


def reset_state(side, value):
    if value % 2:
        side.optimizer.state.clear()
    else:
        side.optimizer.state = copy.deepcopy(type(side.optimizer.state)(dict))


def save_or_load(side, value):
    if side.saved is None or value % 2:
        side.saved = copy.deepcopy((side.model.state_dict(), side.optimizer.state_dict()))
    else:
        side.model.load_state_dict(side.saved[0])
        side.optimizer.load_state_dict(copy.deepcopy(side.saved[1]))


def evaluate(side, value):
    side.model.eval()
    with torch.no_grad():
        side.model(torch.ones(2, 4))
    side.model.train(value > 0)


def edit_weight(side, value):
    if value == 0:
        side.model[4].weight.data.mul_(0.9)
    elif value == 1:
        side.model[4].weight.data = side.model[4].weight.data.clone()
    elif value == 2:
        side.model[4].bias.data = side.model[0].bias.data
    else:
        side.model[4].bias.data = side.model[4].bias.data + 0.1


CHANGES = {
    change.__name__: change
    for change in (
        change_rate, change_momentum, change_attribute, add_hook, remove_hook, freeze, reset_state, save_or_load,
        evaluate, edit_weight,
    )
}  # fmt: skip
ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["step", "step", "eager step"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3)),
)


def batch_of(number, size):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def changes(what, value, *sides):
    """Make a change on all sides, if it is one and no step."""
    for side in sides if what in CHANGES else ():
        CHANGES[what](side, value)
    return what in CHANGES


def check(name, actions):
    torch._dynamo.reset()
    stock, ours = (Side(OPTIMIZERS[name], compiled=compiled) for compiled in (False, True))
    everything = [("step", 0), ("step", 0), *actions, ("step", 0), ("step", 0)]
    for number, (what, value) in enumerate(everything):
        if changes(what, value, stock, ours):
            continue
        batch = batch_of(number, 3 + value)
        before = ours.everything()
        torch.manual_seed(number)
        try:
            loss = ours.take(batch) if what == "step" else ours.eager(batch)
        except GradweaveError:
            assert all(map(torch.equal, before, ours.everything())), f"{number}: a refused step changed something"
            continue
        torch.manual_seed(number)
        expected = stock.eager(batch)
        assert torch.equal(loss, expected), f"{number} {what}: loss"
        for mine, theirs in zip(ours.everything(), stock.everything(), strict=True):
            assert torch.equal(mine, theirs), f"{number} {what}: weights, buffers or state"


LISTS = st.lists(ACTIONS, min_size=2, max_size=10)
LOOPS = given(name=st.sampled_from(sorted(OPTIMIZERS)), actions=LISTS)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.timeout(900)
@LOOPS
@settings(max_examples=24)
def test_random_loops(name, actions):
    check(name, actions)


def check_by_policy(name, actions, policy):
    """As :func:`check`, but weights are looked at when the loop does, and at its end."""
    torch._dynamo.reset()
    stock = Side(OPTIMIZERS[name], compiled=False)
    ours = Side(OPTIMIZERS[name], compiled=True, policy=policy)
    everything = [("step", 0)] * 4 + [*actions] + [("step", 0)] * 4
    for number, (what, value) in enumerate(everything):
        if changes(what, value, stock, ours):
            continue
        batch = batch_of(number, 3 + value)
        torch.manual_seed(number)
        try:
            loss = ours.take(batch) if what == "step" else ours.eager(batch)
        except GradweaveError:
            same = zip(ours.everything(), stock.everything(), strict=True)
            assert all(torch.equal(*pair) for pair in same), f"{number}: a refused step changed something"
            continue
        torch.manual_seed(number)
        assert torch.equal(loss, stock.eager(batch)), f"{number} {what}: loss"
    for mine, theirs in zip(ours.everything(), stock.everything(), strict=True):
        assert torch.equal(mine, theirs), "weights, buffers or state"


POLICIES = st.sampled_from(["backward_fusion", "side_stream", "forward_fusion", "forward_fusion"])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.timeout(900)
@given(name=st.sampled_from(sorted(OPTIMIZERS)), actions=LISTS, policy=POLICIES)
@settings(max_examples=12)
def test_random_loops_by_a_policy(name, actions, policy):
    check_by_policy(name, actions, policy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.timeout(0)
@given(name=st.sampled_from(sorted(OPTIMIZERS)), actions=LISTS, policy=POLICIES)
@settings(max_examples=300, derandomize=False)
def test_many_random_loops_by_a_policy(name, actions, policy):
    check_by_policy(name, actions, policy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.timeout(0)
@LOOPS
@settings(max_examples=600, derandomize=False)
def test_many_random_loops(name, actions):
    check(name, actions)
