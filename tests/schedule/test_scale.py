"""Large scenarios stay quick. Times are of this process alone, so that a busy machine does not matter."""

import time

import pytest

from gradweave.schedule import Costs, Link, data_parallel, hierarchical, network, pipeline, plan

LIMIT = 5.0


@pytest.mark.parametrize("policy", ["one_f_one_b", "zb_h1", "fast_forward", "modulo"])
def test_150_000_pipeline_tasks(policy):
    began = time.process_time()
    graph = pipeline(Costs.uniform(16 * 48), stages=16, microbatches=64)
    timeline = plan(graph, policy=policy).simulate()
    took = time.process_time() - began
    assert len(timeline.spans) > 147_000
    assert took < LIMIT


@pytest.mark.parametrize("policy", ["ddp", "reverse_first_k", "daso"])
def test_1024_nodes(policy):
    began = time.process_time()
    costs, link = network("resnet50"), Link(12.5e9, 5e-6)
    if policy == "daso":
        graph = hierarchical(costs, nodes=1024, local_ranks=8, link=link, steps=12)
    else:
        graph = data_parallel(costs, replicas=1024, link=link, steps=6)
    assert plan(graph, policy=policy).simulate().step_time > 0
    assert time.process_time() - began < LIMIT
