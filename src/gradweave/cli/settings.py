"""Options that say what to train, shared by commands."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from gradweave.cli.names import DTYPES, MODELS, OPTIMIZERS
from gradweave.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from gradweave.compare.trial import Setting
    from gradweave.compare.variants import OptimizerName

_LIBRARIES = ("torchvision", "timm", "transformers")

ModelOption = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(MODELS)}; package.module:factory (the current folder is searched too); or a name after "
        "torchvision:, timm: or transformers:."
    ),
]
OptimizerOption = Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}.")]
BatchOption = Annotated[int | None, typer.Option(help="Samples per step (default: the model's own).")]
DtypeOption = Annotated[str, typer.Option(help="float32, or bfloat16 (by autocast).")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda if there is one).")]


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
    """Return the setting of some options; mistakes are raised before torch is loaded where possible."""
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
        workload,
        cast("OptimizerName", optimizer),
        samples,
        _device(device),
        getattr(torch, dtype),
        max_norm,
        lr=lr,
        other_lr=other_lr,
    )


def _find_local_modules() -> None:
    """Make the current folder's modules importable, as with ``python -m``; for console scripts they are not."""
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


@contextmanager
def fits_in_memory(setting: Setting) -> Iterator[None]:
    """Report running out of memory in the body as an error of the batch size."""
    from gradweave.compare.model_errors import is_out_of_memory

    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(error)):
            raise
        raise ArgumentError("--batch", setting.batch, "does not fit into memory; give fewer samples") from None


def make_folder(out: Path, names: Iterable[str]) -> None:
    """Make the folder for results, and raise ArgumentError unless they can be written, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(b"anything")
    except OSError as error:
        raise ArgumentError("--out", str(out), f"cannot be written to: {error.strerror}") from None
    for name in names:
        if (out / name).is_dir():
            raise ArgumentError("--out", str(out), f"{name} in it is a folder; give another folder")


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Report files that cannot be written in the body as an error of the folder."""
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
