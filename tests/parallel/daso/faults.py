"""Training whose ranks die or stand still."""

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gradweave._compat.distributed import default_store
from gradweave.errors import LostPeerError
from gradweave.parallel.daso import DASO
from parallel.daso.clock import die_as, leave_for_good, without_a_clock
from parallel.daso.training import one_step, setting, weights_of
from worlds import SECONDS


def faulty(*, clock=True, **arguments):
    """Train while ranks die or stand still, by a clock or without: see ``clock``."""
    with nullcontext(lambda _: None) if clock else without_a_clock() as knows:
        return train_among_faults(knows=knows, **arguments)


def train_among_faults(
    *, knows, steps, folder, die=None, stop=None, slow=None, late=None, timeout=4, pause=0.02, **options
):
    """Train while ranks die or stand still; return how training ended on this rank.

    Args:
        knows: Called with the DASO.
        die: Rank, step, and where: "before" a step, or "within" it while something is under way.
        stop: Rank, step and seconds that it stands still.
        slow: Rank and seconds that each of its steps takes longer.
        late: Rank, step, and ranks: it stands still, for longer than any timeout, until those are through.
    """
    model, opt = setting()
    rank = dist.get_rank()
    daso = DASO(model, opt, timeout=timeout, checkpoint_dir=Path(folder) / "saved", **options)
    knows(daso)
    node = daso._topology.node
    ended, ranks, at, file = "through", (), None, None
    try:
        for step in range(steps):
            if step == 4:
                Path(folder, f"begun-{rank}").touch()
            if die and die[0] == rank and die[1] == step:
                if die[2] == "before":
                    die_as(node)
                threading.Timer(die[3] if len(die) > 3 else 0.0, die_as, (node,)).start()
            if late and late[0] == rank and late[1] == step:
                leave_for_good(node)
                default_store().wait([f"through/{other}" for other in late[2]], timedelta(seconds=SECONDS))
            if stop and stop[0] == rank and stop[1] == step:
                time.sleep(stop[2])
            time.sleep(pause + (slow[1] if slow and slow[0] == rank else 0.0))
            one_step(model, opt, step)
        daso.finish()
        default_store().set(f"through/{rank}", "")
    except LostPeerError as error:
        ended, ranks, at, file = str(error), error.ranks, error.step, error.checkpoint
    finite = bool(torch.isfinite(weights_of(model)).all())
    saved = None
    if file is not None:
        loaded = torch.load(file)
        saved = torch.cat([v.reshape(-1).float() for v in loaded["model"].values()])
    return {
        "ended": ended, "ranks": ranks, "step": at, "weights": weights_of(model), "finite": finite, "saved": saved,
        "steps": daso.steps, "failed": daso.stats()["failed_exchanges"],
    }  # fmt: skip
