"""Tables of several ranks: ``DataParallel``, ``Pipeline``, ``DASO``."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from figures import NONE, Results, Row, interval, span, table

LINK = "data-parallel.csv"
SETTINGS = {
    "waiting resnet50, 2 ranks": "ResNet-50's shape, 2 ranks",
    "waiting uniform, 2 ranks": "equal layers, 2 ranks",
    "waiting resnet50, 4 ranks": "ResNet-50's shape, 4 ranks",
    "gpt, 2 ranks, real compute": "GPT",
    "resnet18, 2 ranks, real compute": "ResNet-18",
}


def data_parallel_table(setting: str) -> Callable[[Results], str]:
    def make(results: Results) -> str:
        rows = []
        for r in dict.fromkeys(row["r"] for row in results.rows(LINK, setting=setting)):
            own = {row["variant"]: row for row in results.rows(LINK, setting=setting, r=r)}
            ratio = {name: f"{float(row['speedup']):.3f}" for name, row in own.items()}
            first_k = own["reverse_first_k"]
            rows.append([
                r, f"{float(own['ddp']['ms_50']):.0f}", ratio["ddp_small"], ratio["no_barrier"],
                f"{ratio['reverse_first_k']}, {first_k['k']}", f"{float(first_k['predicted_speedup']):.3f}",
                ratio["auto"], f"{float(own['auto']['over_ddp_small']):.3f}", ratio["ddp (again)"],
            ])  # fmt: skip
        header = (
            f"{SETTINGS[setting]}: r", "DDP, ms", "DDP, small messages", "no barrier", "reverse first-k, and k",
            "simulated", "`auto`", "`auto` over DDP, small messages", "DDP again",
        )  # fmt: skip
        return table(header, rows)

    return make


BEST_DDP = "data-parallel-stock.csv"


def data_parallel_stock_table(results: Results) -> str:
    rows = []
    for (setting, r), own in _points(results).items():
        best, first_k, hook, bf16 = (
            own[name] for name in (own["auto"]["best_stock"], "reverse_first_k", "ddp_tuned, bf16 hook", "auto, bf16")
        )
        rows.append([
            f"{SETTINGS[setting]}, {r}", f"{float(own['ddp']['ms_50']):.0f}",
            f"{float(best['ms_50']):.0f}, {int(best['message_bytes']) / (1 << 20):g} MiB", _over_best(own["ddp"]),
            _over_best(own["auto"]), f"{_over_best(first_k)}, {first_k['k']}", _over_best(hook),
            _over_best(bf16), f"{_over_the_hook(own):.3f}",
            interval(own["auto"], "a_a", "a_a_low", "a_a_high"),
        ])  # fmt: skip
    header = (
        "model, r", "DDP, ms", "best DDP, ms, and its messages", "DDP", "`auto`", "reverse first-k, and k",
        "best DDP with the bf16 hook", "`auto` in bfloat16", "the same over the hook", "DDP again",
    )  # fmt: skip
    return table(header, rows)


COMPILED = "compile-ranks.csv"
COMPILED_WAYS = (
    "ddp", "ddp, compiled", "ddp, bf16 hook", "ddp, compiled, bf16 hook", "compile(mesh=), replay", "compile(mesh=)",
    "compile(mesh=), no barrier", "compile(mesh=), reverse first-k", "compile(mesh=), reverse first-k, replay",
    "compile(mesh=), bf16",
)  # fmt: skip


def compile_ranks_table(results: Results) -> str:
    """Write how many times as fast as the best float32 DDP a compiled step on two ranks is."""
    rows = []
    for r in sorted({row["r"] for row in results.rows(COMPILED)}, key=float):
        own = {row["variant"]: row for row in results.rows(COMPILED, r=r)}
        best = own[own["ddp"]["best_stock"]]
        rows.append([
            r, f"{float(best['compute_ms']):.0f}", f"{float(best['ms_50']):.0f}, {best['variant']}",
            *(_over_best(own[name]) for name in COMPILED_WAYS), interval(best, "a_a", "a_a_low", "a_a_high"),
        ])  # fmt: skip
    header = (
        "r",
        "computation, ms",
        "best DDP, ms",
        *(f"`{n}`" if "(" in n else n for n in COMPILED_WAYS),
        "DDP again",
    )
    return table(header, rows)


def _points(results: Results) -> dict[tuple[str, str], dict[str, Row]]:
    points: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results.rows(BEST_DDP):
        points.setdefault((row["setting"], row["r"]), {})[row["variant"]] = row
    order = list(SETTINGS)
    return dict(sorted(points.items(), key=lambda point: (order.index(point[0][0]), float(point[0][1]))))


def _over_best(row: Row) -> str:
    return interval(row, "over_best_stock", "over_best_stock_low", "over_best_stock_high")


def _over_the_hook(own: dict[str, Row]) -> float:
    return float(own["ddp_tuned, bf16 hook"]["ms_50"]) / float(own["auto, bf16"]["ms_50"])


def bfloat16_span(results: Results) -> str:
    """Say what ``auto`` that sends bfloat16 is to the best DDP that does."""
    return span(map(_over_the_hook, _points(results).values()))


def best_ddp_span(results: Results) -> str:
    """Say what ``auto`` is to the best DDP, and where it gains no more than two equal steps differ by."""
    autos = {point: own["auto"] for point, own in _points(results).items()}
    without: dict[str, list[str]] = {}
    for (setting, r), row in autos.items():
        if row["claim"] != "yes" or float(row["over_best_stock"]) < 1:
            without.setdefault(SETTINGS[setting], []).append(r)
    words = f"{span(float(row['over_best_stock']) for row in autos.values())} at {len(autos)} points"
    points = " and ".join(f"{', '.join(ratios)} ({name})" for name, ratios in without.items())
    return words + (f"; no gain where communication takes {points} of the computation's time" if points else "")


EMULATED, REAL = "pipeline-emulated.csv", "pipeline-real.csv"
PIPELINES = (
    "fast_forward", "modulo", "modulo, memory of interleaved_zero_bubble", "interleaved_zero_bubble", "zbv",
    "one_f_one_b", "gpipe (again)",
)  # fmt: skip
PIPELINES_HEADER = (
    "fast_forward", "modulo", "modulo, with the memory of interleaved zero bubble", "interleaved zero bubble", "ZBV",
    "1F1B", "GPipe again", "modulo over the best of torch's",
)  # fmt: skip
STOCK_PIPELINES = {
    "gpipe": "GPipe", "one_f_one_b": "1F1B", "interleaved_zero_bubble": "interleaved zero bubble", "zbv": "ZBV",
}  # fmt: skip
STACKS = {
    "model bert, blocks 10, width 768": "BERT-like, width 768, micro-batches of 2 x 128 tokens",
    "model gpt, blocks 10, width 768": "GPT-like, the same",
    "model bert, blocks 10, width 256": "BERT-like, width 256, 4 x 128 tokens",
    "model gpt, blocks 10, width 256": "GPT-like, the same",
}


def _by_setting(results: Results, name: str) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in results.rows(name):
        found.setdefault(row["setting"], {})[row["variant"]] = row
    return found


def pipeline_emulated_table(results: Results) -> str:
    rows = []
    for setting, own in _by_setting(results, EMULATED).items():
        numbers = dict(part.split(" ") for part in setting.split(", "))
        cells = [
            f"{float(own[name]['times_as_fast']):.3f} {_share(own[name])}".rstrip() if name in own else NONE
            for name in PIPELINES
        ]
        rows.append([f"{numbers['ranks']}, {numbers['microbatches']}", *cells, _over_the_best(own["modulo"])])
    return table(("ranks, micro-batches", *PIPELINES_HEADER), rows)


def _share(row: Row) -> str:
    promises = row["share_of_free_link_excess"] and float(row["free_link_times_as_fast"]) > 1
    return f"({float(row['share_of_free_link_excess']):.2f})" if promises else ""


def pipeline_real_table(results: Results) -> str:
    settings = _by_setting(results, REAL)
    rows = []
    for part, name in STACKS.items():
        own = next(rows for setting, rows in settings.items() if part in setting)
        cells = [
            f"{float(own[one]['times_as_fast']):.2f} [{float(own[one]['lowest']):.2f}, "
            f"{float(own[one]['highest']):.2f}] ({float(own[one]['predicted_times_as_fast']):.2f})"
            for one in PIPELINES
        ]
        rows.append([name, *cells, _over_the_best(own["modulo"])])
    return table(("", *PIPELINES_HEADER), rows)


def _over_the_best(row: Row) -> str:
    """Write how many times as fast as the fastest of torch's schedules one is, and which that is."""
    return f"{_over_best(row)} ({STOCK_PIPELINES[row['best_stock']]})"


