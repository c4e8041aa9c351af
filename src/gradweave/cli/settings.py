"""What to train, as commands are told it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradweave.cli.names import DTYPES, MODELS, OPTIMIZERS
from gradweave.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from gradweave.compare.trial import Setting

_LIBRARIES = ("torchvision", "timm", "transformers")

ModelOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(MODELS)}; package.module:factory, from the current folder too; or torchvision:, timm: or "
        "transformers: and a name."
    ),
]
OptimizerOption = Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}.")]
BatchOption = Annotated[int | None, typer.Option(help="Samples per step; the model's own default if absent.")]
DtypeOption = Annotated[str, typer.Option(help="float32, or bfloat16 by autocast.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")]


def make_setting(
    model: str,
    optimizer: str,
    batch: int | None,
    dtype: str,
    device: str | None,
    max_norm: float | None = None,
    lr: float | None = None,
    other_lr: float | None = None,
) -> Setting:
    """A setting from what was given; raises where it makes no sense, before torch is loaded where that can be."""
    if dtype not in DTYPES:
        raise ArgumentError("--dtype", dtype, f"use one of {', '.join(DTYPES)}")
    if dtype == "float16":
        raise ArgumentError("--dtype", dtype, "needs gradient scaling, which this command does not do; use bfloat16")
    if optimizer not in OPTIMIZERS:
        raise ArgumentError("--optimizer", optimizer, f"use one of {', '.join(OPTIMIZERS)}")
    import torch

    from gradweave.compare.trial import Setting
    from gradweave.compare.workloads import find_workload

    if model.partition(":")[0] not in (*MODELS, *_LIBRARIES):
        _find_local_modules()
    workload = find_workload(model)
    samples = workload.default_batch if batch is None else batch
    return Setting(
        workload, optimizer, samples, _device(device), getattr(torch, dtype), max_norm, lr=lr, other_lr=other_lr
    )


def _find_local_modules() -> None:
    """Lets the current folder's modules be imported, as ``python -m`` does and a console script does not."""
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


@contextmanager
def fits_in_memory(setting: Setting) -> Iterator[None]:
    """Context in which running out of memory is an error of the batch's size."""
    from gradweave.compare.model_errors import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        raise ArgumentError("--batch", setting.batch, "does not fit into memory; give fewer samples") from None


def make_folder(out: Path, names: Iterable[str]) -> None:
    """Makes the folder that results go to, and sees that they can be written, before any work is done for them."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"anything")
    except OSError as error:
        raise ArgumentError("--out", str(out), f"cannot be written to: {error.strerror}") from None
    for name in names:
        if (out / name).is_dir():
            raise ArgumentError("--out", str(out), f"{name} in it is a folder; give another")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Context in which a file that cannot be written is an error of the folder."""
    try:
        yield
    except OSError as error:
        raise ArgumentError("--out", str(out), f"cannot be written to: {error.strerror or error}") from None


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
