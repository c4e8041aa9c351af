"""What to train, as commands are told it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradweave.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from gradweave.compare.trial import Setting

_DTYPES = ("float32", "bfloat16", "float16")

ModelOption = Annotated[
    str,
    typer.Option(help="Built-in model, package.module:factory, or torchvision:, timm: or transformers: and a name."),
]
OptimizerOption = Annotated[str, typer.Option(help="sgd, adam, adamw, adagrad, rmsprop, adadelta or nadam.")]
BatchOption = Annotated[int | None, typer.Option(help="Samples per step; the model's own default if absent.")]
DtypeOption = Annotated[str, typer.Option(help="float32, or bfloat16 or float16 by autocast.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")]


def make_setting(
    model: str, optimizer: str, batch: int | None, dtype: str, device: str | None, max_norm: float | None = None
) -> Setting:
    """A setting from what was given; raises where it makes no sense."""
    import torch

    from gradweave.compare.trial import Setting
    from gradweave.compare.workloads import find_workload

    if dtype not in _DTYPES:
        raise ArgumentError("--dtype", dtype, f"use one of {', '.join(_DTYPES)}")
    if dtype == "float16":
        raise ArgumentError("--dtype", dtype, "needs gradient scaling, which this command does not do; use bfloat16")
    workload = find_workload(model)
    samples = workload.default_batch if batch is None else batch
    return Setting(workload, optimizer, samples, _device(device), getattr(torch, dtype), max_norm)


@contextmanager
def fits_in_memory(setting: Setting) -> Iterator[None]:
    """Context in which running out of memory is an error of the batch's size."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        raise ArgumentError("--batch", setting.batch, "does not fit into memory; give fewer samples") from None


def _is_out_of_memory(error: RuntimeError) -> bool:
    """A GPU has an error of its own for it; a CPU has a message."""
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def make_folder(out: Path) -> None:
    """Makes the folder that results go to."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError("--out", str(out), f"cannot be made: {error.strerror}") from None


def _device(name: str | None) -> torch.device:
    import torch

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError("--device", name, "use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", name, "there is no CUDA device; use cpu")
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("--device", name, "use cpu or cuda")
    return device
