"""What README and docs claim, which results show it, and which command writes those."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A claim, and what shows it.

    Attributes:
        page: Where it is made, from the root of the repository.
        says: What it says, in a few words.
        files: The results.
        command: What writes them, behind ``python benchmarks/``; of a record, how it was made.
        commit: What the results came with, where they do not name the commit that was measured.
        date: Where the results have none.
    """

    page: str
    says: str
    files: tuple[str, ...]
    command: str
    commit: str = ""
    date: str = ""


CLAIMS = (
    Claim(
        "docs/compile.md", "`compile()` and `fuse()` against the fastest stock step, and its memory",
        ("suite-h200.csv",), "suite.py time --results FILE --start suite-start-h200.csv",
    ),
    Claim(
        "docs/compile.md", "seconds to the tenth step with empty caches",
        ("suite-start-h200.csv",), "suite.py cold --results FILE",
    ),
    Claim(
        "docs/compile.md", "`compile(mesh=)` against DDP, eager and compiled",
        ("compile-ranks.csv",), "compile_ranks.py --results FILE --ratio 0.6 --ratio 1.0",
    ),
    Claim(
        "docs/compile.md", "GPT-2 against JAX; what clipping costs",
        ("whole-step-h200.csv",), "whole_step.py time --results FILE", "9c51829",
    ),
    Claim(
        "docs/compile.md", "loss curves on real text", ("whole-step-curves-h200.csv",),
        "whole_step.py curves --text TEXT --results FILE", "b9b88be",
    ),
    Claim(
        "docs/compile.md", "where GPT-2's time goes", ("whole-step-profile-h200.txt",),
        "whole_step.py profile --workload gpt2-2x1024 > FILE", "2d70146", "2026-11-16",
    ),
    Claim(
        "docs/fusion.md", "`fuse()` in eager steps on a GPU", ("fusion-h200.csv", "fusion-h200.png"),
        "fusion.py time --results FILE, fusion.py draw --results FILE", "e2208e4",
    ),
    Claim(
        "docs/fusion.md", "`fuse()` on two CPU cores", ("fusion-cpu.csv",), "fusion.py time --results FILE", "59630e1"
    ),
    Claim(
        "docs/fusion.md", "memory of gradients", ("fusion-memory-h200.csv",), "fusion.py memory --results FILE",
        "1c8bc28",
    ),
    Claim(
        "docs/reorder.md", "weight gradients out of order, in a CUDA graph", ("reorder-h200.csv", "reorder-h200.png"),
        "reorder.py time --variants captured,split,side_stream,joint,joint_bounded,cross_step --results FILE, "
        "reorder.py draw --results FILE", "5cf0161",
    ),
    Claim(
        "docs/reorder.md", "the same inside of `compile()`", ("reorder-compile-h200.csv",),
        "reorder.py time --variants compile,compile_costs --baseline compile --workload NAME --results FILE", "5cf0161",
    ),
    Claim(
        "docs/reorder.md", "seconds to measure costs", ("reorder-costs-seconds-h200.csv",),
        "reorder.py costs --results FILE", "3e9df57",
    ),
    Claim(
        "docs/data-parallel.md", "`DataParallel` against the best DDP", ("data-parallel-stock.csv",),
        "data_parallel_stock.py --results FILE (with --setting and --ratio as its columns say)",
    ),
    Claim(
        "docs/data-parallel.md", "`DataParallel` against DDP with its default, by r",
        ("data-parallel.csv", "data-parallel.png"),
        "data_parallel_link.py time --results FILE (with --rounds and --steps as its columns say), "
        "data_parallel_link.py draw --results FILE", "2aa3046",
    ),
    Claim(
        "docs/pipeline.md", "pipelines, computation emulated", ("pipeline-emulated.csv",),
        "pipeline_stages.py emulated --results FILE",
    ),
    Claim(
        "docs/pipeline.md", "pipelines, real computation", ("pipeline-real.csv",),
        "pipeline_stages.py real --results FILE",
    ),
    Claim(
        "docs/pipeline.md", "pipelines of many devices, simulated",
        ("pipeline-simulated.csv",), "pipeline_stages.py simulate --results FILE", "3c67c53", "2026-11-16",
    ),
    Claim(
        "docs/daso.md", "seconds to the same accuracy", ("daso-race.csv", "daso-race.png"),
        "daso_nodes.py race --data mnist.npz --results FILE, daso_nodes.py draw --results FILE", "1d10c6e",
    ),
    Claim(
        "docs/daso.md", "what exchanges cost", ("daso-exposed.csv",),
        "daso_nodes.py exposed --data mnist.npz --results FILE", "6a9a608",
    ),
    Claim(
        "docs/daso.md", "larger clusters, simulated", ("daso-scale.csv",), "daso_nodes.py scale --results FILE",
        "cdc33bc", "2026-11-19",
    ),
    Claim(
        "docs/eva.md", "how the defaults were chosen", ("eva-choices-cpu.csv",),
        "eva_choices.py --data FOLDER --results FILE", "3d8b872",
    ),
    *(
        Claim(
            "docs/eva.md", says, (f"eva-{task}-h200.csv", f"eva-{task}-times-h200.csv", f"eva-{task}-h200.png"),
            f"eva_convergence.py run, time and draw --task {task} --data FOLDER --results FILE", commit,
        )
        for task, says, commit in (
            ("autoencoder", "the autoencoder", "cc9a04d"), ("text", "the small GPT", "a7a76b8"),
            ("cifar", "the ResNet on CIFAR-10", "a7a76b8"),
        )
    ),
    Claim(
        "docs/eva.md", "the autoencoder on a CPU", ("eva-autoencoder-cpu.csv",),
        "eva_convergence.py run --task autoencoder --data FOLDER --results FILE", "cf525f3",
    ),
    Claim(
        "docs/eva.md", "further directions", ("eva-directions-h200.csv", "eva-directions-cpu.csv"),
        "eva_rules.py --data FOLDER --results FILE", "8777a38",
    ),
    Claim(
        "docs/eva.md", "what a step costs", ("eva-cost-h200.csv",),
        "eva_cost.py time --form captured --form eager --results FILE", "a7a76b8",
    ),
    Claim(
        "docs/eva.md", "how much ResNet-110's step differs by process", ("eva-cost-resnet110-four-runs-h200.csv",),
        "eva_cost.py time --workload resnet110-128 --form captured --results FILE, four times; `run` numbers them",
        "8777a38",
    ),
    Claim(
        "docs/eva.md", "what the host does in an eager step", ("eva-eager-phases-h200.csv",),
        "eva_cost.py phases --results FILE", "8777a38",
    ),
    Claim(
        "docs/eva.md", "the update alone", ("eva-update-h200.csv",), "eva_cost.py update --results FILE", "a7a76b8",
    ),
)  # fmt: skip

