"""What every technique requires of a model and an optimizer, refused in the same words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from gradweave._compat.distributed import is_distributed_tensor, is_managed_by_fsdp
from gradweave._compat.modules import is_compiled
from gradweave.errors import ArgumentError, UnsupportedError


def require_module(model: object) -> None:
    """Raise ArgumentError for what is no model, such as a :class:`~gradweave.Pipeline`, whose ``module`` is one."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "give an nn.Module")


def require_optimizer(optimizer: object, *, refused: tuple[type[Optimizer], ...] = (), remedy: str = "") -> None:
    """Raise for what is no torch optimizer, and for classes that cannot be served.

    Args:
        optimizer: What the user gave.
        refused: Classes whose steps cannot be taken apart or traced.
        remedy: Why those are refused, and what to use instead.
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError("optimizer", type(optimizer).__name__, "give a torch.optim.Optimizer")
    if isinstance(optimizer, refused):
        raise UnsupportedError(type(optimizer).__name__, remedy)


def require_undifferentiated(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer whose steps autograd is to record."""
    if optimizer.defaults.get("differentiable"):
        raise UnsupportedError(
            f"{type(optimizer).__name__}(differentiable=True)",
            "its steps are recorded by autograd",
            "construct it with differentiable=False",
        )


def refuse_sharded(model: nn.Module, params: Iterable[torch.Tensor] | None = None, *, remedy: str = "") -> None:
    """Raise UnsupportedError for sharded parameters, of FSDP2 or of any DTensor.

    Args:
        model: The model.
        params: Those to look at; None for all of the model's.
        remedy: What to do instead.
    """
    looked_at = model.parameters() if params is None else params
    if any(is_distributed_tensor(p) for p in looked_at) or any(is_managed_by_fsdp(m) for m in model.modules()):
        raise UnsupportedError("FSDP", "sharded parameters are not supported", remedy or "give an unsharded model")


def refuse_copies(model: nn.Module) -> None:
    """Raise UnsupportedError for torch.nn.DataParallel, which runs copies of the layers in threads of its own."""
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UnsupportedError(
            "torch.nn.DataParallel",
            "it runs copies of the layers, which carry no hooks",
            "run one process per device, under torchrun, with DistributedDataParallel",
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raise UnsupportedError for torch's wrappers of replicas, which communicate outside of a step's graph."""
    for module in model.modules():
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise UnsupportedError(
                f"torch's {type(module).__name__}",
                "it averages outside of a graph",
                "give the model that it wraps; compile() averages over the ranks of mesh=",
            )


def refuse_compiled(model: nn.Module, *, remedy: str) -> None:
    """Raise UnsupportedError for layers that torch.compile or torch.jit.script has compiled."""
    for module in model.modules():
        if is_compiled(module):
            how = "torch.jit.script" if isinstance(module, torch.jit.ScriptModule) else "torch.compile"
            raise UnsupportedError(how, "compiled code runs the layers where no hook sees them", remedy)


def require_one_device(tensors: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError if tensors are on several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise UnsupportedError(
            f"a model on {len(devices)} devices", "its parameters must be on one", "give a model that is on one device"
        )


def require_owned(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UnsupportedError if an optimizer trains parameters that are not the model's."""
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in own:
                raise UnsupportedError(
                    f"an optimizer with a parameter of shape {tuple(p.shape)}",
                    "the parameter is not in the model",
                    "give the model that owns it",
                )


def require_shapes(params: Iterable[torch.Tensor]) -> None:
    """Raise UnsupportedError for parameters of lazy modules, which have no shape yet."""
    if any(nn.parameter.is_lazy(p) for p in params):
        raise UnsupportedError(
            "a lazy module", "its parameters have no shape yet", "run a batch through the model first"
        )
