"""Large scenarios stay quick, measured against plain Python of the same process: machines are of many speeds."""

import json
import subprocess
import sys

import pytest

LIMIT = 4.0
"""In turns that make and sort 600,000 small objects: each of one to two seconds."""
PIPELINE = "pipeline(Costs.uniform(16 * 48), stages=16, microbatches=64)"
REPLICAS = "data_parallel(network('resnet50'), replicas=1024, link=Link(12.5e9, 5e-6), steps=6)"
NODES = "hierarchical(network('resnet50'), nodes=1024, local_ranks=8, link=Link(12.5e9, 5e-6), steps=12)"
SCENARIOS = [
    (PIPELINE, "one_f_one_b", 147_000),
    (PIPELINE, "zb_h1", 147_000),
    (PIPELINE, "fast_forward", 147_000),
    (PIPELINE, "modulo", 147_000),
    (REPLICAS, "ddp", 1000),
    (REPLICAS, "reverse_first_k", 1000),
    (NODES, "daso", 2000),
]
MEASURE = f"""
import gc, json, time
from gradweave.schedule import Costs, Link, data_parallel, hierarchical, network, pipeline, plan
def turn():
    began = time.process_time()
    sorted({{(i * 7919 % 1_000_003, str(i)): [i] for i in range(600_000)}})
    return time.process_time() - began
before, taken = turn(), []
for make, policy, _ in {[(f"lambda: {graph}", policy, tasks) for graph, policy, tasks in SCENARIOS]!r}:
    began = time.process_time()
    spans = len(plan(eval(make)(), policy=policy).simulate().spans)
    taken.append((time.process_time() - began, spans))
    gc.collect()
of_a_turn = max(before, turn())
print(json.dumps([(seconds / of_a_turn, spans) for seconds, spans in taken]))
"""


@pytest.fixture(scope="module")
def measured():
    """Turns and tasks of each scenario, in a process of their own."""
    ran = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.xdist_group("schedule-scale")
@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[f"{policy}-{tasks}" for _, policy, tasks in SCENARIOS])
def test_large_scenarios(measured, number):
    turns, tasks = measured[number]
    assert tasks > SCENARIOS[number][2]
    assert turns < LIMIT
