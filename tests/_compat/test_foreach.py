"""Operations on many tensors give what a loop over them gives."""

import torch

from gradweave._compat import foreach


def make():
    return [torch.arange(4.0) + n for n in range(3)]


def test_they_are_a_loop():
    each = [torch.tensor(float(n)) for n in range(3)]
    assert all(map(torch.equal, foreach.multiplied(make(), 2.0), [2 * t for t in make()]))
    assert all(
        map(torch.equal, foreach.multiply_each(make(), each), [t * n for t, n in zip(make(), each, strict=True)])
    )
    assert all(map(torch.equal, foreach.norms(make()), [t.norm() for t in make()]))
    for change, expected in (
        (lambda t: foreach.multiply_all(t, 3.0), [3 * t for t in make()]),
        (lambda t: foreach.add_all(t, make(), 2.0), [3 * t for t in make()]),
        (foreach.add_one, [t + 1 for t in make()]),
        (foreach.zero_all, [0 * t for t in make()]),
        (lambda t: foreach.copy_all(t, [t + 1 for t in make()]), [t + 1 for t in make()]),
    ):
        changed = make()
        change(changed)
        assert all(map(torch.equal, changed, expected))
    foreach.zero_all([])
    foreach.copy_all([], [])


def test_only_a_scaler_is_told_that_it_asks():
    class Optimizer(torch.optim.SGD):
        answers: list[bool] = []  # noqa: RUF012

        @property
        def _step_supports_amp_scaling(self):
            self.answers.append(foreach.asked_by_grad_scaler())
            return False

    p = torch.nn.Parameter(torch.ones(1))
    optimizer = Optimizer([p], lr=0.1)
    assert not optimizer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.answers[0] is False
    assert any(optimizer.answers)
