"""State dicts: the keys of state and groups, its precision, and training that resumes bit for bit."""

import copy
import io

import pytest
import torch

from gradweave.optim import Eva, EvaF, EvaS
from gradweave.optim.state import ParameterGroup, ParameterState, learning_rate
from optim.models import images, loss_of, make_conv, make_mlp, rows, train, weights

FAMILY = [Eva, EvaF, EvaS]


every = pytest.mark.parametrize("cls", FAMILY)


@every
@pytest.mark.parametrize("mode", [{}, {"reference": True, "lr": 0.02}])
def test_resuming_is_bit_for_bit(cls, mode):
    batches = images(6)
    model = make_conv()
    optimizer = cls(model, **mode)
    train(model, optimizer, batches[:3])
    loss_of(model, batches[3]).backward()
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]), saved)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, batches[4:])
    other = make_conv(seed=1)
    resumed = cls(other, **mode)
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for p, grad in zip(other.parameters(), states[2], strict=True):
        p.grad = grad
    resumed.step()
    resumed.zero_grad()
    train(other, resumed, batches[4:])
    assert torch.equal(weights(model), weights(other))


@every
def test_vectors_of_low_precision_models_stay_precise_in_state_dicts(cls):
    model = make_mlp(torch.bfloat16)
    optimizer = cls(model)
    train(model, optimizer, rows(2, dtype=torch.bfloat16))
    other = cls(copy.deepcopy(model))
    other.load_state_dict(optimizer.state_dict())
    for group, others in zip(optimizer.param_groups, other.param_groups, strict=True):
        for p, q in zip(group["params"], others["params"], strict=True):
            for key, value in optimizer.state[p].items():
                if "vector" in key or key in ("record", "size"):
                    assert value.dtype == other.state[q][key].dtype == torch.float32
                    assert torch.equal(value, other.state[q][key])


@every
def test_a_state_dict_can_be_loaded_before_the_first_step(cls):
    model = make_mlp()
    optimizer = cls(model)
    optimizer.load_state_dict(optimizer.state_dict())
    expected = make_mlp()
    assert train(model, optimizer, rows()) == train(expected, cls(expected), rows())


@every
def test_distributed_checkpoints_find_every_state_by_its_parameters_name(cls):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = make_conv()
    optimizer = cls(model)
    before = weights(model)
    state = get_optimizer_state_dict(model, optimizer)
    assert torch.equal(before, weights(model))
    assert "mix.weight" in state["state"]
    train(model, optimizer, images(2))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other = copy.deepcopy(model)
    resumed = cls(other)
    set_optimizer_state_dict(other, resumed, saved)
    train(model, optimizer, images(2))
    train(other, resumed, images(2))
    assert torch.equal(weights(model), weights(other))


COLLECTED = {"record", "input_vector", "columns_first", "momentum_buffer"}
KEYS = {
    (Eva, ""): COLLECTED | {"size", "output_vector"},
    (Eva, "faithful"): COLLECTED | {"output_vector"},
    (EvaF, ""): COLLECTED | {"size"},
    (EvaF, "reference"): COLLECTED,
    (EvaS, ""): {"mode_vectors", "momentum_buffer", "size"},
    (EvaS, "reference"): {"mode_vectors", "momentum_buffer"},
}


@pytest.mark.parametrize(("cls", "mode"), list(KEYS))
def test_keys_of_a_checkpoint(cls, mode):
    """Changing one would lose the checkpoints that there are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.LayerNorm(16))
    optimizer = cls(model, **({mode: True} if mode else {}), first_order="adamw")
    train(model, optimizer, rows(1))
    assert optimizer.state[model[0].weight].keys() == KEYS[cls, mode]
    has_own_state = cls is EvaS  # whose biases are no columns of matrices
    moments = {"exp_avg", "exp_avg_sq", "step"}
    assert optimizer.state[model[0].bias].keys() == (moments if has_own_state else {"momentum_buffer"})
    assert optimizer.state[model[1].weight].keys() == moments
    assert all(state.keys() <= ParameterState.__annotations__.keys() for state in optimizer.state.values())
    for group in optimizer.param_groups:
        assert group.keys() == ParameterGroup.__annotations__.keys()


def test_a_group_of_an_earlier_checkpoint_has_no_ratio():
    model = make_mlp()
    optimizer = EvaF(model, lr=0.5)
    for group in optimizer.param_groups:
        del group["lr_ratio"]
        assert learning_rate(group) == 0.5
