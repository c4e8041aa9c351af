import copy
import pickle
import weakref

import pytest
import torch
from torch import nn, optim

from fusion.loops import Net, adamw, assert_same, batches, loss_of, make_net, train
from gradweave.errors import ArgumentError, GradweaveError, UnsupportedError
from gradweave.fusion import fuse

MODES = ("backward", "forward")


def step(model, optimizer, x, y):
    loss_of(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_mistakes_are_named_before_training():
    model = make_net()
    optimizer = adamw(model)
    with pytest.raises(ArgumentError, match="mode='sideways': use one of auto, forward, backward"):
        fuse(model, optimizer, "sideways")
    with pytest.raises(ArgumentError, match="optimizer='str'"):
        fuse(model, "adam")
    with pytest.raises(UnsupportedError, match=r"LBFGS.*train without fuse"):
        fuse(model, optim.LBFGS(model.parameters()))
    with pytest.raises(UnsupportedError, match="SparseAdam"):
        fuse(model, optim.SparseAdam(model.parameters()))
    with pytest.raises(UnsupportedError, match="differentiable=False"):
        fuse(model, optim.SGD(model.parameters(), differentiable=True))
    with pytest.raises(UnsupportedError, match="is not in the model"):
        fuse(model, adamw(make_net()))
    with pytest.raises(UnsupportedError, match="DataParallel"):
        fuse(nn.DataParallel(model), optimizer)


def test_attaching_twice_is_refused_until_detached():
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "forward"):
        with pytest.raises(UnsupportedError, match="fused already; detach"):
            fuse(model, optimizer, "backward")
        with pytest.raises(UnsupportedError, match="another optimizer that is fused"):
            fuse(model, adamw(model), "forward")
    fuse(model, optimizer, "backward").detach()


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_after_detaching_everything_is_stock(mode):
    model = make_net()
    optimizer = adamw(model)

    def trace():
        hooks = [len(m._forward_pre_hooks) for m in model.modules()]
        params = [(type(p), len(p._post_accumulate_grad_hooks or {})) for p in model.parameters()]
        steps = [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)]
        return hooks, params, steps, sorted(vars(optimizer))

    before = trace()
    fusion = fuse(model, optimizer, mode)
    for x, y in batches(4):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    fusion.detach()
    fusion.detach()
    assert trace() == before
    assert fusion.explain() == "detached: stock order"
    with pytest.raises(GradweaveError, match="detached"):
        fusion.flush()
    model.zero_grad()
    x, y = next(batches(1))
    loss_of(model, x, y).backward()
    assert all(type(p.grad) is torch.Tensor for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_detaching_after_a_scheduler_wrapped_step(mode):
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, mode)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for i, (x, y) in enumerate(batches(6)):
        if i == 3:
            fusion.detach()
        step(model, optimizer, x, y)
        scheduler.step()
    expected = train(adamw, make_scheduler=lambda o: optim.lr_scheduler.ExponentialLR(o, 0.5))
    assert_same((model, optimizer), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["after backward", "after step"])
def test_detaching_in_the_middle_of_a_step(mode, when):
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, mode)
    for i, (x, y) in enumerate(batches(6)):
        loss_of(model, x, y).backward()
        if i == 0 and when == "after backward":
            fusion.detach()
        optimizer.step()
        if i == 3 and when == "after step":
            fusion.detach()
        optimizer.zero_grad()
    assert_same((model, optimizer), train(adamw))


@pytest.mark.parametrize("mode", MODES)
def test_two_optimizers_on_two_parts_of_a_model(mode):
    def run(fused):
        model = make_net()
        named = list(model.named_parameters())
        one = optim.AdamW([p for name, p in named if name.startswith("inner")], lr=0.01)
        two = optim.SGD([p for name, p in named if not name.startswith("inner")], lr=0.1, momentum=0.9)
        fusions = [fuse(model, o, mode) for o in (one, two)] if fused else []
        for x, y in batches(6):
            loss_of(model, x, y).backward()
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
        for fusion in fusions:
            fusion.detach()
        return model, one, two

    (model, one, two), (stock, stock_one, stock_two) = run(True), run(False)
    assert_same((model, one), (stock, stock_one))
    assert_same((model, two), (stock, stock_two))


