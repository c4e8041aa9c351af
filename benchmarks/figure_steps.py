"""Tables of steps on one GPU: ``compile()``, ``fuse()``, ``reorder()``."""

from __future__ import annotations

from collections.abc import Callable

from figures import NONE, Results, interval, span, table

RATIO = ("speedup", "speedup_low", "speedup_high")
CASES = {
    "gpt2-2x1024": "GPT-2 (163M), 2 x 1024, AdamW",
    "gpt2-8x1024": "the same, 8 x 1024",
    "mobilenet_v2-32": "MobileNetV2, batch 32, AdamW",
    "resnet50-32": "ResNet-50, batch 32, SGD",
}


def whole_step_table(results: Results) -> str:
    rows = []
    for case, name in CASES.items():
        ms = {row["mode"]: float(row["ms_50"]) for row in results.rows("whole-step-h200.csv", case=case)}
        floors = results.row("whole-step-h200.csv", case=case, mode="step")
        jax = f"{ms['jax']:.2f}" if "jax" in ms else NONE
        rows.append([
            name, jax, f"{ms['step']:.2f}", f"{ms['jax'] / ms['step']:.2f}" if "jax" in ms else NONE,
            f"{ms['step_clip']:.2f}", f"{float(floors['flops_floor_ms']):.2f}, {float(floors['update_floor_ms']):.2f}",
        ])  # fmt: skip
    return table(
        ("ms", "JAX", "`compile()`", "times as fast as JAX", "with clipping", "floor: arithmetic, update"), rows
    )


WAYS = {
    "reduce-overhead": ("torch.compile reduce-overhead",),
    "one CUDA graph": ("torch.compile and fused AdamW in one CUDA graph",),
    "`compile()` as it was": ("one graph, as it was", "as it was, with clipping"),
    "coordinate descent tuning": ("coordinate descent tuning",),
    "autotuned pointwise kernels": ("autotuned pointwise kernels",),
    "Inductor's own combo kernels": ("Inductor's own combo kernels", "combo kernels, with clipping"),
    "no reordering for peak memory": ("no reordering for peak memory",),
    "the same, scalars not shared between updates": ("no reordering; scalars not shared",),
    "**the same, small kernels combined**, 8 at most": (
        "the same; small kernels combined, 8 at most", "small kernels combined, 8 at most, with clipping",
    ),
    "the same, 24 at most (built in)": ("the same; 24 at most",),
}  # fmt: skip


def ways_table(results: Results) -> str:
    """Write milliseconds of a step by what was tried, each run's."""

    def ms(case: str, way: str) -> str:
        rows = results.rows("whole-step-ways-tried-h200.csv", case=case, way=way)
        return " and ".join(f"{float(row['ms_50']):.2f}" for row in rows) or NONE

    rows = [
        [name, ms("gpt2-2x1024", ways[0]), ms("gpt2-2x1024", ways[1]) if len(ways) > 1 else NONE,
         ms("mobilenet_v2-32", ways[0])]
        for name, ways in WAYS.items()
    ]  # fmt: skip
    return table(("way", "GPT-2 2 x 1024", "with clipping", "MobileNetV2"), rows)


CONVOLUTION_WAYS = {
    "torch.compile reduce-overhead": "reduce-overhead",
    "torch.compile reduce-overhead, cudnn.benchmark off": "the same, without cuDNN's search",
    "torch.compile and the fused optimizer in one CUDA graph": "one CUDA graph",
    "compile()": "`compile()`",
    "Inductor's own combo kernels": "Inductor's own combo kernels",
    "1x1 convolutions as matrix products": "1x1 convolutions as matrix products",
    "reordering for peak memory": "reordering for peak memory",
    "cudnn.benchmark off": "without cuDNN's search",
    "memory_budget=0.8": "`memory_budget=0.8`",
}


def convolution_ways_table(results: Results) -> str:
    """Write milliseconds of a step, and MiB, by what was tried on networks of convolutions."""
    rows = []
    for way, name in CONVOLUTION_WAYS.items():
        found = results.rows("whole-step-convolutions-tried-h200.csv", way=way)
        shown = {row["case"]: f"{float(row['ms_50']):.2f}, {row['peak_mib_steps_2_to_10']}" for row in found}
        rows.append([name, *(shown.get(case, NONE) for case in ("mobilenet_v2-32", "resnet50-32"))])
    return table(("way", "MobileNetV2", "ResNet-50"), rows)


