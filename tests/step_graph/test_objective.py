import pytest
import torch
from torch import nn
from torch._dynamo import export

from gradweave.step_graph.errors import NotOneGraphError, RefusedError
from gradweave.step_graph.objective import (
    Objective,
    differentiate,
    loss_and_extras,
    loss_output_of,
    mark_loss,
    on_device_of,
    outputs_of,
)


def test_a_loss_comes_alone_or_with_one_other_thing():
    loss = torch.ones(())
    assert loss_and_extras(loss) == (loss, None)
    assert loss_and_extras((loss, {"a": 1})) == (loss, {"a": 1})


@pytest.mark.parametrize("result", [torch.ones(2), 1.0, None, (torch.ones(()), 1, 2), (torch.ones(3), 1)])
def test_what_is_no_loss_is_refused(result):
    with pytest.raises(RefusedError, match="one element"):
        loss_and_extras(result)


def captured(function, *inputs):
    return export(function, aten_graph=False)(*inputs).graph_module


def test_the_marked_loss_is_found_among_the_outputs():
    forward = captured(lambda x: [x * 2, mark_loss(x.sum())], torch.ones(3))
    marked = [node for node in forward.graph.nodes if (node.meta.get("custom") or {}).get("gradweave") == "loss"]
    assert marked
    assert outputs_of(forward)[loss_output_of(forward)] in marked


def test_an_unmarked_loss_is_refused():
    with pytest.raises(RefusedError, match="does not depend on the model"):
        loss_output_of(captured(lambda x: [x * 2], torch.ones(3)))


def test_gradients_have_memory_and_layout_of_their_own():
    """Two parameters with one gradient, one that is transposed, and one without."""
    inputs = [torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 3), torch.ones(1), torch.full((2, 3), 2.0)]

    def forward(one, two, three, unused, x):
        return [((one + two) * x.t()).sum() + (three.t() * x.t()).sum()]

    outputs, params, grads = differentiate(Objective(forward, inputs, range(4), 0), inputs)
    assert outputs[0].item() == 36.0
    assert grads[3] is None
    assert torch.equal(grads[0], grads[1])
    assert len({grad.untyped_storage().data_ptr() for grad in grads[:3]}) == 3
    assert all(grad.stride() == p.stride() for p, grad in zip(params[:3], grads, strict=False))
    assert not any(x.requires_grad for x in inputs)


def test_gradients_are_of_the_scaled_loss():
    inputs = [torch.ones(2)]
    _, _, (grad,) = differentiate(Objective(lambda x: [(x * 3).sum()], inputs, [0], 0), inputs, [torch.tensor(4.0)])
    assert grad.tolist() == [12.0, 12.0]


def test_sparse_gradients_are_no_part_of_a_graph():
    inputs = [torch.ones(4, 2)]
    objective = Objective(
        lambda table: [nn.functional.embedding(torch.tensor([1]), table, sparse=True).sum()], inputs, [0], 0
    )
    with pytest.raises(NotOneGraphError, match=r"layout torch\.sparse_coo"):
        differentiate(objective, inputs)


def test_a_batch_stays_where_the_model_is():
    batch = {"x": [torch.ones(2), "name"]}
    assert on_device_of(nn.Linear(2, 2), batch) is batch
    assert on_device_of(nn.Identity(), batch) is batch
    moved = on_device_of(nn.Linear(2, 2, device="meta"), batch)
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1] == "name"
