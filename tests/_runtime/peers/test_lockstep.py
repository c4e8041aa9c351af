"""Changes that all ranks make at the same step go on; those of some ranks only are an error that names the others."""

import threading

import pytest
import torch.distributed as dist

from gradweave._runtime.peers import lockstep
from gradweave._runtime.replicas import ReplicaError


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks as threads of this process, over one store."""
    store, local = dist.HashStore(), threading.local()
    monkeypatch.setattr(lockstep, "part_of_default_store", lambda name: dist.PrefixStore(name, store))
    monkeypatch.setattr(lockstep.dist, "get_rank", lambda: local.rank)

    def run(*programs):
        errors = [None] * len(programs)

        def one(rank, program):
            local.rank = rank
            changes = lockstep.Changes("changes", technique="DataParallel", timeout=0.5)
            try:
                program(changes)
            except ReplicaError as error:
                errors[rank] = str(error)

        threads = [threading.Thread(target=one, args=each) for each in enumerate(programs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        return errors

    return run


def test_equal_changes_in_order(ranks):
    def program(changes):
        changes.agree("parameters have changed", "a", [0, 1])
        changes.agree("parameters have changed", "b", [0, 1])

    assert ranks(program, program) == [None, None]


def test_other_changes_and_none_are_named_on_the_ranks_that_hear_of_them(ranks):
    first, second = ranks(
        lambda changes: changes.agree("parameters have changed", "a", [0, 1]),
        lambda changes: changes.agree("parameters have changed", "b", [0, 1]),
    )
    assert "DataParallel: parameters have changed on rank 0, and not so on rank 1" in first
    assert "on rank 1, and not so on rank 0" in second
    alone, silent = ranks(lambda changes: changes.agree("parameters have changed", "c", [0, 1]), lambda _: None)
    assert silent is None or "rank" in silent
    assert alone is None or "and not so on rank 1" in alone
