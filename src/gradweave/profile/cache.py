"""Measured costs on disk, so that a model is measured once on a machine.

A measurement has two files, named by a digest of its key: ``<digest>.json``, a cost file like any other, and
``<digest>.key.json`` with the key itself and a checksum of the former. What does not agree is measured anew.
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
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import gradweave
from gradweave._compat.eager import flat_leaves
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
    """As :func:`measure_costs`, unless the same was measured before on this machine.

    The same is: versions of gradweave and torch; the device's name; the model's modules, their settings,
    and the shapes, layouts and types of its parameters and of the batch; the optimizer's class and form; whether
    autocast is on around the call, and its type; torch's settings for TF32, cuDNN and determinism; the name of
    ``loss_fn``; and ``also``.

    Args:
        model: As for :func:`measure_costs`.
        loss_fn: Likewise. What it does is not looked at: tell ``also`` what costs depend on in it.
        optimizer: Likewise.
        batch: Likewise.
        folder: Where the files are; unless given, ``gradweave/costs`` in the user's cache folder
            (``$XDG_CACHE_HOME``, or ``~/.cache``).
        also: Whatever else costs depend on, such as the precision that ``loss_fn`` casts to.
        rounds: As for :func:`measure_costs`.
        progress: Likewise; told nothing of costs that are there.
    """
    key = _key(model, loss_fn, optimizer, batch, also, rounds)
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
        announce(f"measured costs are not kept: {home} cannot be written ({error.strerror})", level=logging.WARNING)
    return costs


def default_folder() -> Path:
    """Where measured costs are kept unless told."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradweave" / "costs"


def _key(
    model: nn.Module, loss_fn: Callable[..., Any], optimizer: Optimizer, batch: Sequence[Any], also: str, rounds: int
) -> dict[str, Any]:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    named = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__qualname__)}"
    key = {
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
    as_stored: dict[str, Any] = json.loads(json.dumps(key))
    return as_stored


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _type(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _tensor(x: torch.Tensor) -> list[Any]:
    return [list(x.shape), list(x.stride()), str(x.dtype)]


def _load(path: Path, key: dict[str, Any]) -> Costs | None:
    """The costs that were measured under a key; None, and a message, if what is there is something else."""
    if not path.exists() and not _key_path(path).exists():
        return None
    try:
        note = json.loads(_key_path(path).read_text())
        if not isinstance(note, dict) or note.get("format") != _FORMAT or note.get("key") != key:
            raise ValueError("was written for something else")
        if note.get("sha256") != hashlib.sha256(path.read_bytes()).hexdigest():
            raise ValueError("is not what was written there")
        return Costs.load(path)
    except (OSError, ValueError, ArgumentError) as error:
        announce(f"costs are measured anew: {path} cannot be used ({error})", level=logging.WARNING)
        return None


def _save(costs: Costs, path: Path, key: dict[str, Any]) -> None:
    """The note last: costs without one are not used."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _key_path(path).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / "made"
        costs.save(made)
        checksum = hashlib.sha256(made.read_bytes()).hexdigest()
        made.replace(path)
        made.write_text(json.dumps({"format": _FORMAT, "key": key, "sha256": checksum}, indent=1) + "\n")
        made.replace(_key_path(path))


def _key_path(path: Path) -> Path:
    return path.with_suffix(".key.json")
