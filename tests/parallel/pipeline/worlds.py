"""Real processes that stay for a whole module of tests and run one scenario after the other."""

import os
import socket
import time
import traceback
from datetime import timedelta

from forked import Forked

SECONDS = 60


class World:
    """Processes that wait for scenarios: functions of ``scenarios`` or ``eva_scenarios``, called with arguments."""

    def __init__(self, folder, size=2, *, tcp=False):
        self.size = size
        store = f"tcp://127.0.0.1:{_free_port()}" if tcp else f"file://{folder}/store"
        self._ranks = [Forked(_serve, store, rank, size) for rank in range(size)]

    def run(self, scenario, *, seconds=SECONDS, ranks=None, **arguments):
        """What the scenario returns, by rank; what it raises is raised here."""
        for rank in self._ranks:
            rank.connection.send((scenario, arguments))
        deadline = time.monotonic() + seconds
        answers = {}
        for rank in range(self.size) if ranks is None else ranks:
            connection = self._ranks[rank].connection
            assert connection.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} gave no answer in {seconds} s"
            answers[rank] = connection.recv()
        failed = "\n".join(f"rank {rank}:\n{text}" for rank, (fine, text) in answers.items() if not fine)
        assert not failed, failed
        return {rank: answer for rank, (_, answer) in answers.items()}

    def close(self):
        for rank in self._ranks:
            rank.kill()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection, store, rank, size):
    import torch
    import torch.distributed as dist

    from parallel.pipeline import eva_scenarios, scenarios

    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    while True:
        name, arguments = connection.recv()
        try:
            module = scenarios if hasattr(scenarios, name) else eva_scenarios
            answer = True, getattr(module, name)(**arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