@pytest.mark.parametrize("mode", MODES)
def test_gan_style_turns(mode):
    """Two models, two optimizers; the generator's backward runs through the discriminator."""

    def run(fused):
        torch.manual_seed(0)
        generator, discriminator = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizers = [optim.AdamW(m.parameters(), lr=0.01) for m in (generator, discriminator)]
        fusions = (
            [fuse(m, o, mode) for m, o in zip((generator, discriminator), optimizers, strict=True)] if fused else []
        )
        noise = torch.Generator().manual_seed(2)
        for _ in range(5):
            z, real = torch.randn(5, 4, generator=noise), torch.randn(5, 6, generator=noise)
            loss = discriminator(generator(z).detach()).mean() - discriminator(real).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            for p in discriminator.parameters():
                p.requires_grad_(False)
            (-discriminator(generator(z)).mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            for p in discriminator.parameters():
                p.requires_grad_(True)
        for fusion in fusions:
            fusion.detach()
        return (generator, optimizers[0]), (discriminator, optimizers[1])

    for fused, stock in zip(run(True), run(False), strict=True):
        assert_same(fused, stock)


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_over_part_of_a_model(mode):
    def make(model):
        return optim.AdamW(model.head.parameters(), lr=0.01)

    assert_same(train(make), train(make, mode))


class Branches(Net):
    """Leaves some parameters unused in every other step."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(8, 8)
        self.never = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.norm(self.inner(x))
        x = self.side(x) if self.calls % 2 else self.twice(x)
        return self.head(x)


@pytest.mark.parametrize("mode", MODES)
def test_unused_parameters_are_left_alone(mode):
    def make(model):
        return optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)

    fused, stock = train(make, mode, cls=Branches), train(make, cls=Branches)
    assert_same(fused, stock)
    assert fused[1].state.get(fused[0].never.weight, {}) == {}


@pytest.mark.parametrize("mode", MODES)
def test_frozen_and_later_unfrozen_parameters(mode):
    def run(mode):
        model = make_net()
        model.inner.requires_grad_(False)
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(9)):
            if i == 3:
                model.inner.requires_grad_(True)
            if i == 6:
                model.head.requires_grad_(False)
            step(model, optimizer, x, y)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))


@pytest.mark.parametrize("mode", MODES)
def test_a_group_added_in_mid_training(mode):
    def run(mode):
        model = make_net()
        optimizer = optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("inner")], lr=0.01)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(8)):
            if i == 4:
                optimizer.add_param_group({"params": list(model.inner.parameters()), "lr": 0.05})
            loss_of(model, x, y).backward()
            optimizer.step()
            model.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.twin = nn.Linear(8, 8)
        self.twin.weight = self.twice.weight

    def forward(self, x):
        return self.head(self.twin(torch.relu(self.twice(self.norm(self.inner(x))))))


@pytest.mark.parametrize("mode", MODES)
def test_tied_weights(mode):
    assert_same(train(adamw, cls=Tied), train(adamw, mode, cls=Tied))


class Checkpointed(Net):
    reentrant = False

    def forward(self, x):
        def part(x):
            return torch.tanh(self.twice(x))

        x = self.norm(self.inner(x))
        x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedShared(Net):
    """One weight in two non-reentrant segments."""

    reentrant = False

    def forward(self, x):
        def part(x):
            return torch.tanh(self.twice(x))

        x = self.norm(self.inner(x))
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedSharedReentrant(CheckpointedShared):
    reentrant = True


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [Checkpointed, CheckpointedReentrant, CheckpointedShared])
def test_activation_checkpointing(mode, cls):
    assert_same(train(adamw, cls=cls), train(adamw, mode, cls=cls))


def test_a_weight_shared_by_reentrant_segments():
    """Its gradient arrives in parts: exact under forward, refused under backward before a weight moves."""
    assert_same(train(adamw, cls=CheckpointedSharedReentrant), train(adamw, "forward", cls=CheckpointedSharedReentrant))
    model = make_net(cls=CheckpointedSharedReentrant)
    before = copy.deepcopy(model.state_dict())
    optimizer = adamw(model)
    with fuse(model, optimizer, "backward"):
        x, y = next(batches(1))
        with pytest.raises(GradweaveError, match="second backward before step"):
            loss_of(model, x, y).backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mode", MODES)
def test_a_closure_always_runs(mode):
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        losses = []
        for i, (x, y) in enumerate(batches(6)):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = loss_of(model, x, y)
                loss.backward()
                return loss

            loss = optimizer.step(closure) if i % 2 else optimizer.step(closure=closure)
            losses.append(loss.item())
        if fusion:
            fusion.detach()
        return (model, optimizer), losses

    fused, stock = run(mode), run(None)
    assert fused[1] == stock[1]
    assert_same(fused[0], stock[0])


@pytest.mark.parametrize("mode", MODES)
def test_step_hooks_run_once_per_step(mode):
    model = make_net()
    optimizer = adamw(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("early pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    with fuse(model, optimizer, mode):
        for x, y in batches(4):
            step(model, optimizer, x, y)
    assert calls == ["early pre", "post"] * 4


def test_a_hook_added_later_that_changes_gradients_is_honoured_under_forward():
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        for i, (x, y) in enumerate(batches(6)):
            if i == 2:
                optimizer.register_step_pre_hook(
                    lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) and None
                )
            step(model, optimizer, x, y)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))


@pytest.mark.parametrize("mode", MODES)
def test_ema_and_evaluation_in_between(mode):
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        fusion = fuse(model, optimizer, mode) if mode else None
        outputs = []
        for i, (x, y) in enumerate(batches(6)):
            step(model, optimizer, x, y)
            average.update_parameters(model)
            with torch.inference_mode() if i % 2 else torch.no_grad():
                outputs.append(model.eval()(x))
            model.train()
        if fusion:
            fusion.detach()
        return (model, optimizer), average, outputs

    fused, stock = run(mode), run(None)
    assert_same(fused[0], stock[0])
    assert all(torch.equal(a, b) for a, b in zip(fused[1].parameters(), stock[1].parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(fused[2], stock[2], strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_pickles_are_stock_models(mode):
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, mode):
        for x, y in batches(3):
            loss_of(model, x, y).backward()
            optimizer.step()
            copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
            optimizer.zero_grad()
        copied_optimizer = copy.deepcopy(optimizer)
    for other in (copied, pickled):
        assert all(type(p) is nn.Parameter for p in other.parameters())
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), model.parameters(), strict=True))
        assert_same(train_on(other), train_on(copy.deepcopy(model)))
    assert copied_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def train_on(model):
    optimizer = adamw(model)
    for x, y in batches(3):
        step(model, optimizer, x, y)
    return model, optimizer


@pytest.mark.parametrize("mode", MODES)
def test_gradient_accumulation(mode):
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        fusion = fuse(model, optimizer, mode) if mode else None
        data = list(batches(12))
        for i in range(0, 12, 3):
            for x, y in data[i : i + 2]:
                if fusion:
                    with fusion.no_update():
                        loss_of(model, x, y).backward()
                else:
                    loss_of(model, x, y).backward()
            loss_of(model, *data[i + 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))


@pytest.mark.parametrize("mode", MODES)
def test_zeroing_instead_of_clearing(mode):
    def run(mode):
        model = make_net()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fusion = fuse(model, optimizer, mode) if mode else None
        for x, y in batches(5):
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))


def test_gradients_after_step_cannot_be_mistaken_for_zero():
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "backward"):
        step(model, optimizer, *next(batches(1)))
        for x, y in batches(3):
            loss_of(model, x, y).backward()
            optimizer.step()
            with pytest.raises(GradweaveError, match=r"on a \.grad"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())


def test_a_backward_without_zero_grad_is_refused_under_backward():
    model = make_net()
    optimizer = adamw(model)
    with fuse(model, optimizer, "backward"):
        for x, y in batches(2):
            step(model, optimizer, x, y)
        x, y = next(batches(1))
        loss_of(model, x, y).backward()
        optimizer.step()
        with pytest.raises(GradweaveError, match=r"zero_grad\(\)"):
            loss_of(model, x, y).backward()


def test_sparse_gradients_are_refused_or_left_alone():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 8, sparse=True)
            self.head = nn.Linear(8, 3)

        def forward(self, words):
            return self.head(self.table(words))

    def run(mode):
        torch.manual_seed(0)
        model = Words()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        fusion = fuse(model, optimizer, mode) if mode else None
        for _ in range(4):
            model(torch.tensor([1, 4])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run("forward"), run(None))
    with pytest.raises(GradweaveError, match="sparse=False"):
        run("backward")


def test_a_fusion_does_not_keep_the_model_alive():
    model = make_net()
    optimizer = adamw(model)
    fusion = fuse(model, optimizer, "forward")
    step(model, optimizer, *next(batches(1)))
    fusion.detach()
    gone = weakref.ref(model)
    del model, optimizer, fusion
    import gc

    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("mode", MODES)
def test_compiled_models(mode):
    def run(mode):
        model = make_net()
        optimizer = adamw(model)
        compiled = torch.compile(model, backend="aot_eager")
        fusion = fuse(compiled, optimizer, mode) if mode else None
        for x, y in batches(5):
            step(compiled, optimizer, x, y)
        if fusion:
            fusion.detach()
        return model, optimizer

    assert_same(run(mode), run(None))