_TRIAL = "a trial; the code of the ways that were not taken is not here"
RECORDS = (
    Claim("docs/compile.md", "ways tried", ("whole-step-ways-tried-h200.csv",), _TRIAL, "2d70146"),
    Claim(
        "docs/compile.md", "ways tried on convolutions", ("whole-step-convolutions-tried-h200.csv",), _TRIAL, "9c51829"
    ),
    Claim("docs/compile.md", "time to compile", ("whole-step-compile-time-tried.csv",), "printouts", "b9b88be"),
    Claim(
        "docs/compile.md", "an update beside matrix products", ("overlap-bound-h200.txt",), "a printout of a script "
        "that was not kept", "2d70146", "2026-11-16",
    ),
    Claim("docs/fusion.md", "ways tried", ("fusion-ways-tried-h200.csv",), _TRIAL, "041f23d"),
    Claim("docs/fusion.md", "sizes of buckets on a CPU", ("fusion-cpu-buckets-tried.csv",), "printouts", "e656455"),
    Claim(
        "docs/fusion.md", "an MLP on a CPU", ("fusion-cpu-repeats.csv",),
        "six runs, put together by a script that was not kept", "49d0849",
    ),
    Claim("docs/reorder.md", "ways tried", ("reorder-ways-tried-h200.csv",), _TRIAL, "ca1544d"),
    Claim(
        "docs/reorder.md", "ways tried inside of `compile()`", ("reorder-compile-ways-tried-h200.csv",), _TRIAL,
        "5cf0161",
    ),
    Claim(
        "docs/reorder.md", "kernels of a step on one and two streams", ("reorder-compile-kernels-h200.csv",),
        "torch's profiler; the script was not kept", "5cf0161", "2026-11-16",
    ),
    Claim(
        "docs/data-parallel.md", "what our hooks take", ("data-parallel-overhead-tried.csv",), _TRIAL, "8061290"
    ),
    Claim(
        "docs/pipeline.md", "costs that the simulation of many devices starts from",
        ("costs-gpt-4x2048-h200.json",), "`gradweave.profile.measure_costs`; the script was not kept", "3c67c53",
        "2026-11-16",
    ),
    Claim("docs/daso.md", "ways to expose less", ("daso-exposed-ways-tried.csv",), _TRIAL, "7d4b887"),
    Claim("docs/daso.md", "what staleness costs", ("daso-staleness-tried.csv",), "printouts", "12f8c6e"),
    Claim("docs/eva.md", "other rules", ("eva-rules-tried-h200.csv",), _TRIAL, "3d8b872"),
    Claim("docs/eva.md", "reads ahead", ("eva-reads-ahead-tried-h200.csv",), _TRIAL, "3d8b872"),
    Claim(
        "docs/eva.md", "kernels of a captured step", ("eva-kernels-h200.txt",),
        "torch's profiler; the script was not kept", "3d8b872", "2026-11-18",
    ),
)  # fmt: skip
"""What tables of ways tried, and explanations, need, and no command here writes."""
