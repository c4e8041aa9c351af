"""Real processes that stay for a whole module of tests and run one scenario after the other."""

import base64
import importlib
import io
import json
import os
import selectors
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

_TESTS = Path(__file__).parent.parent
SECONDS = 100
FRESH_AFTER = 20
"""Scenarios until processes are replaced: each leaves groups behind, whose threads wake up a hundred times a second."""


class World:
    """Processes of a number of nodes, each with a number of ranks, that wait for scenarios.

    A scenario is a function of a module of scenarios; each rank calls it with the arguments, which must be
    JSON, and what it returns comes back by rank.
    """

    def __init__(self, folder, nodes=2, places=2, *, tcp=False, link=None, scenarios="daso.scenarios"):
        self.size = nodes * places
        self._folder, self._tcp, self._link = Path(folder), tcp, link
        self._nodes, self._places, self._scenarios = nodes, places, scenarios
        self._started, self._runs = 0, 0
        self._start()

    def _start(self):
        environment = {
            **os.environ,
            "PYTHONPATH": f"{_TESTS.parent / 'src'}:{_TESTS}",
            "OMP_NUM_THREADS": "1",
            "LOCAL_WORLD_SIZE": str(self._places),
            "WORLD_SIZE": str(self.size),
        }
        self._started, self._runs = self._started + 1, 0
        store = f"tcp://127.0.0.1:{_free_port()}" if self._tcp else f"file://{self._folder / f'store{self._started}'}"
        prefixes, variables = [[]] * self._nodes, [{}] * self._nodes
        if self._link is not None:
            store = f"tcp://{self._link.address}:29531"
            prefixes = [["ip", "netns", "exec", name] for name in self._link.names]
            variables = [{"GLOO_SOCKET_IFNAME": name} for name in self._link.names]
        self.ranks = []
        for rank in range(self.size):
            command = [sys.executable, "-m", "daso.worlds", store, str(rank), str(self.size), str(self._folder)]
            node = rank // self._places
            own = {**environment, **variables[node], "RANK": str(rank)}
            with (self._folder / f"{rank}.err").open("w") as errors:
                process = subprocess.Popen(
                    [*prefixes[node], *command, self._scenarios],
                    env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
            self.ranks.append(process)

    def run(self, scenario, *, seconds=SECONDS, ranks=None, **arguments):
        """What the scenario returns, by rank; an error is raised here, unless the rank was meant to die."""
        asked = range(self.size) if ranks is None else ranks
        if self._runs >= FRESH_AFTER and ranks is None and self._link is None:
            self.close()
            self._start()
        self._runs += 1
        self.ask(scenario, asked, **arguments)
        return self.answers(asked, seconds)

    def ask(self, scenario, ranks, **arguments):
        for rank in ranks:
            self.ranks[rank].stdin.write(json.dumps([scenario, arguments]).encode() + b"\n")
            self.ranks[rank].stdin.flush()

    def answers(self, ranks, seconds=SECONDS):
        deadline, answers = time.monotonic() + seconds, {}
        for rank in ranks:
            line = _read_line(self.ranks[rank].stdout, deadline)
            if not line:
                errors = (self._folder / f"{rank}.err").read_text()[-3000:]
                raise AssertionError(f"rank {rank} gave no answer; it printed:\n{errors}")
            answers[rank] = torch.load(io.BytesIO(base64.b64decode(line)), weights_only=False)
        failed = {rank: answer[1] for rank, answer in answers.items() if not answer[0]}
        if failed:
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        return {rank: answer[1] for rank, answer in answers.items()}

    def close(self):
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.wait()
            process.stdin.close()
            process.stdout.close()


def _read_line(pipe, deadline):
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        if not selector.select(max(0.0, deadline - time.monotonic())):
            return b""
    return pipe.readline()


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(store, rank, size, folder, module):
    import torch.distributed as dist

    scenarios = importlib.import_module(module)

    # What is printed must not mix with answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    os.chdir(folder)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = True, getattr(scenarios, name)(**arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        buffer = io.BytesIO()
        torch.save(answer, buffer)
        answers.write(base64.b64encode(buffer.getvalue()).decode() + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
