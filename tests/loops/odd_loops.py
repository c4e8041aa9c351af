"""Random training loops: lists of operations, how to run each, and what the loop sees of it."""

import copy
import io
import math
import threading
from collections import defaultdict
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from loops.subjects import BODIES, OPTIMIZERS, WIDTH, Failure, Trained

ROWS = 3


@dataclass(frozen=True)
class Loop:
    """A model, an optimizer and operations in order, each a name with its arguments."""

    body: str
    optimizer: str
    operations: tuple[tuple, ...]


class Run:
    """Variables of a running loop."""

    def __init__(self, loop, attach):
        torch.manual_seed(0)
        self.model = Trained(BODIES[loop.body]())
        self.optimizer = OPTIMIZERS[loop.optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.loss = None
        self.batch = 0
        self.saved = None
        self.handles = list(attach(self.model, self.optimizer))

    def detach(self):
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.detach()

    @property
    def dtype(self):
        return self.model.head.weight.dtype

    def next_batch(self):
        self.batch += 1
        return batch_of(self.batch, self.dtype)

    def gradients(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def do(self, operation):
        """Run one operation, and return what the loop sees of it."""
        name, *arguments = operation
        return getattr(self, "_" + name)(*arguments)

    # the step

    def _forward(self, kind):
        x, y = self.next_batch()
        if kind == "fails":
            self.model.fails_in = "forward"
        try:
            with torch.autocast(
                "cpu", torch.bfloat16, enabled="autocast" in kind, cache_enabled="no cache" not in kind
            ):
                out = self.model(x)
                if "twice" in kind:
                    out = out + self.model(x.flip(0))
        finally:
            self.model.fails_in = ""
        self.loss = F.mse_loss(out.to(self.dtype), y)
        if kind == "nan":
            self.loss = self.loss * math.nan
        return self.loss.detach().clone()

    def _backward(self, kind):
        if self.loss is None:
            return
        if kind == "fails":
            self.model.fails_in = "backward"
            try:
                self._forward("plain")
            finally:
                self.model.fails_in = ""
        if kind == "twice":
            self.loss.backward(retain_graph=True)
        if kind == "after a thread's":
            thread = threading.Thread(target=self._forward_and_backward)
            thread.start()
            thread.join()
        try:
            self.loss.backward(retain_graph=kind == "kept")
        finally:
            if kind != "kept":
                self.loss = None

    def _forward_and_backward(self):
        x, y = self.next_batch()
        F.mse_loss(self.model(x), y).backward()

    def _step(self, kind):
        if kind == "if finite" and any(not g.isfinite().all() for g in self.gradients()):
            self.model.zero_grad()
            return "skipped"
        if kind == "closure":
            return self._closure_step()
        if kind == "fails":
            if hasattr(self.optimizer, "fails"):
                self.optimizer.fails = True
            else:
                hook = self.optimizer.register_step_pre_hook(_fail)
        try:
            self.optimizer.step()
        finally:
            if kind == "fails":
                if hasattr(self.optimizer, "fails"):
                    self.optimizer.fails = False
                else:
                    hook.remove()
        norm = getattr(self.optimizer, "norm", None)
        return norm.clone() if norm is not None else None

    def _closure_step(self):
        x, y = self.next_batch()

        def closure():
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(x), y)
            loss.backward()
            return loss

        return self.optimizer.step(closure).detach().clone()

    def _zero_grad(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)

    def _model_zero_grad(self):
        self.model.zero_grad()

    def _schedule(self):
        self.scheduler.step()
        return [group["lr"] for group in self.optimizer.param_groups]

    # gradients

    def _clip_norm(self):
        return nn.utils.clip_grad_norm_(self.model.parameters(), 0.05).clone()

    def _clip_value(self):
        nn.utils.clip_grad_value_(self.model.parameters(), 0.01)

    def _norm(self):
        return [g.norm() for g in self.gradients()]

    def _scale_gradients(self):
        for g in self.gradients():
            g.mul_(0.5)

    def _assign_gradients(self):
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad = p.grad * 2

    def _take_gradient(self):
        next(self.model.parameters()).grad = None

    # weights

    def _read(self, how):
        if how == "state_dict":
            return {name: value.clone() for name, value in self.model.state_dict().items()}
        read = {
            "data": lambda p: p.data.clone(),
            "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
            "sum": lambda p: p.detach().sum(),
            "item": lambda p: p.flatten()[0].item(),
        }[how]
        return [read(p) for p in self.model.parameters()]

    def _edit(self, how):
        for p in self.model.parameters():
            if how == "data":
                p.data.mul_(0.9)
            elif how == "assign":
                p.data = p.data * 0.9
            else:
                with torch.no_grad():
                    p.mul_(0.9)

    def _convert(self, dtype):
        self.model.to(getattr(torch, dtype))

    def _freeze(self, frozen):
        next(self.model.body.parameters()).requires_grad_(not frozen)

    def _wake(self):
        self.model.awake = True

    # the optimizer

    def _read_state(self):
        return copy.deepcopy(self.optimizer.state_dict())

    def _reset(self, how):
        if how == "clear":
            self.optimizer.state.clear()
        else:
            self.optimizer.state = defaultdict(dict)

    def _rate(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _add_group(self):
        known = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        new = [p for p in self.model.parameters() if id(p) not in known]
        if new:
            self.optimizer.add_param_group({"params": new, "lr": 0.03})
            self.model.awake = True

    # evaluation, copies, checkpoints

    def _evaluate(self, where):
        if where == "inline":
            return self._output()
        made = {}
        count = 2 if where == "threads" else 1
        threads = [threading.Thread(target=lambda n=n: made.update({n: self._output()})) for n in range(count)]
        self.model.eval()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.model.train()
        return [made[n] for n in range(count)]

    def _output(self):
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            out = self.model(batch_of(99, self.dtype)[0])
        self.model.train(training)
        return out

    def _copy(self):
        twin = copy.deepcopy(self.model)
        twin.eval()
        twin(batch_of(98, self.dtype)[0]).sum().backward()
        return [p.detach() for p in twin.parameters()], [p.grad for p in twin.parameters()]

    def _save(self):
        written = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict()), written)
        self.saved = written.getvalue()
        return torch.load(io.BytesIO(self.saved))

    def _load(self, what):
        if self.saved is None:
            return
        model, optimizer = torch.load(io.BytesIO(self.saved))
        if what in ("model", "both"):
            self.model.load_state_dict(model)
        if what in ("optimizer", "both"):
            self.optimizer.load_state_dict(optimizer)


