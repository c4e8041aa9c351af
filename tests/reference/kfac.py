"""K-FAC with every matrix written out, after Martens and Grosse (arXiv 1503.05671, algorithm 2)."""

import math

import torch
from torch import nn
from torch.func import functional_call, jacrev


def joined(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


class SlowKFAC:
    """K-FAC for models of linear layers with biases, each applied once; other parameters have a diagonal.

    Args:
        model: The model, trained in place, in double precision.
        likelihood: Likelihood with losses and gradients of drawn targets.
        hessian: Returns the second derivatives of the loss by flat outputs, as a matrix.
        options: Options of K-FAC.
    """

    def __init__(self, model, likelihood, hessian, **options):
        self.model, self.likelihood, self.hessian = model, likelihood, hessian
        self.options = options
        self.params = dict(model.named_parameters())
        self.layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        self.damping, self.eta = options["damping"], options["weight_decay"]
        self.gamma = (self.damping + self.eta) ** 0.5
        self.generator = torch.Generator().manual_seed(options["seed"])
        self.factors, self.inverses = {}, {}
        self.last = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        self.k = 0

    def objective(self, x, y):
        weights = joined(self.params.values())
        return self.likelihood.loss(self.model(x), y) + self.eta / 2 * weights @ weights

    def fisher(self, x):
        """Return the whole Fisher matrix of some cases."""
        jacobian = jacrev(lambda params: functional_call(self.model, params, (x,)).reshape(-1))(self.params)
        J = torch.cat([jacobian[name].reshape(len(self.hessian(self.model(x))), -1) for name in self.params], 1)
        return (J.t() @ self.hessian(self.model(x)) @ J).detach()

    def inputs_of(self, name, x):
        caught = []
        handle = self.model.get_submodule(name).register_forward_hook(
            lambda _, args, y: caught.append(args[0].detach())
        )
        self.model(x)
        handle.remove()
        return torch.cat((caught[0].flatten(0, -2), torch.ones(caught[0][..., 0].numel(), 1).double()), 1)

    def update_factors(self, x):
        """Return averages of outer products, case by case: a bias' gradient is that of its layer's output."""
        keep = min(1 - 1 / self.k, self.options["decay"])
        outputs = self.model(x)
        drawn = self.likelihood.sampled_gradient(outputs.detach(), self.generator)
        cases = len(x)
        for name in self.layers:
            rows = self.inputs_of(name, x)
            A = sum(torch.outer(row, row) for row in rows) / cases
            B = torch.zeros(len(self.params[name + ".bias"]), len(self.params[name + ".bias"])).double()
            for case in range(cases):
                (g,) = torch.autograd.grad(
                    self.model(x[case : case + 1]), self.params[name + ".bias"], drawn[case, None]
                )
                B += torch.outer(cases * g, cases * g) / cases
            old = self.factors.get(name, (torch.zeros_like(A), torch.zeros_like(B)))
            self.factors[name] = keep * old[0] + (1 - keep) * A, keep * old[1] + (1 - keep) * B
        for name, p in self.params.items():
            if name.rpartition(".")[0] not in self.layers:
                (g,) = torch.autograd.grad(self.model(x), p, drawn)
                self.factors[name] = keep * self.factors.get(name, torch.zeros_like(p)) + (1 - keep) * cases * g**2

    def inverse(self, gamma):
        """Return the inverses of the layers' blocks."""
        made = {}
        for name in self.layers:
            A, B = self.factors[name]
            pi = ((A.trace() / len(A)) / (B.trace() / len(B))) ** 0.5
            A = A + pi * gamma * torch.eye(len(A)).double()
            B = B + gamma / pi * torch.eye(len(B)).double()
            made[name] = torch.linalg.inv(torch.kron(B, A))
        return made

    def direction(self, gradient, inverse, gamma):
        own, made = {}, {}
        place = 0
        for name, p in self.params.items():
            own[name] = gradient[place : place + p.numel()].view(p.shape)
            place += p.numel()
        for name, inverted in inverse.items():
            matrix = torch.cat((own[name + ".weight"], own[name + ".bias"][:, None]), 1)
            solved = -(inverted @ matrix.reshape(-1)).view(matrix.shape)
            made[name + ".weight"], made[name + ".bias"] = solved[:, :-1], solved[:, -1]
        for name in self.factors.keys() - set(self.layers):
            made[name] = -own[name] / (self.factors[name] + gamma**2)
        return joined([made[name] for name in self.params])

    def step(self, x, y):
        self.k += 1
        options = self.options
        before = self.objective(x, y)
        gradient = joined(torch.autograd.grad(before, list(self.params.values())))
        before = before.detach()
        self.update_factors(x[: round(options["statistics_share"] * len(x))])
        curvature = self.fisher(x[: round(options["model_share"] * len(x))])
        curvature = curvature + (self.damping + self.eta) * torch.eye(len(curvature)).double()
        gammas = [self.gamma]
        if self.k % options["search_every"] == 0:
            omega = math.sqrt(19 / 20) ** options["search_every"]
            gammas = [self.gamma, omega * self.gamma, self.gamma / omega]
        tried = []
        for gamma in gammas:
            fresh = self.k <= 3 or self.k % options["invert_every"] == 0 or len(gammas) > 1
            inverse = self.inverse(gamma) if fresh else self.inverses
            span = torch.stack((self.direction(gradient, inverse, gamma), self.last), 1)
            sizes = torch.linalg.pinv(span.t() @ curvature @ span) @ (span.t() @ -gradient)
            step = span @ sizes
            tried.append((float(gradient @ step + step @ curvature @ step / 2), gamma, inverse, step))
        predicted, self.gamma, self.inverses, self.last = min(tried, key=lambda one: one[0])
        place = 0
        with torch.no_grad():
            for p in self.params.values():
                p += self.last[place : place + p.numel()].view(p.shape)
                place += p.numel()
            if self.k % options["adapt_every"] == 0:
                ratio = float((self.objective(x, y) - before) / predicted)
                omega = (19 / 20) ** options["adapt_every"]
                self.damping *= omega if ratio > 3 / 4 else 1 / omega if ratio < 1 / 4 else 1
        return ratio if self.k % options["adapt_every"] == 0 else None
