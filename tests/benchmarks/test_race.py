"""The race of optimizers: as many trials for everybody, no best at an edge, choices apart from what is reported."""

import copy
import math

import pytest
import torch
from torch import nn


@pytest.fixture
def race(scripts):
    import race

    return race


@pytest.fixture
def search(scripts):
    import race_search

    return race_search


def searched(search, figure, *, budget=12, values=7, start=3, **options):
    worth = {}
    while places := search.next_points(worth, budget=budget, values=values, start=start, **options):
        assert not set(places) & set(worth)
        worth.update({place: figure(*place) for place in places})
    return worth


@pytest.mark.parametrize("lowest", [(0, 3), (1, 2), (-5, 4), (7, 3), (3, 5)])
def test_a_search_finds_the_lowest_point_and_has_tried_all_around_it(search, lowest):
    worth = searched(search, lambda rate, value: (rate - lowest[0]) ** 2 + 3 * (value - lowest[1]) ** 2, budget=16)
    best = min(worth, key=worth.get)
    assert abs(best[0] - lowest[0]) <= 1
    assert best[1] == lowest[1]
    assert not search.is_at_edge(worth)


@pytest.mark.parametrize("lowest", [(0, 3), (-40, 0), (2, 6)])
def test_everybody_has_as_many_trials(search, lowest):
    worth = searched(search, lambda rate, value: abs(rate - lowest[0]) + abs(value - lowest[1]))
    assert len(worth) == 12


def test_a_best_that_has_no_neighbour_on_one_side_is_at_an_edge(search):
    assert search.is_at_edge(searched(search, lambda rate, value: -rate))
    assert search.is_at_edge(searched(search, lambda rate, value: rate**2 + value))
    assert search.is_at_edge({(0, 1): 0.0, (2, 1): 1.0, (0, 0): 1.0, (0, 2): 1.0})
    assert not search.is_at_edge({(0, 1): 0.0, (2, 1): 1.0, (-1, 1): 1.0, (0, 0): 1.0, (0, 2): 1.0})


@pytest.mark.parametrize("safe", [-1, 1])
def test_a_search_goes_on_where_training_does_not_diverge(search, safe):
    worth = searched(search, lambda rate, _: rate * safe if rate * safe > 5 else math.inf, safe=safe)
    assert math.isfinite(min(worth.values()))


def regression(generator):
    x = torch.randn(32, 6, generator=generator)
    return x, torch.stack((x[:, 0] * x[:, 1], x[:, 2].sin()), 1)


@pytest.fixture
def task(race):
    """A small regression that is judged by other samples for choices than for the report."""
    from eva_tasks import Task

    def make_model():
        return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))

    def loss(model, x, y):
        return (model(x) - y).square().mean()

    def on(seed):
        return lambda model: float(loss(model, *regression(torch.Generator().manual_seed(seed))))

    return Task(make_model, regression, loss, on(100), "test error", (40,), points=4, validate=on(200))


NAMES = ["sgd", "adamw", "muon", "shampoo", "soap", "kfac", "eva", "eva-f", "eva as published"]


def test_the_field_is_complete(race):
    assert list(race.CONTENDERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_everybody_learns(race, task, name):
    usual = race.CONTENDERS[name].values.index(race.CONTENDERS[name].usual)
    trial = race.Trial(name, 0, usual, race.REPORT, 1, 40)
    rows = race.train("small", task, trial, "cpu", math.inf)
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    torch.manual_seed(1)
    with torch.no_grad():
        assert float(rows[-1]["test"]) < 0.98 * task.test(task.make_model())
    assert rows[-1]["validation"] != rows[-1]["test"]


def test_choices_never_see_the_test_part(race, task, monkeypatch):
    blind = copy.copy(task)
    object.__setattr__(blind, "test", lambda model: pytest.fail("the test part was looked at"))
    (row,) = race.train("small", blind, race.Trial("sgd", 0, 2, race.CHOICE, 0, 8), "cpu", math.inf)
    assert row["test"] == "nan"
    assert math.isfinite(float(row["validation"]))


def test_a_training_that_diverges_is_a_row_and_one_that_is_not_done_in_time_is_none(race, task):
    (row,) = race.train("small", task, race.Trial("sgd", 16, 2, race.CHOICE, 0, 40), "cpu", math.inf)
    assert row["validation"] == "nan"
    assert race.train("small", task, race.Trial("sgd", 0, 2, race.CHOICE, 0, 40), "cpu", 0.0) is None


def test_a_race_goes_on_where_it_was_cut_short(race, task, tmp_path):
    from tables import append, read

    path, seen = tmp_path / "race.csv", []
    while trials := race.missing_trials("adamw", read(path), trials=7, steps=8):
        seen += trials[:1]
        append(path, race.train("small", task, trials[0], "cpu", math.inf))
    assert len(set(seen)) == len(seen) == 7 + 3
    assert [(trial.part, trial.seed) for trial in seen[7:]] == [(race.REPORT, seed) for seed in (1, 2, 3)]
    worth = race.worths(read(path), "adamw", 8)
    assert {(trial.rate, trial.value) for trial in seen[7:]} == {min(worth, key=worth.get)}
    *_, line = race.table(read(path), [{"contender": "adamw", "ms": "1.5"}])
    assert line.startswith("| adamw | ")
    assert line.endswith(" | 1.5 |")
    assert "| 7" in line


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "shampoo", "soap", "eva", "eva-f", "eva as published"])
@pytest.mark.parametrize("rate", [0, 4])
def test_weights_shrink_by_the_same_share_whatever_the_rate(race, task, name, rate):
    """Of gradients of zero: but for momentum's part in the first step, which SGD's decay takes into account."""
    contender = race.CONTENDERS[name]
    model = task.make_model()
    usual = contender.values.index(contender.usual)
    before = [p.detach().clone() for p in model.parameters()]
    training = contender.train(model, task, contender.rate_at(rate), contender.values[usual], 1e-3)
    model.requires_grad_(True)
    steps = 100
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for optimizer in training.optimizers:
            optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        share = float((1 - p.detach() / old).mean())
        assert share == pytest.approx(1 - (1 - 1e-3) ** steps, rel=0.15), name
