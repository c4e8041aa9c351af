"""Real processes that live for a whole module of tests and run one scenario after the other."""

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
"""Scenarios until the processes are replaced: each leaves groups, whose threads wake up a hundred times a second."""
_NEW_NETWORK = 0x40000000


class World:
    """Processes of a number of nodes, each with a number of ranks, that wait for scenarios.

    A scenario is a function of any module, such as the test's own, that all ranks call. It may be given by its name in
    the module ``scenarios``.
    """

    def __init__(self, folder, nodes=2, places=2, *, tcp=False, link=None, scenarios=None):
        self.size = nodes * places
        self._folder, self._tcp, self._link = Path(folder), tcp, link
        self._places, self._scenarios = places, scenarios
        self._started, self._runs = 0, 0
        self._start()

    def _start(self):
        self._started, self._runs = self._started + 1, 0
        store = f"tcp://127.0.0.1:{_free_port()}" if self._tcp else f"file://{self._folder / f'store{self._started}'}"
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
                    _serve, store, rank, self.size, str(self._folder), network,
                    environment=own, errors=str(self._folder / f"{rank}.err"),
                )
            )  # fmt: skip

    def run(self, scenario, *, seconds=SECONDS, ranks=None, **arguments):
        """Return the results of a scenario, by rank; raise AssertionError with the tracebacks of ranks that failed."""
        asked = range(self.size) if ranks is None else ranks
        if self._runs >= FRESH_AFTER and ranks is None and self._link is None:
            self.close()
            self._start()
        self._runs += 1
        self.ask(scenario, asked, **arguments)
        return self.answers(asked, seconds)

    def ask(self, scenario, ranks, **arguments):
        """Start a scenario on some of the ranks."""
        named = isinstance(scenario, str)
        # By name: a module that cannot be imported there is then an error of the scenario, not of the connection.
        place = (self._scenarios, scenario) if named else (scenario.__module__, scenario.__qualname__)
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


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection, store, rank, size, folder, network):
    import torch
    import torch.distributed as dist

    if network is not None:
        _enter(network)
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
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