def _fail(*_):
    raise Failure("step")


def batch_of(number, dtype):
    """Return a batch by its number, the same in every run."""
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randn(2 * ROWS, WIDTH, generator=generator)
    return drawn[:ROWS].to(dtype), drawn[ROWS:].to(dtype)


# which loops there are

_FORWARDS = ("plain",) * 4 + ("twice", "autocast", "autocast, twice", "autocast, no cache, twice", "nan", "fails")
_STEPS = ("plain",) * 4 + ("closure", "if finite", "fails")
_TEMPLATES = {
    "usual": (("forward", "plain"), ("backward", "once"), ("step", "plain"), ("zero_grad", True)),
    "zero first": (("zero_grad", True), ("forward", "plain"), ("backward", "once"), ("step", "plain")),
    "zeros": (("zero_grad", False), ("forward", "plain"), ("backward", "once"), ("step", "plain")),
    "clips": (("forward", "plain"), ("backward", "once"), ("clip_norm",), ("step", "plain"), ("zero_grad", True)),
    "accumulates": (
        ("forward", "plain"), ("backward", "once"), ("forward", "plain"), ("backward", "once"), ("step", "plain"),
        ("zero_grad", True),
    ),
    "skips": (("forward", "plain"), ("backward", "once"), ("step", "if finite"), ("zero_grad", True)),
    "autocast": (("forward", "autocast"), ("backward", "once"), ("step", "plain"), ("zero_grad", True)),
    "scheduled": (
        ("forward", "plain"), ("backward", "once"), ("step", "plain"), ("schedule",), ("zero_grad", True)
    ),
}  # fmt: skip
_ODD = st.one_of(
    st.tuples(st.just("forward"), st.sampled_from(_FORWARDS)),
    st.tuples(st.just("backward"), st.sampled_from(("once", "kept", "twice", "fails", "after a thread's"))),
    st.tuples(st.just("step"), st.sampled_from(_STEPS)),
    st.tuples(st.just("zero_grad"), st.booleans()),
    st.tuples(st.just("read"), st.sampled_from(("data", "state_dict", "numpy", "sum", "item"))),
    st.tuples(st.just("edit"), st.sampled_from(("data", "assign", "in place"))),
    st.tuples(st.just("convert"), st.sampled_from(("float64", "float32"))),
    st.tuples(st.just("freeze"), st.booleans()),
    st.tuples(st.just("reset"), st.sampled_from(("clear", "assign"))),
    st.tuples(st.just("rate"), st.sampled_from((0.0, 0.02))),
    st.tuples(st.just("evaluate"), st.sampled_from(("inline", "thread", "threads"))),
    st.tuples(st.just("load"), st.sampled_from(("model", "optimizer", "both"))),
    st.sampled_from(
        [(name,) for name in (
            "model_zero_grad", "schedule", "clip_norm", "clip_value", "norm", "scale_gradients", "assign_gradients",
            "take_gradient", "wake", "read_state", "add_group", "copy", "save",
        )]
    ),
)  # fmt: skip


@st.composite
def loops(draw):
    """Generate a usual loop of a few steps, with some unusual operations added and some usual ones left out."""
    template = _TEMPLATES[draw(st.sampled_from(sorted(_TEMPLATES)))]
    operations = list(template) * draw(st.integers(1, 8))
    for place, odd in draw(st.lists(st.tuples(st.integers(0, 31), _ODD), max_size=5)):
        operations.insert(place % (len(operations) + 1), odd)
    for place in draw(st.lists(st.integers(0, 31), max_size=2)):
        del operations[place % len(operations)]
    return Loop(draw(st.sampled_from(sorted(BODIES))), draw(st.sampled_from(sorted(OPTIMIZERS))), tuple(operations))
