from dataclasses import replace

from torch import nn

from gradweave.compare.planned import measure_planned
from gradweave.compare.run import make_batches
from gradweave.compare.trial import Setting, Trial
from gradweave.compare.workloads import WORKLOADS
from gradweave.schedule import Kind
from gradweave.schedule.costs import Costs


def test_a_cpu_carries_stock_order_out_with_weight_gradients_apart():
    setting = Setting(WORKLOADS["autoencoder"], batch=64)
    trial, batches = Trial("fused", "fused", setting), make_batches(setting)
    names = [name for name, module in trial.model.named_modules() if isinstance(module, nn.Linear)]
    layer = Costs.uniform(1).layers[0]
    costs = Costs((layer, *(replace(layer, name=name) for name in names)))
    timelines = measure_planned(trial, batches, costs)
    assert list(timelines) == ["in_order"]
    spans = [span for span in timelines["in_order"].spans if span.task.step == 2]
    order = "".join(span.task.kind for span in spans)
    assert order.startswith("FX")
    assert order.endswith("U")
    weight_gradients = [span.task.layer for span in spans if span.task.kind is Kind.W]
    assert weight_gradients == list(range(len(names), 0, -1))
    assert not trial.model._forward_pre_hooks
    assert trial.variant.reordering is None