def pipeline_span(results: Results, name: str) -> str:
    """Say how many times as fast as the best of torch's schedules modulo is, by setting."""
    return span((float(row["over_best_stock"]) for row in results.rows(name, variant="modulo")), 3)


def pipeline_simulated_table(results: Results) -> str:
    policies = ("fast_forward", "modulo", "interleaved_zero_bubble", "interleaved", "zbv", "one_f_one_b")
    rows = results.rows("pipeline-simulated.csv")
    lines = []
    for devices, blocks, link in dict.fromkeys((row["devices"], row["blocks"], row["link"]) for row in rows):
        own = {row["policy"]: row for row in rows if (row["devices"], row["link"]) == (devices, link)}
        ratios = [f"{float(own[policy]['times_as_fast_as_gpipe']):.2f}" for policy in policies]
        lines.append([f"{devices}, {blocks}", link.split(",")[0], *ratios])
    header = ("devices, blocks", "link", "fast_forward", "modulo", "interleaved zero bubble", "interleaved", "ZBV")
    return table((*header, "1F1B"), lines)


WAYS = {
    "ddp": "DDP",
    "ddp_bf16": "DDP, bf16 hook",
    "post_local": "post-local SGD",
    "hierarchical": "hierarchical averager",
    "diloco": "DiLoCo-style",
    "daso_paper": '`DASO(mode="paper")`, one epoch of warm-up and cool-down',
    "daso": "`DASO`",
}


