"""A whole training program, from its start to the end of the interpreter; its argument says how it ends."""

import sys

import torch.distributed as dist

from gradweave.parallel.daso import DASO
from parallel.daso.training import loss_of, make_model, make_optimizer


def main(how):
    dist.init_process_group("gloo")
    model = make_model()
    opt = make_optimizer(model.parameters())
    daso = DASO(model, opt, every=2, wait=1, timeout=20)
    for step in range(9):
        loss_of(model, dist.get_rank(), step).backward()
        opt.step()
        opt.zero_grad()
    if how == "finish":
        daso.finish()
    print("trained", flush=True)
    if how != "neither":
        dist.destroy_process_group()
    return daso


if __name__ == "__main__":
    kept = main(sys.argv[1])
