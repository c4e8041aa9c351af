"""Large scenarios stay quick, measured against plain Python of the same process: machines are of many speeds."""

import subprocess
import sys

import pytest

LIMIT = 4.0
"""In turns that make and sort 600,000 small objects: each of one to two seconds."""
MEASURE = """
import time
def turn():
    began = time.process_time()
    sorted({{(i * 7919 % 1_000_003, str(i)): [i] for i in range(600_000)}})
    return time.process_time() - began
from gradweave.schedule import Costs, Link, data_parallel, hierarchical, network, pipeline, plan
before = turn()
began = time.process_time()
graph = {graph}
timeline = plan(graph, policy={policy!r}).simulate()
took = time.process_time() - began
print(took / max(before, turn()), len(timeline.spans))
"""
PIPELINE = "pipeline(Costs.uniform(16 * 48), stages=16, microbatches=64)"
REPLICAS = "data_parallel(network('resnet50'), replicas=1024, link=Link(12.5e9, 5e-6), steps=6)"
NODES = "hierarchical(network('resnet50'), nodes=1024, local_ranks=8, link=Link(12.5e9, 5e-6), steps=12)"


@pytest.mark.parametrize(
    ("graph", "policy", "tasks"),
    [
        (PIPELINE, "one_f_one_b", 147_000),
        (PIPELINE, "zb_h1", 147_000),
        (PIPELINE, "fast_forward", 147_000),
        (PIPELINE, "modulo", 147_000),
        (REPLICAS, "ddp", 1000),
        (REPLICAS, "reverse_first_k", 1000),
        (NODES, "daso", 2000),
    ],
)
def test_large_scenarios(graph, policy, tasks):
    script = MEASURE.format(graph=graph, policy=policy)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    took, spans = ran.stdout.split()
    assert int(spans) > tasks
    assert float(took) < LIMIT
