"""Small models, batches and loops for the optimizers' tests."""

import torch
from torch import nn


class ConvNet(nn.Module):
    """Every kind of layer: grouped, depthwise, transposed, in front of a BatchNorm, shared, in-place activations."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(4, 6, 3, 2, 1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.act = nn.ReLU(inplace=True)
        self.depthwise = nn.Conv2d(6, 6, 3, padding="same", dilation=2, groups=6)
        self.pointwise = nn.Conv2d(6, 6, 1)
        self.up = nn.ConvTranspose2d(6, 4, 3, 2, 1, 1, groups=2)
        self.mix = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        x = self.act(self.pointwise(self.depthwise(self.act(self.norm(self.grouped(x))))))
        x = self.act(self.up(x))
        x = self.act(self.mix(x.flatten(2).transpose(1, 2)))
        return self.head(self.act(self.mix(x[..., :4])))


def make_mlp(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)).to(dtype)


def make_conv(seed=0):
    torch.manual_seed(seed)
    return ConvNet()


def rows(count=4, size=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, 6, generator=generator).to(dtype) for _ in range(count)]


def images(count=4, size=5):
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(size, 4, 8, 8, generator=generator) for _ in range(count)]


def loss_of(model, x):
    return (model(x) - 1).square().mean()


def train(model, optimizer, batches, loss=loss_of):
    losses = []
    for x in batches:
        value = loss(model, x)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
