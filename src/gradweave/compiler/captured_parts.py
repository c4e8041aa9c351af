"""What a compiled step is made of, and the only reference that captured code has to it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradweave.compiler.program import Program, StepOptions
from gradweave.compiler.step_state import StepState
from gradweave.errors import GradweaveError
from gradweave.step_graph.objective import loss_and_extras, mark_loss


@dataclass
class Parts:
    """What a step is made of.

    Attributes:
        programs: The graphs that Dynamo has captured.
        forwards: The forward of each class of module, as it was when the last graph was captured.
    """

    model: nn.Module
    loss_fn: Callable[..., Any]
    optimizer: Optimizer
    state: StepState
    options: StepOptions
    programs: list[Program] = field(default_factory=list)
    forwards: dict[type[nn.Module], Any] = field(default_factory=dict)


class CapturedParts:
    """The only reference that captured code has to a step's parts.

    Dynamo keeps captured code, and all that it refers to, for as long as the process lives. So the parts hang on a
    reference that is dropped when the step is gone.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts: Parts | None = parts

    def open(self) -> Parts:
        """Return the parts."""
        if self._parts is None:
            raise GradweaveError("the step is gone; compile() the model again")
        return self._parts

    def add_program(self, forward: GraphModule, _: Any) -> Callable[..., list[Any]]:
        """Return what runs a captured forward; Dynamo's backend."""
        parts = self.open()
        parts.forwards.update({type(module): type(module).forward for module in parts.model.modules()})
        number = len(parts.programs)
        parts.programs.append(Program(forward, parts.model, parts.optimizer, parts.state, parts.options))

        def run(*inputs: Any) -> list[Any]:
            return self.open().programs[number].run(*inputs)

        return run

    def close(self, forget: Callable[[], None]) -> None:
        """Drop the parts, and free what Dynamo has compiled."""
        forget()
        self._parts = None


def let_go(captured: CapturedParts, forget: Callable[[], None], claims: ExitStack) -> None:
    """Withdraw claims, and free what Dynamo has compiled."""
    claims.close()
    captured.close(forget)


def objective_of(captured: CapturedParts) -> Callable[..., tuple[torch.Tensor, Any]]:
    """Return the function that is captured; its loss is marked."""

    def objective(*batch: Any, **named: Any) -> tuple[torch.Tensor, Any]:
        parts = captured.open()
        # Where Python runs this, and not Dynamo, nothing else does first what the last step has left.
        if parts.state.left is not None and not is_compiling():
            parts.state.left.flush()
        loss, extras = loss_and_extras(parts.loss_fn(parts.model, *batch, **named))
        return mark_loss(loss), extras

    return objective
