import json

import pytest
from hypothesis import given

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, Demand, LayerCost
from schedule.strategies import costs

LAYER = {"name": "a", "forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0}


@given(network=costs())
def test_a_saved_file_loads_as_the_same_costs(network, tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "network.json"
    network.save(path)
    assert Costs.load(path) == network


def write(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    return path


def test_demands_and_defaults_are_read(tmp_path):
    path = write(tmp_path, json.dumps({"layers": [{**LAYER, "weight_grad_demand": {"compute": 0.25}}]}))
    network = Costs.load(path)
    assert network.name == "costs"
    assert network.layers[0].weight_grad_demand == Demand(0.25, 1.0)
    assert network.layers[0].update == 0.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", 'a list under "layers"'),
        ('{"layers": 3}', 'a list under "layers"'),
        ('{"layers": []}', "at least one layer"),
        ('{"layers": [3]}', "layer 0=3: write an object"),
        (json.dumps({"layers": [{**LAYER, "forwards": 1}]}), "layer 0, key='forwards': use one of"),
        (json.dumps({"layers": [{"name": "a", "forward": 1, "weight_grad": 1}]}), "key='input_grad': is missing"),
        (json.dumps({"layers": [{**LAYER, "forward": -1}]}), "layer 'a', forward=-1: give a number, zero or more"),
        (json.dumps({"layers": [{**LAYER, "forward": "1"}]}), "layer 'a', forward='1': give a number, zero or more"),
        (json.dumps({"layers": [{**LAYER, "forward": float("nan")}]}), "forward=nan"),
        (json.dumps({"layers": [{**LAYER, "forward": True}]}), "forward=True"),
        (json.dumps({"layers": [{**LAYER, "forward": 10**400}]}), "forward=inf"),
        (json.dumps({"layers": [{**LAYER, "forward": 1e308}]}), "less than 1e+15"),
        (json.dumps({"layers": [LAYER], "layer": 1}), "key='layer': is unknown"),
        ("[" * 100_000, "is not valid JSON"),
        (json.dumps({"layers": [{**LAYER, "input_bytes": 1.5}]}), "input_bytes=1.5: give whole bytes"),
        (json.dumps({"layers": [{**LAYER, "forward_demand": {"compute": 2}}]}), "shares between 0 and 1"),
        (json.dumps({"layers": [{**LAYER, "forward_demand": 2}]}), '{"compute": 0.5, "memory": 1.0}'),
        (json.dumps({"layers": [{**LAYER, "forward_demand": {"speed": 1}}]}), '{"compute": 0.5, "memory": 1.0}'),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, text, message):
    with pytest.raises(ArgumentError) as error:
        Costs.load(write(tmp_path, text))
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"nothing\.json.*cannot be read"):
        Costs.load(tmp_path / "nothing.json")


def test_sums():
    network = Costs((LayerCost("a", 1, 2, 3, 4, parameter_bytes=5), LayerCost("b", 1, 1, 1, parameter_bytes=6)))
    assert network.compute_seconds == 13
    assert network.parameter_bytes == 11


def test_uniform_is_a_second_each():
    assert Costs.uniform(3).compute_seconds == 9
    with pytest.raises(ArgumentError, match="layers=0"):
        Costs.uniform(0)
