"""Measured costs on disk, so that a model is measured once on a machine.

A measurement has two files, named by a digest of its key: ``<digest>.json``, a cost file like any other, and
``<digest>.key.json`` with the key itself and a checksum of the former. If the two do not agree, costs are measured
again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

import gradweave
from gradweave._compat.functions import flat_leaves
from gradweave._logging import announce
from gradweave.errors import ArgumentError
from gradweave.profile.measure import ROUNDS, Progress, measure_costs
from gradweave.schedule.costs import Costs

_FORMAT = 2


def cached_costs(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    optimizer: Optimizer,
    batch: Sequence[Any],
    *,
    folder: str | Path | None = None,
    also: str = "",
    rounds: int = ROUNDS,
    progress: Progress = lambda *_: None,
) -> Costs:
    """Return what :func:`measure_costs` returns, or returned before for the same step on this machine.

    A step is the same if these are: versions of gradweave and torch; the device's name; the model's modules, their
    settings, and the shapes, layouts and types of its parameters and of the batch; the optimizer's class and form;
    whether autocast is on around the call, and its type; torch's settings for TF32, cuDNN and determinism; the name
    of ``loss_fn``; and ``also``.

    Args:
        model: This, ``loss_fn``, ``optimizer``, ``batch``, ``rounds`` and ``progress`` are as for
            :func:`measure_costs`.
        loss_fn: Known by its name only: give in ``also`` what its costs depend on besides.
        optimizer: Whose update is measured.
        batch: Of the size to train with.
        folder: Of the files; by default ``gradweave/costs`` in the user's cache folder (``$XDG_CACHE_HOME``, or
            ``~/.cache``).
        also: Whatever else costs depend on, such as the precision that ``loss_fn`` casts to.
        rounds: Steps of which the median is taken.
        progress: Not called for costs that are on disk.
    """
    key = _key_of(model, loss_fn, optimizer, batch, also, rounds)
    home = Path(folder) if folder is not None else default_folder()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    path = home / f"{digest}.json"
    found = _load(path, key)
    if found is not None:
        return found
    costs = measure_costs(model, loss_fn, optimizer, batch, rounds=rounds, progress=progress)
    try:
        _save(costs, path, key)
    except OSError as error:
        if folder is not None:
            raise ArgumentError("folder", str(folder), f"cannot be written: {error.strerror}") from None
        announce(f"measured costs are not saved: {home} cannot be written ({error.strerror})", level=logging.WARNING)
    return costs


def default_folder() -> Path:
    """Return the folder of measured costs in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradweave" / "costs"


class _Key(TypedDict):
    """All that costs are known to depend on, as JSON values."""

    gradweave: str
    torch: str
    device: str
    modules: list[list[Any]]
    parameters: list[list[Any]]
    batch: list[Any]
    optimizer: list[str]
    autocast: str
    settings: list[Any]
    loss_fn: str
    also: str
    rounds: int


class _KeyFile(TypedDict):
    """The contents of a key file."""

    format: int
    key: _Key
    sha256: str


def _key_of(
    model: nn.Module, loss_fn: Callable[..., Any], optimizer: Optimizer, batch: Sequence[Any], also: str, rounds: int
) -> _Key:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    named = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
    key: _Key = {
        "gradweave": gradweave.__version__,
        "torch": torch.__version__,
        "device": _device_name(device),
        "modules": [[name, _type(m), m.extra_repr(), m.training] for name, m in model.named_modules()],
        "parameters": [[name, *_tensor(p), p.requires_grad] for name, p in model.named_parameters()],
        "batch": [_tensor(x) if isinstance(x, torch.Tensor) else type(x).__name__ for x in flat_leaves(list(batch))],
        "optimizer": [_type(optimizer), *(str(optimizer.defaults.get(k)) for k in ("foreach", "fused", "capturable"))],
        "autocast": str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else "",
        "settings": [
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.are_deterministic_algorithms_enabled(),
        ],
        "loss_fn": named,
        "also": also,
        "rounds": rounds,
    }
    as_stored: _Key = json.loads(json.dumps(key))  # lists in the place of tuples, as in a file
    return as_stored


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _tensor(x: torch.Tensor) -> list[Any]:
    return [list(x.shape), list(x.stride()), str(x.dtype)]


def _load(path: Path, key: _Key) -> Costs | None:
    """Return the costs that were measured under a key; None if there are none, with a message if they are spoiled."""
    if not path.exists() and not _key_path(path).exists():
        return None
    try:
        stored = json.loads(_key_path(path).read_text())
        if not isinstance(stored, dict) or stored.get("format") != _FORMAT or stored.get("key") != key:
            raise ValueError("it was written for another step")
        if stored.get("sha256") != hashlib.sha256(path.read_bytes()).hexdigest():
            raise ValueError("its contents are not those that were written")
        return Costs.load(path)
    except (OSError, ValueError, ArgumentError) as error:
        announce(f"costs are measured again: {path} cannot be used ({error})", level=logging.WARNING)
        return None


def _save(costs: Costs, path: Path, key: _Key) -> None:
    """Write costs and key, so that a reader at any moment finds both or uses neither.

    Each file is replaced as a whole, the key last: costs without a key are not used.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _key_path(path).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        temporary = Path(scratch) / "new"
        costs.save(temporary)
        key_file: _KeyFile = {
            "format": _FORMAT,
            "key": key,
            "sha256": hashlib.sha256(temporary.read_bytes()).hexdigest(),
        }
        temporary.replace(path)
        temporary.write_text(json.dumps(key_file, indent=1) + "\n")
        temporary.replace(_key_path(path))


def _key_path(path: Path) -> Path:
    return path.with_suffix(".key.json")
