"""Techniques that intercept the calls of layers, as others that look at the same calls must know them.

Reordering, pipelines and data parallelism run a forward under a torch-function mode that splits calls of layers: their
weight gradients are computed apart from backward. Optimizers that collect statistics of layers ask here whether one is
at work, without knowing any of them.
"""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from gradweave._compat.eager import function_modes, other_function_modes


class WeightGradientSplitter(TorchFunctionMode):
    """Base class of the modes that compute weight gradients apart from backward.

    Under one, autograd does not tell whether a backward will give a weight a gradient; and a function that consists of
    several layers' calls, as an attention does, may be taken apart into them, since the mode does the same.
    """


def weight_gradients_are_split() -> bool:
    """Return whether the weight gradients of the layers that are called now are computed apart from backward."""
    # Each call of each layer asks: mostly there is no mode at all, which is found out by one number.
    return other_function_modes() > 0 and any(isinstance(mode, WeightGradientSplitter) for mode in function_modes())


def apply_pending_updates(*params: object) -> None:
    """Update parameters whose update is deferred to their next use, and give them their own class back.

    For code that decides by the class of a tensor whether it is a plain one. Anything else among the arguments is
    ignored.
    """
    for param in params:
        if isinstance(param, torch.nn.Parameter) and type(param) is not torch.nn.Parameter:
            param.size()  # any torch function on a parameter resolves its update
