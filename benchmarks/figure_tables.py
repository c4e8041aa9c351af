"""The tables of README and docs, made of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from claims import CLAIMS, RECORDS, Claim
from figure_eva import (
    best_figures,
    choices_table,
    convergence_table,
    cost_span,
    directions_table,
    eva_cost_table,
    phases_table,
)
from figure_ranks import (
    EMULATED,
    REAL,
    best_ddp_span,
    bfloat16_span,
    compile_ranks_table,
    data_parallel_stock_table,
    data_parallel_table,
    exposed_table,
    pipeline_emulated_table,
    pipeline_real_table,
    pipeline_simulated_table,
    pipeline_span,
    race_gain,
    race_table,
    scale_table,
)
from figure_steps import (
    ON_CPU,
    ON_GPU,
    convolution_ways_table,
    fusion_spans,
    fusion_table,
    gradients_saved,
    reorder_compile_span,
    reorder_compile_table,
    reorder_span,
    reorder_table,
    ways_table,
    whole_step_table,
)
from figure_suite import compile_span, start_table, stock_table, suite_table
from figures import Results, table


def claims_table(results: Results) -> str:
    """Write what README and docs claim, by page."""
    return table(("claim", "results", "command", "measured", "commit"), _claim_rows(CLAIMS, results, "python "))


def records_table(results: Results) -> str:
    return table(("what for", "results", "made by", "measured", "commit"), _claim_rows(RECORDS, results, ""))


def _claim_rows(claims: Iterable[Claim], results: Results, before: str) -> Iterable[list[str]]:
    for claim in claims:
        command = f"`{claim.command}`" if before else claim.command
        page = Path(claim.page).name
        yield [
            f"[{page}](../{claim.page}): {claim.says}",
            ", ".join(f"[{name}](results/{name})" for name in claim.files),
            command, _dates(claim, results), _commits(claim, results),
        ]  # fmt: skip


def _dates(claim: Claim, results: Results) -> str:
    dates = sorted({date for name in claim.files for date in results.of_column(name, "date")}) or [claim.date]
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _commits(claim: Claim, results: Results) -> str:
    measured_at = sorted({commit for name in claim.files for commit in results.of_column(name, "commit")})
    return ", ".join(measured_at) if measured_at else f"with {claim.commit}"


def techniques_table(results: Results) -> str:
    """Write what each technique gives against the best stock, over all that was measured."""
    rows = [
        (
            "[`compile()`](docs/compile.md)", "fastest of torch's own steps, model *and* loss compiled, in CUDA graphs",
            compile_span(results), "the fastest step in one call, with your loop's optimizer, scheduler and clipping",
        ),
        (
            "[`fuse()`](docs/fusion.md)", "eager, `fused=True`",
            "on a GPU " + fusion_spans(results, ON_GPU) + ": no gain in time; on two CPU cores "
            + fusion_spans(results, ON_CPU),
            f"memory: `backward` saves {gradients_saved(results)} of the gradients of a 1.5-billion-parameter GPT",
        ),
        (
            "[`reorder()`](docs/reorder.md)", "the stock step in one CUDA graph, eager kernels",
            f"{reorder_span(results)}; inside of `compile()` {reorder_compile_span(results)}",
            "captured steps of small kernels; a compiled step is faster than any of these orders by itself",
        ),
        (
            "[`DataParallel`](docs/data-parallel.md)",
            "the best float32 DDP at each point, its size of messages tuned, over Gloo",
            f"`auto` {best_ddp_span(results)}; in bfloat16 {bfloat16_span(results)} over DDP with the bf16 hook",
            "links on which gradients take about as long as the computation, or longer; where they may be rounded, "
            "DDP's bf16 hook alone gives more; no gain has been shown on GPUs",
        ),
        (
            "[`Pipeline`](docs/pipeline.md)", "the fastest of torch's schedules in each setting, over Gloo",
            f"`modulo` {pipeline_span(results, EMULATED)} with computation emulated, {pipeline_span(results, REAL)} "
            "with real computation",
            "no gain in time over these; bounds of memory, uneven layers, slow links: `auto` takes whichever "
            "is simulated to be fastest, torch's included",
        ),
        (
            "[`DASO`](docs/daso.md)", "time to one accuracy (MNIST), two nodes, a slow link",
            f"{race_gain(results, 'ddp')} over float32 DDP, {race_gain(results, 'ddp_bf16')} over DDP with the bf16 "
            f"hook, {race_gain(results, 'hierarchical')} over torch's hierarchical averager",
            "networks between nodes that cost a large part of a step; nothing on one node",
        ),
        (
            "[`Eva`, `EvaF`](docs/eva.md)", "captured step of fused AdamW; best test figures",
            f"step time {cost_span(results, 'times_adamw')} of AdamW's; error of the autoencoder "
            f"{best_figures(results, 'autoencoder', ('eva', 'muon', 'adamw'))}; loss of a small GPT "
            f"{best_figures(results, 'text', ('eva', 'muon', 'adamw'))}; accuracy on CIFAR-10 "
            f"{best_figures(results, 'cifar', ('eva', 'sgd', 'adamw'))}",
            "fewer steps than AdamW's to the same loss, at first-order cost; Muon takes fewer on short schedules; "
            "on CIFAR-10 level with SGD",
        ),
    ]  # fmt: skip
    return table(("technique", "against", "times as fast, range", "what it is for"), rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "techniques": techniques_table,
    "claims": claims_table,
    "records": records_table,
    "suite": suite_table,
    "suite-stock": stock_table,
    "suite-start": start_table,
    "whole-step": whole_step_table,
    "whole-step-ways": ways_table,
    "whole-step-convolutions": convolution_ways_table,
    "compile-ranks": compile_ranks_table,
    "fusion": fusion_table(ON_GPU),
    "fusion-cpu": fusion_table(ON_CPU),
    "reorder": reorder_table,
    "reorder-compile": reorder_compile_table,
    "data-parallel-stock": data_parallel_stock_table,
    "data-parallel-resnet50": data_parallel_table("waiting resnet50, 2 ranks"),
    "data-parallel-uniform": data_parallel_table("waiting uniform, 2 ranks"),
    "data-parallel-4-ranks": data_parallel_table("waiting resnet50, 4 ranks"),
    "data-parallel-gpt": data_parallel_table("gpt, 2 ranks, real compute"),
    "data-parallel-resnet18": data_parallel_table("resnet18, 2 ranks, real compute"),
    "pipeline-emulated": pipeline_emulated_table,
    "pipeline-real": pipeline_real_table,
    "pipeline-simulated": pipeline_simulated_table,
    "daso-race": race_table,
    "daso-exposed": exposed_table,
    "daso-scale": scale_table,
    "eva-choices": choices_table,
    "eva-autoencoder": convergence_table("autoencoder"),
    "eva-text": convergence_table("text"),
    "eva-cifar": convergence_table("cifar"),
    "eva-cost": eva_cost_table,
    "eva-phases": phases_table,
    "eva-directions": directions_table,
}
