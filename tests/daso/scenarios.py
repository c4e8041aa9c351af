"""What ranks do in tests; see ``worlds``. Each returns what its test looks at."""

import torch
import torch.distributed as dist
from daso.training import loss_of, make_model, make_optimizer, weights_of

from gradweave.daso import DASO


def train(*, steps, kind="mlp", optimizer="sgd", lr=0.1, finish=True, **options):
    """A plain loop; weights after every step, and what stats() says."""
    model = make_model(kind)
    opt = make_optimizer(model.parameters(), optimizer, lr)
    daso = DASO(model, opt, timeout=20, **options)
    seen = []
    for step in range(steps):
        loss_of(model, dist.get_rank(), step).backward()
        opt.step()
        opt.zero_grad()
        seen.append(weights_of(model))
    if finish:
        daso.finish()
    else:
        daso.detach()
    return {"seen": torch.stack(seen), "end": weights_of(model), "stats": daso.stats(), "rhythm": daso.rhythm}
