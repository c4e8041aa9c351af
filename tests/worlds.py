"""Real processes that live for as long as a fixture does, and run one function after the other."""

import ctypes
import importlib
import os
import socket
import sys
import time
import traceback
from pathlib import Path

from forked import Forked

SECONDS = 100
FRESH_AFTER = 20
"""Runs until the processes are replaced: each leaves groups, whose threads wake up a hundred times a second."""
_NEW_NETWORK = 0x40000000


class World:
    """Processes of a number of nodes, each with a number of ranks, that wait for functions to call.

    Args:
        folder: Where the processes work, and where what they print goes.
        nodes: How many nodes there are.
        places: How many ranks each node has.
        tcp: Whether ranks meet in a store that the first one hosts, and not in a file.
        link: A network of namespaces, one per node, that ranks of different nodes are connected by.
        timeout: A timedelta: how long messages of the default group wait for other ranks.
        fresh_after: Runs until the processes are replaced; None keeps them.
    """

    def __init__(self, folder, nodes=2, places=2, *, tcp=False, link=None, timeout=None, fresh_after=FRESH_AFTER):
        self.size = nodes * places
        self._folder, self._tcp, self._link = Path(folder), tcp, link
        self._places, self._timeout = places, timeout
        self._fresh_after = float("inf") if link is not None or fresh_after is None else fresh_after
        self._started, self._runs = 0, 0
        self._start()

    def _start(self):
        self._started, self._runs = self._started + 1, 0
        store = f"tcp://127.0.0.1:{free_port()}" if self._tcp else f"file://{self._folder / f'store{self._started}'}"
        if self._link is not None:
            store = f"tcp://{self._link.address}:29531"
        self._ranks = []
        for rank in range(self.size):
            own = {"LOCAL_WORLD_SIZE": str(self._places), "WORLD_SIZE": str(self.size), "RANK": str(rank)}
            network = None if self._link is None else self._link.names[rank // self._places]
            if network is not None:
                own["GLOO_SOCKET_IFNAME"] = network
            self._ranks.append(
                Forked(
                    _serve, store, rank, self.size, str(self._folder), network, self._timeout,
                    environment=own, errors=str(self._folder / f"{rank}.err"),
                )
            )  # fmt: skip

    def run(self, function, *, seconds=SECONDS, ranks=None, **arguments):
        """Return what a function returns on each rank; raise AssertionError with the tracebacks of ranks that failed.

        The function is one of a module, such as the test's own. All ranks call it, or only those that ``ranks`` names.
        """
        asked = range(self.size) if ranks is None else ranks
        if self._runs >= self._fresh_after and ranks is None:
            self.close()
            self._start()
        self._runs += 1
        self.ask(function, asked, **arguments)
        return self.answers(asked, seconds)

    def ask(self, function, ranks, **arguments):
        """Have some of the ranks call a function, without waiting for them."""
        # By name: where its module cannot be imported, that is an error of the function, not of the connection.
        place = function.__module__, function.__qualname__
        for rank in ranks:
            self._ranks[rank].connection.send((*place, arguments))

    def answers(self, ranks, seconds=SECONDS):
        """Wait for the results of some of the ranks."""
        deadline, answers = time.monotonic() + seconds, {}
        for rank in ranks:
            connection = self._ranks[rank].connection
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                answers[rank] = connection.recv()
            except EOFError:
                errors = (self._folder / f"{rank}.err").read_text()[-3000:]
                raise AssertionError(f"rank {rank} gave no answer; it printed:\n{errors}") from None
        failed = {rank: answer[1] for rank, answer in answers.items() if not answer[0]}
        if failed:
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return {rank: answer[1] for rank, answer in answers.items()}

    def close(self):
        for rank in self._ranks:
            rank.kill()


def free_port():
    """Return a port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection, store, rank, size, folder, network, timeout):
    import torch
    import torch.distributed as dist

    if network is not None:
        _enter(network)
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    os.chdir(folder)
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, getattr(importlib.import_module(module), name)(**arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)


def _enter(network):
    """Move this process to a network namespace."""
    with Path(f"/var/run/netns/{network}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")
