"""Large scenarios stay quick, measured against plain Python of the same process, since machines differ in speed."""

import json
import subprocess
import sys

import pytest

LIMIT = 4.0
"""Most time of a scenario, in turns that make and sort as many small objects as there are tasks, four times over."""
PIPELINE = "pipeline(Costs.uniform(16 * {size}), stages=16, microbatches=64)"
REPLICAS = "data_parallel(network('resnet50'), replicas=1024, link=Link(12.5e9, 5e-6), steps=6)"
NODES = "hierarchical(network('resnet50'), nodes=1024, local_ranks=8, link=Link(12.5e9, 5e-6), steps=12)"
IN_STAGES = ("one_f_one_b", "zb_h1", "fast_forward", "modulo")
SCENARIOS = dict.fromkeys(IN_STAGES, PIPELINE) | {"ddp": REPLICAS, "reverse_first_k": REPLICAS, "daso": NODES}
MEASURE = """
import gc, json, sys, time
from gradweave.schedule import Costs, Link, data_parallel, hierarchical, network, pipeline, plan
def turn():
    began = time.process_time()
    sorted({(i * 7919 % 1_000_003, str(i)): [i] for i in range(int(sys.argv[2]))})
    return time.process_time() - began
before, taken = turn(), {}
for policy, made in json.loads(sys.argv[1]).items():
    began = time.process_time()
    spans = len(plan(eval(made), policy=policy).simulate().spans)
    taken[policy] = time.process_time() - began, spans
    gc.collect()
of_a_turn = max(before, turn())
print(json.dumps({policy: (seconds / of_a_turn, spans) for policy, (seconds, spans) in taken.items()}))
"""


@pytest.mark.parametrize("size", [16, pytest.param(48, marks=pytest.mark.slow)])
def test_large_scenarios(size):
    """All of them in one process of their own, which is measured once."""
    made = {policy: scenario.format(size=size) for policy, scenario in SCENARIOS.items()}
    tasks = 3 * 16 * size * 64
    command = [sys.executable, "-c", MEASURE, json.dumps(made), str(4 * tasks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert ran.returncode == 0, ran.stderr
    measured = json.loads(ran.stdout)
    assert min(measured[policy][1] for policy in IN_STAGES) >= tasks
    assert min(spans for _, spans in measured.values()) > 1000
    assert {policy: turns for policy, (turns, _) in measured.items() if turns >= LIMIT} == {}
