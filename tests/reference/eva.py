"""Eva, Eva-f and Eva-s written out slowly, from their formulas: concatenated biases, unfolded patches, outer products.

Nothing here is shared with gradweave: layers' inputs and output gradients are given as plain tensors.
"""

import torch
import torch.nn.functional as F


def linear_rows(x):
    """Return a linear layer's input or output gradient: samples, places, columns."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def conv_rows(x, module):
    """Return the patches of a Conv2d without groups: samples, places, columns."""
    unfolded = F.unfold(x, module.kernel_size, dilation=module.dilation, padding=module.padding, stride=module.stride)
    return unfolded.transpose(1, 2)


def output_rows(g):
    """Return a Conv2d's output gradient: samples, places, channels."""
    return g.flatten(2).transpose(1, 2)


def mean_vector(rows, samples=None, with_one=False):
    rows = rows[:samples].reshape(-1, rows.shape[-1])
    vector = rows.mean(0)
    return torch.cat([vector, vector.new_ones(1)]) if with_one else vector


def joined(weight_grad, bias_grad):
    matrix = weight_grad.reshape(weight_grad.shape[0], -1)
    return matrix if bias_grad is None else torch.cat([matrix, bias_grad[:, None]], 1)


def explicit_joint(G, a, b, damping):
    """Return (b bᵀ ⊗ a aᵀ + damping I)⁻¹ G, by solving with the whole matrix."""
    whole = torch.kron(torch.outer(b, b), torch.outer(a, a)) + damping * torch.eye(G.numel(), dtype=G.dtype)
    return torch.linalg.solve(whole, G.reshape(-1)).reshape(G.shape)


def explicit_inputs(G, a, damping):
    whole = torch.outer(a, a) + damping * torch.eye(len(a), dtype=G.dtype)
    return torch.linalg.solve(whole, G.t()).t()


def explicit_two_sided(G, a, b, damping_a, damping_b):
    left = torch.outer(b, b) + damping_b * torch.eye(len(b), dtype=G.dtype)
    right = torch.outer(a, a) + damping_a * torch.eye(len(a), dtype=G.dtype)
    return torch.linalg.solve(left, G) @ torch.linalg.inv(right)


def blend(old, new, weight):
    return new.clone() if old is None else weight * new + (1 - weight) * old


def kl_clip(directions, gradients, lr, limit):
    total = sum((P * G).sum() for P, G in zip(directions, gradients, strict=True))
    return min(1.0, float((limit / (lr**2 * total)).sqrt()))


def normalizer(directions, gradients):
    return 1 / float(sum((P * G).sum() for P, G in zip(directions, gradients, strict=True)).sqrt())


def sgd(p, grad, buffer, lr, momentum, weight_decay):
    """Step as torch.optim.SGD: decay is added to the gradient, then momentum; return weight and buffer."""
    grad = grad + weight_decay * p
    buffer = grad if buffer is None else momentum * buffer + grad
    return p - lr * buffer, buffer


def shampoo_port_momentum(p, grad, buffer, lr, momentum, weight_decay):
    """Step as the Nesterov momentum of the authors' Eva-s, whose look-ahead overwrites the buffer."""
    grad = grad + weight_decay * p
    buffer = torch.zeros_like(grad) if buffer is None else buffer
    buffer = momentum * buffer + grad
    buffer = momentum * buffer + grad
    return p - lr * buffer, buffer


def mode_means(G):
    """Return, for each mode of a tensor, the mean over the others."""
    dims = range(G.dim())
    return [G.mean(dim=[d for d in dims if d != mode]) for mode in dims]


def explicit_modes(G, vectors, damping):
    """Return G less its contraction with all v vᵀ, over damping plus the product of their squares; times damping."""
    outer = vectors[0]
    for v in vectors[1:]:
        outer = outer[..., None] * v
    size = 1.0
    for v in vectors:
        size = size * (v @ v)
    return G - outer * (outer * G).sum() / (damping + size)


class SlowTraining:
    """Trains linear layers and Conv2d without groups by one of the authors' rules, keeping all inputs and gradients.

    Args:
        model: A model with parameters in such layers only.
        rule: "eva", "eva-f" or "eva-s".
        reference: Follow the authors' code instead of the publication.
    """

    def __init__(self, model, rule, *, reference, lr, damping, momentum=0.9, weight_decay=0.0, average=0.95, clip=1e-3):
        self.layers = [m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))]
        self.rule, self.reference = rule, reference
        self.lr, self.damping, self.momentum, self.weight_decay = lr, damping, momentum, weight_decay
        self.average, self.clip = average, clip
        self.seen, self.gradients, self.vectors, self.buffers = {}, {}, {}, {}
        for layer in self.layers:
            layer.register_forward_hook(self._see)

    def _see(self, layer, args, y):
        self.seen[layer] = args[0].detach()
        y.register_hook(lambda g: self.gradients.__setitem__(layer, g))

    def _vectors(self, layer):
        """Return the running averages of a and b, after this step."""
        x, g = self.seen[layer], self.gradients[layer]
        samples = 16 if self.reference else None
        batch = len(x)
        is_conv = isinstance(layer, torch.nn.Conv2d)
        places = conv_rows(x, layer) if is_conv else linear_rows(x)
        outputs = output_rows(g) if is_conv else linear_rows(g)
        a = mean_vector(places, samples, with_one=layer.bias is not None)
        b = mean_vector(outputs, samples)
        if not self.reference:
            b = outputs.sum((0, 1))
        old = self.vectors.get(layer, (None, None))
        self.vectors[layer] = blend(old[0], a, self.average), blend(old[1], b, self.average)
        assert batch == len(g)
        return self.vectors[layer]

    def _direction(self, layer):
        G = joined(layer.weight.grad, None if layer.bias is None else layer.bias.grad)
        if self.rule == "eva-s":
            grad = layer.weight.grad
            new = mode_means(grad)
            old = self.vectors.get(layer)
            if self.reference:
                vectors = new if old is None else [o + n for o, n in zip(old, new, strict=True)]
            else:
                vectors = new if old is None else [blend(o, n, self.average) for o, n in zip(old, new, strict=True)]
            self.vectors[layer] = vectors
            P = explicit_modes(grad, vectors, self.damping)
            return grad, (P * grad.norm() / P.norm() if self.reference else P / self.damping)
        a, b = self._vectors(layer)
        if self.rule == "eva":
            return G, explicit_joint(G, a, b, self.damping)
        P = explicit_inputs(G, a, self.damping)
        return G, (P * self.damping if self.reference else P)

    @torch.no_grad()
    def step(self):
        found = {layer: self._direction(layer) for layer in self.layers}
        gradients, directions = [G for G, _ in found.values()], [P for _, P in found.values()]
        if self.rule == "eva-s" and self.reference:
            scale = 1.0
        elif self.rule == "eva-f" and self.reference:
            scale = normalizer(directions, gradients)
        else:
            scale = kl_clip(directions, gradients, self.lr, self.clip)
        for layer, (_, P) in found.items():
            P = P * scale
            if self.rule == "eva-s":
                self._update(layer.weight, P, own=True)
                if layer.bias is not None:
                    self._update(layer.bias, layer.bias.grad)
                continue
            columns = layer.weight[0].numel()
            self._update(layer.weight, P[:, :columns].reshape(layer.weight.shape))
            if layer.bias is not None:
                self._update(layer.bias, P[:, columns])

    def _update(self, p, grad, own=False):
        rule = shampoo_port_momentum if own and self.reference else sgd
        new, self.buffers[p] = rule(p, grad, self.buffers.get(p), self.lr, self.momentum, self.weight_decay)
        p.copy_(new)
