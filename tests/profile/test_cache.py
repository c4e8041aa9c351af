import json
import logging

import pytest
import torch
from torch import nn, optim

from gradweave import _logging
from gradweave.errors import ArgumentError
from gradweave.profile import cache, cached_costs
from gradweave.schedule.costs import Costs


def loss_fn(model, x):
    return model(x).sum()


def setting(width=4, rows=2, dtype=torch.float32, make=optim.SGD, **form):
    model = nn.Sequential(nn.Linear(width, 4), nn.Dropout(0.1), nn.Linear(4, 1)).to(dtype)
    return model, loss_fn, make(model.parameters(), lr=0.1, **form), (torch.ones(rows, width, dtype=dtype),)


@pytest.fixture
def measured(monkeypatch):
    """Counts measurements."""
    _logging._log_once.cache_clear()
    made = []

    def measure(*_, **__):
        made.append(Costs.uniform(2 + len(made)))
        return made[-1]

    monkeypatch.setattr(cache, "measure_costs", measure)
    return made


def test_the_same_is_measured_once(tmp_path, measured):
    first = cached_costs(*setting(), folder=tmp_path)
    assert cached_costs(*setting(), folder=tmp_path) == first
    assert len(measured) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_real_measurement_comes_back_as_it_was(tmp_path):
    first = cached_costs(*setting(), folder=tmp_path, rounds=1)
    assert cached_costs(*setting(), folder=tmp_path, rounds=1) == first
    [path] = [path for path in tmp_path.iterdir() if not path.name.endswith(".key.json")]
    assert Costs.load(path) == first


@pytest.mark.parametrize(
    "other",
    [
        {"width": 5}, {"rows": 3}, {"dtype": torch.float64}, {"make": optim.Adam}, {"foreach": True},
    ],
)  # fmt: skip
def test_another_shape_type_or_optimizer_is_another(tmp_path, measured, other):
    cached_costs(*setting(), folder=tmp_path)
    cached_costs(*setting(**other), folder=tmp_path)
    assert len(measured) == 2


def test_settings_around_the_call_count(tmp_path, measured, monkeypatch):
    cached_costs(*setting(), folder=tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        cached_costs(*setting(), folder=tmp_path)
    cached_costs(*setting(), folder=tmp_path, also="bfloat16 inside")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    cached_costs(*setting(), folder=tmp_path)
    model, *rest = setting()
    model[1].p = 0.5
    cached_costs(model, *rest, folder=tmp_path)
    assert len(measured) == 5


def spoil_costs(costs, key):
    costs.write_text(costs.read_text().replace("1.0", "2.0", 1))


def cut_costs(costs, key):
    costs.write_text(costs.read_text()[:20])


def cut_key(costs, key):
    key.write_text("{")


def foreign_key(costs, key):
    note = json.loads(key.read_text())
    note["key"]["device"] = "another machine"
    key.write_text(json.dumps(note))


def other_format(costs, key):
    key.write_text(json.dumps({**json.loads(key.read_text()), "format": 0}))


def no_key(costs, key):
    key.unlink()


def no_costs(costs, key):
    costs.unlink()


@pytest.mark.parametrize("spoil", [spoil_costs, cut_costs, cut_key, foreign_key, other_format, no_key, no_costs])
def test_what_does_not_agree_is_measured_again_with_a_warning(tmp_path, measured, spoil, caplog):
    cached_costs(*setting(), folder=tmp_path)
    [key] = tmp_path.glob("*.key.json")
    spoil(key.with_name(key.name.replace(".key", "")), key)
    with caplog.at_level(logging.WARNING, "gradweave"):
        assert cached_costs(*setting(), folder=tmp_path) == measured[1]
    assert "measured again" in caplog.text
    assert cached_costs(*setting(), folder=tmp_path) == measured[1]
    assert len(measured) == 2


def test_the_default_folder_is_the_users_cache(tmp_path, measured, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    cached_costs(*setting())
    assert len(list((tmp_path / "mine" / "gradweave" / "costs").iterdir())) == 2
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / ".cache" / "gradweave" / "costs"


def test_a_folder_that_cannot_be_written(tmp_path, measured, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="folder"):
        cached_costs(*setting(), folder=tmp_path / "file" / "below")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "gradweave"):
        assert cached_costs(*setting()) == measured[-1]
    assert "not saved" in caplog.text
