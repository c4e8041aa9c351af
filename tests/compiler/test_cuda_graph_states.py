"""The states of a step that is to be captured, without a GPU: captures and replays are played."""

import pytest
import torch

from gradweave.compiler import cuda_graph
from gradweave.compiler.cuda_graph import WARM_UP_STEPS, Captured, CaptureState


class Step:
    """A compiled step that doubles its first input in place, and returns the second one plus 1."""

    def __init__(self):
        self.calls = []
        self.state = [torch.zeros(1)]

    def fits(self):
        return True

    def may_fit_again(self):
        return True

    def tensors(self):
        return self.state

    def upload(self):
        self.calls.append("upload")

    def launch(self, inputs):
        weight, x = inputs
        weight.mul_(2)
        return [x + 1]

    def run(self, inputs):
        self.calls.append("run")
        return self.launch(inputs)

    def finish(self):
        self.calls.append("finish")


class Graph:
    """A graph that runs its work again on the tensors it was captured with."""

    def __init__(self, step, static, outputs):
        self.step, self.static, self.outputs = step, static, outputs

    def replay(self):
        self.step.calls.append("replay")
        for output, made in zip(self.outputs, self.step.launch(self.static), strict=True):
            output.copy_(made)


@pytest.fixture
def captured(monkeypatch):
    """A step, what captures it, and a list of captures; an error in the list is raised by the next capture."""
    step, captures = Step(), []

    def capture(self, inputs):
        if captures and isinstance(captures[-1], Exception):
            raise captures.pop()
        captures.append(self._in_place.copy())
        self._static = [x if index in self._in_place else x.clone() for index, x in enumerate(inputs)]
        self._addresses, self._state_addresses = self._locate(inputs), self._locate_state()
        self._outputs = [torch.zeros(1)]
        self._graph = Graph(step, self._static, self._outputs)
        self._state = CaptureState.CAPTURED

    monkeypatch.setattr(Captured, "_capture", capture)
    monkeypatch.setattr(cuda_graph, "free_matmul_workspaces", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return step, Captured(step, in_place=[0], changed=[0]), captures


def take(captured, weight, count=1):
    results = [captured.run([weight, torch.full((1,), float(number))]) for number in range(count)]
    return [output.item() for (output,) in results]


def test_it_is_captured_after_warm_up_and_then_replayed(captured):
    step, captured, captures = captured
    weight = torch.ones(1)
    assert take(captured, weight, WARM_UP_STEPS) == [1.0, 2.0]
    assert captures == []
    assert take(captured, weight, 3) == [1.0, 2.0, 3.0]
    assert captures == [{0}]
    assert step.calls[WARM_UP_STEPS:] == ["upload", "replay", "finish"] * 3
    assert weight.item() == 2.0 ** (WARM_UP_STEPS + 3)


def test_results_belong_to_the_caller(captured):
    _, captured, _ = captured
    weight = torch.ones(1)
    take(captured, weight, WARM_UP_STEPS)
    (first,) = captured.run([weight, torch.zeros(1)])
    captured.run([weight, torch.ones(1)])
    assert first.item() == 1.0


@pytest.mark.parametrize("what", ["weight", "state"])
def test_it_is_captured_again_when_a_tensor_has_moved(captured, what):
    step, captured, captures = captured
    weight = torch.ones(1)
    take(captured, weight, WARM_UP_STEPS + 1)
    if what == "weight":
        weight = weight.clone()
    else:
        step.state = [torch.zeros(1)]
    take(captured, weight)
    assert captures == [{0}, {0}]
    take(captured, weight)
    assert len(captures) == 2
    assert weight.item() == 2.0 ** (WARM_UP_STEPS + 3)


def test_an_input_that_moves_and_is_not_written_is_copied_from_then_on(monkeypatch, captured):
    step, _, captures = captured
    captured = Captured(step, in_place=[0, 1], changed=[0])
    weight = torch.ones(1)
    kept = [torch.full((1,), float(number)) for number in range(6)]  # alive, so that no two have one address
    results = [captured.run([weight, x])[0].item() for x in kept]
    assert results == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert captures == [{0, 1}, {0}]


def test_a_step_that_cannot_be_captured_is_run_and_not_tried_again(captured, warned):
    step, captured, captures = captured
    weight = torch.ones(1)
    take(captured, weight, WARM_UP_STEPS)
    captures.append(RuntimeError("operation not permitted when stream is capturing\nmore"))
    take(captured, weight, 2)
    assert captures == []
    assert step.calls == ["run"] * (WARM_UP_STEPS + 2)
    (message,) = warned()
    assert message.endswith("operation not permitted when stream is capturing")


def test_a_capture_without_memory_is_tried_again(captured):
    _, captured, captures = captured
    weight = torch.ones(1)
    take(captured, weight, WARM_UP_STEPS)
    captures.append(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        take(captured, weight)
    assert weight.item() == 2.0**WARM_UP_STEPS
    take(captured, weight)
    assert captures == [{0}]