def _races(results: Results, way: str) -> dict[str, list[Row]]:
    """Read a way's races by learning rate, the rate of most seeds first: that is the one that tuning has chosen."""
    rows = results.rows("daso-race.csv", way=way, kind="race")
    rates = {lr: [row for row in rows if row["lr"] == lr] for lr in dict.fromkeys(row["lr"] for row in rows)}
    return dict(sorted(rates.items(), key=lambda item: -len(item[1])))


def _seconds(runs: list[Row]) -> list[float]:
    return [float(run["seconds_to_target"]) for run in runs if run["seconds_to_target"] != "nan"]


def race_table(results: Results) -> str:
    rows = []
    for way, name in WAYS.items():
        for lr, runs in _races(results, way).items():
            seconds = _seconds(runs)
            shown = f"{statistics.median(seconds):.2f} ({span(seconds)})" if seconds else "never"
            if len(seconds) < len(runs):
                shown += f", reached by {len(seconds)} of {len(runs)}"
            accuracy = 100 * statistics.mean(float(run["final_accuracy"]) for run in runs)
            step = statistics.median(1e3 * float(run["seconds"]) / float(run["steps"]) for run in runs)
            rows.append([name, lr, str(len(runs)), shown, f"{accuracy:.2f}%", f"{step:.1f}"])
    header = ("way", "learning rate", "seeds", "seconds to 97.5%, median (range)", "accuracy after six epochs, mean")
    return table((*header, "milliseconds per step"), rows)


def race_gain(results: Results, over: str) -> str:
    """Say how many times sooner DASO is than another way at the rate that turned out best for that."""
    medians = [
        statistics.median(seconds)
        for runs in _races(results, over).values()
        if len(seconds := _seconds(runs)) == len(runs)
    ]
    ours = statistics.median(_seconds(next(iter(_races(results, "daso").values()))))
    return f"{min(medians) / ours:.2f}"


def exposed_table(results: Results) -> str:
    rows = [
        [
            row["setting"], f"{row['megabits']} Mbit/s", f"{float(row['step_milliseconds_without']):.1f} ms",
            f"{float(row['step_milliseconds_with']):.1f} ms",
            f"{_percent(row['exposed'])}% ({_percent(row['lowest'])} to {_percent(row['highest'])})",
            f"{_percent(row['a_a'])}%", f"{row['every']}, {row['wait']}",
            f"{_percent(row['bytes_over'])}%", f"{float(row['predicted_milliseconds']):.1f} ms",
        ]
        for row in results.rows("daso-exposed.csv")
    ]  # fmt: skip
    header = (
        "setting", "link", "step without", "step with", "exposed (range)", "two equal ones", "`every`, `wait`",
        "bytes on the link over ideal", "predicted",
    )  # fmt: skip
    return table(header, rows)


def _percent(share: str) -> str:
    return f"{100 * float(share):.1f}"


def scale_table(results: Results) -> str:
    names = {"resnet50": "ResNet-50", "gpt2_xl": "GPT-2 XL"}
    rows = [
        [
            names[row["network"]], row["link"].replace("Gbit", " Gbit"), f"{int(row['nodes']):,}", row["compute"],
            f"{float(row['ddp_milliseconds']):.1f} ms", f"{float(row['daso_milliseconds']):.1f} ms",
            row["every_and_wait"], f"{float(row['times_as_fast']):.3g}x",
        ]
        for row in results.rows("daso-scale.csv")
    ]  # fmt: skip
    header = ("network", "link", "nodes", "computation", "step, DDP", "step, DASO", "`every` = `wait`")
    return table((*header, "times as fast"), rows)