ON_GPU, ON_CPU = "fusion-h200.csv", "fusion-cpu.csv"
MODES = ("backward", "forward", "auto")


def fusion_table(name: str) -> Callable[[Results], str]:
    """Write times as fast as the fastest stock form, by case: each mode, and stock against itself."""

    def make(results: Results) -> str:
        rows = []
        for case in dict.fromkeys(row["case"] for row in results.rows(name)):
            own = {row["mode"]: row for row in results.rows(name, case=case)}
            stock, again = next((own[mode], row) for mode in own if (row := own.get(f"{mode} (again)")))
            modes = [interval(own[mode], *RATIO) if mode in own else NONE for mode in MODES]
            rows.append([
                case.split(": ")[1].replace("_", " "), f"`{stock['mode']}`", f"{float(stock['ms_50']):.1f}",
                interval(again, *RATIO), *modes,
            ])  # fmt: skip
        return table(("", "stock", "ms", "the same again", "`backward`", "`forward`", "`auto`"), rows)

    return make


def fusion_spans(results: Results, name: str) -> str:
    """Say what each mode gives, over all cases."""
    spans = {mode: span(float(row["speedup"]) for row in results.rows(name, mode=mode)) for mode in MODES}
    return ", ".join(f"`{mode}` {words}" for mode, words in spans.items())


def gradients_saved(results: Results) -> str:
    rows = results.rows("fusion-memory-h200.csv", mode="backward")
    return " and ".join(f"{100 * float(row['saved_share_of_gradients']):.0f}% ({row['dtype']})" for row in rows)


REORDER = "reorder-h200.csv"
ORDERS = ("side_stream", "joint", "joint_bounded", "cross_step")
NETWORKS = {
    "densenet121-k12-8": "DenseNet-121, growth 12, batch 8",
    "densenet121-k12-32": "batch 32",
    "densenet121-k32-8": "DenseNet-121, growth 32, batch 8",
    "densenet121-k32-32": "batch 32",
    "mobilenet_v3_large-32": "MobileNetV3-Large, batch 32",
    "resnet50-8": "ResNet-50, batch 8",
    "gpt2-2x256": "GPT-2 124M, 2 x 256",
    "gpt2-2x1024": "GPT-2 124M, 2 x 1024",
}


def reorder_table(results: Results) -> str:
    """Write times as fast as the captured stock step, by model and order."""
    rows = []
    for case, name in NETWORKS.items():
        own = {row["mode"]: row for row in results.rows(REORDER, case=case)}
        stock = float(own["captured"]["ms_50"])
        off = [100 * float(own[mode]["predicted_off"]) for mode in ORDERS]
        ratios = (stock / float(own[mode]["ms_50"]) for mode in ("split", *ORDERS))
        rows.append([
            name, f"{stock:.2f}", *(f"{ratio:.3f}" for ratio in ratios),
            interval(own["split (again)"], *RATIO), f"{min(off):.0f} to {max(off):.0f}%",
        ])  # fmt: skip
    header = (
        "", "captured stock, ms", "split, one stream", "side_stream", "joint", "joint within 32 MiB", "cross_step",
        "split against itself", "predicted off by",
    )  # fmt: skip
    return table(header, rows)


def reorder_span(results: Results) -> str:
    ratios = []
    for case in NETWORKS:
        own = {row["mode"]: float(row["ms_50"]) for row in results.rows(REORDER, case=case)}
        ratios += [own["captured"] / own[mode] for mode in ORDERS]
    return span(ratios)


def reorder_compile_table(results: Results) -> str:
    """Write what a second stream gives inside of ``compile()``, by model."""
    rows = []
    for case in ("gpt2-2x256", "gpt2-2x1024", "densenet121-k32-8", "mobilenet_v3_large-32"):
        own = {row["mode"]: row for row in results.rows("reorder-compile-h200.csv", case=case)}
        rows.append([
            NETWORKS[case], *(f"{float(own[mode]['ms_50']):.2f}" for mode in ("compile", "compile_costs")),
            interval(own["compile_costs"], *RATIO), interval(own["compile (again)"], *RATIO),
        ])  # fmt: skip
    return table(("", "one stream, ms", "two streams, ms", "times as fast", "one stream against itself"), rows)


def reorder_compile_span(results: Results) -> str:
    return span(float(row["speedup"]) for row in results.rows("reorder-compile-h200.csv", mode="compile_costs"))
