"""Running a script in several real processes."""

import os
import sys
import time
from pathlib import Path

from forked import Forked

SECONDS = 250


def agree_and_leave(results):
    """In a rank: ends it if all its results are equal, and equal to those of the other ranks."""
    import torch
    import torch.distributed as dist

    for other in results[1:]:
        assert torch.equal(results[0], other), (results[0] - other).abs().max()
    everyone = [torch.empty_like(results[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, results[0])
    assert all(torch.equal(results[0], other) for other in everyone)
    dist.barrier()
    print("ok", flush=True)
    # Leave without joining gloo's threads: torch may abort when a peer has gone first.
    os._exit(0)


def run_ranks(script, store, *arguments, count=2):
    """Runs a script once per rank, as ``script rank store ...``; each must print ok. None is left behind."""
    folder = Path(store).parent
    ranks = [
        Forked(_run, script, [str(rank), str(store), *arguments], str(folder / f"{rank}.out"),
               errors=str(folder / f"{rank}.err"))
        for rank in range(count)
    ]  # fmt: skip
    deadline = time.monotonic() + SECONDS
    try:
        for number, rank in enumerate(ranks):
            ended = rank.wait(max(0.0, deadline - time.monotonic()))
            assert ended == 0, "\n".join((folder / f"{each}.err").read_text()[-3000:] for each in range(count))
            assert (folder / f"{number}.out").read_text() == "ok\n"
    finally:
        for rank in ranks:
            rank.kill()


def _run(_, script, arguments, out):
    with Path(out).open("w") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.argv = ["-c", *arguments]
    exec(compile(script, "rank", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
