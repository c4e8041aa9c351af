"""Layer calls that techniques intercept, for other techniques that look at the same calls.

Reordering, pipelines and data parallelism run a forward under a torch-function mode that splits calls of layers: their
weight gradients are computed apart from backward. Optimizers that collect statistics of layers find out here whether
such a mode is active, without importing any technique.
"""

from __future__ import annotations

from torch.overrides import TorchFunctionMode

from gradweave._compat.functions import function_modes, other_function_modes
from gradweave._runtime.deferred.pending_parameter import PendingParameter, resolve


class WeightGradientSplitter(TorchFunctionMode):
    """Base class of the modes that compute weight gradients apart from backward.

    Under such a mode autograd cannot tell whether a backward will give a weight a gradient. A function that consists of
    several layers' calls, such as attention, may be decomposed into them, since the mode does the same.
    """


def weight_gradients_are_split() -> bool:
    """Return whether the weight gradients of the layers that are called now are computed apart from backward."""
    # Asked in each call of each layer: the count alone answers the usual case, no mode at all.
    return other_function_modes() > 0 and any(isinstance(mode, WeightGradientSplitter) for mode in function_modes())


def apply_pending_updates(*params: object) -> None:
    """Apply the deferred updates of parameters, which gives them back the class ``nn.Parameter``.

    For code that tests the class of its arguments. Anything but a pending parameter is ignored.
    """
    for param in params:
        if type(param) is PendingParameter:
            resolve(param)
