"""Tables of README and docs are made from the results, and each result is named by what is claimed."""

import csv
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]


@pytest.fixture
def figures(scripts):
    import figures

    return figures


@pytest.fixture
def tables(figures):
    import figure_tables

    return figure_tables.TABLES


@pytest.fixture
def copy(tmp_path: Path, figures) -> Path:
    """Copy the pages and the results, to be changed."""
    for page in figures.pages(ROOT):
        (tmp_path / page.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(page, tmp_path / page.relative_to(ROOT))
    shutil.copytree(ROOT / "benchmarks" / "results", tmp_path / "benchmarks" / "results")
    return tmp_path


def test_the_committed_tables_are_what_the_results_say(figures, tables):
    outdated = figures.outdated(ROOT, tables)
    assert not outdated, f"run `make figures`: {outdated}"


def test_a_table_that_somebody_has_changed_is_found(figures, tables, copy):
    page = copy / "docs" / "compile.md"
    page.write_text(page.read_text().replace("| resnet50-32 |", "| resnet50-33 |"))
    assert figures.outdated(copy, tables) == [page]


def change_suite(root: Path, change) -> None:
    change_rows(root, "suite-h200.csv", change)


def change_rows(root: Path, name: str, change) -> None:
    """Write a result's rows anew, without those that are changed to None."""
    path = root / "benchmarks" / "results" / name
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = [row for row in map(change, [dict(row) for row in rows]) if row is not None]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(kept)


def ours_on_resnet(row: dict[str, str]) -> bool:
    return (row["model"], row["variant"]) == ("resnet50-32", "gradweave.compile")


def test_a_result_that_somebody_has_changed_is_found(figures, tables, copy):
    change_suite(copy, lambda row: {**row, "ratio": "1.9"} if ours_on_resnet(row) else row)
    assert set(figures.outdated(copy, tables)) == {copy / "docs" / "compile.md", copy / "README.md"}


def test_models_that_are_not_measured_are_rows_of_the_suite(figures, tables, copy):
    change_suite(copy, lambda row: row if row["model"] == "resnet50-32" else None)
    text = tables["suite"](figures.Results(copy))
    import figure_suite

    count = len(figure_suite.suite_models())
    assert text.count("not measured yet") == count - 1
    assert f"(1 of {count} models)" in text


def test_a_step_of_ours_that_failed_is_a_row_that_says_so_and_counts_as_not_measured(figures, tables, copy):
    def fail(row):
        return {**row, "status": "failed", "reason": "out of memory", "ratio": "", "ms_50": ""}

    before = tables["suite"](figures.Results(copy))
    change_suite(copy, lambda row: fail(row) if ours_on_resnet(row) else row)
    text = tables["suite"](figures.Results(copy))
    (line,) = [line for line in text.splitlines() if line.startswith("| resnet50-32 ")]
    assert line.endswith("| failed: out of memory |")
    ((count, models),) = re.findall(r"\((\d+) of (\d+) models\)", before)
    assert f"({int(count) - 1} of {models} models)" in text


def test_stock_steps_are_compared_among_themselves_where_they_have_been_measured(figures, tables, copy):
    def fail(row):
        return {**row, "ratio": ""} if (row["model"], row["variant"]) == ("resnet50-32", "graph_compile") else row

    change_suite(copy, lambda row: fail(row) if row["model"] in ("resnet50-32", "gpt2-2x1024") else None)
    lines = tables["suite-stock"](figures.Results(copy)).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| gpt2-2x1024", "| resnet50-32"]
    assert lines[3] == "| resnet50-32 | 0.984 | \N{EN DASH} | \N{EN DASH} | \N{EN DASH} | 1.000 | \N{EN DASH} |"


def test_a_start_is_warm_where_a_cold_one_has_left_caches(figures, tables, copy):
    def line():
        text = tables["suite-start"](figures.Results(copy))
        (found,) = [line for line in text.splitlines() if line.startswith("| resnet50-32 ")]
        return found

    change_suite(copy, lambda row: {**row, "cold_s": "98.6", "warm_s": "34.9"} if ours_on_resnet(row) else row)
    assert line().endswith(", 34.9 |")
    change_suite(copy, lambda row: {**row, "cold_s": ""} if ours_on_resnet(row) else row)
    assert line().endswith(", \N{EN DASH} |")


def test_what_is_known_of_a_row_goes_when_it_is_measured_at_another_commit(figures, tables, copy, monkeypatch):
    import figure_suite

    monkeypatch.setattr(figure_suite, "NOTES", {("resnet50-32", "1111111"): "on a slow day"})
    change_suite(copy, lambda row: {**row, "commit": "1111111"})
    assert "1. on a slow day." in tables["suite"](figures.Results(copy))
    change_suite(copy, lambda row: {**row, "commit": "2222222"})
    assert "on a slow day" not in tables["suite"](figures.Results(copy))


def of_one_point(row: dict[str, str], **own) -> dict[str, str] | None:
    """Change the row of one point of DataParallel against the best DDP, and leave out the others."""
    if (row["setting"], row["r"]) != ("gpt, 2 ranks, real compute", "0.9"):
        return None
    known = {"over_best_stock": "0.8", "over_best_stock_low": "0.7", "over_best_stock_high": "0.9", "claim": "no"}
    return {**row, **known, "best_stock": "ddp_small", "a_a": "1.01", "a_a_low": "0.99", "a_a_high": "1.02", **own}


def test_data_parallel_is_shown_against_the_best_of_ddp_and_its_messages(figures, tables, copy):
    ways = {
        "ddp": {"ms_50": "640"},
        "ddp_small": {"ms_50": "540", "message_bytes": str(6 << 20)},
        "ddp_tuned, bf16 hook": {"ms_50": "470"},
        "reverse_first_k": {"k": "20"},
        "auto, bf16": {"ms_50": "400"},
    }
    change_rows(copy, "data-parallel-stock.csv", lambda row: of_one_point(row, **ways.get(row["variant"], {})))
    (line,) = tables["data-parallel-stock"](figures.Results(copy)).splitlines()[2:]
    ratio = "0.800 [0.700, 0.900]"
    assert line == (
        f"| GPT, 0.9 | 640 | 540, 6 MiB | {ratio} | {ratio} | {ratio}, 20 | {ratio} | {ratio} | 1.175 "
        "| 1.010 [0.990, 1.020] |"
    )


@pytest.mark.parametrize(("ratio", "claim"), [("1.2", "yes"), ("1.2", "no"), ("0.8", "yes")])
def test_where_nothing_more_than_noise_is_gained_over_the_best_ddp_it_is_said(figures, copy, ratio, claim):
    import figure_ranks

    own = {"over_best_stock": ratio, "claim": claim}
    change_rows(copy, "data-parallel-stock.csv", lambda row: of_one_point(row, **own))
    said = figure_ranks.best_ddp_span(figures.Results(copy))
    gains = (ratio, claim) == ("1.2", "yes")
    nothing = "; no gain where communication takes 0.9 (GPT) of the computation's time"
    assert said == f"{ratio}0 to {ratio}0 at 1 points" + ("" if gains else nothing)


def test_pipelines_are_shown_against_the_best_of_torchs_schedules(figures, tables, copy):
    def behind_zbv(row):
        if row["variant"] != "modulo" or "gpt, blocks 10, width 256" not in row["setting"]:
            return row
        known = {"over_best_stock": "0.9", "over_best_stock_low": "0.8", "over_best_stock_high": "0.95"}
        return {**row, **known, "best_stock": "zbv"}

    change_rows(copy, "pipeline-real.csv", behind_zbv)
    lines = tables["pipeline-real"](figures.Results(copy)).splitlines()
    assert [line.endswith("| 0.900 [0.800, 0.950] (ZBV) |") for line in lines[2:]] == [False, False, False, True]


def test_a_table_that_no_page_shows_is_an_error(figures, tables, copy):
    page = copy / "docs" / "compile.md"
    page.write_text(page.read_text().replace("<!-- figures: suite -->", ""))
    with pytest.raises(LookupError, match="no page has a place for the tables suite"):
        figures.generate(copy, tables)


def test_each_result_is_named_once_by_what_is_claimed(figures):
    import claims

    named = [name for claim in (*claims.CLAIMS, *claims.RECORDS) for name in claim.files]
    assert sorted(named) == sorted(figures.Results(ROOT).names())


def test_claims_name_scripts_that_are_there_and_pages_that_name_the_results(figures):
    import claims

    for claim in claims.CLAIMS:
        for script in re.findall(r"\w+\.py", claim.command):
            assert (ROOT / "benchmarks" / script).exists(), claim
    for claim in (*claims.CLAIMS, *claims.RECORDS):
        page = (ROOT / claim.page).read_text()
        for name in claim.files:
            assert name in page, f"{claim.page} does not name {name}"


def test_pages_name_no_results_that_are_gone(figures):
    there = figures.Results(ROOT).names()
    for page in PAGES:
        for name in re.findall(r"`(?:benchmarks/results/)?([\w-]+\.csv)`", page.read_text()):
            assert name in there, f"{page.name} names {name}"


def test_scripts_name_no_results_that_are_gone(figures):
    there = figures.Results(ROOT).names()
    for script in (ROOT / "benchmarks").glob("*.py"):
        for name in re.findall(r"benchmarks/results/([\w.-]+\.(?:csv|json|txt))", script.read_text()):
            assert name in there, f"{script.name} names {name}"


def test_results_have_no_paths_of_the_machine_they_were_measured_on(figures):
    path = re.compile(r"(?<![\w.])/(?:home|root|tmp|opt|usr|work|mnt|var)/")
    for name in figures.Results(ROOT).names():
        if not name.endswith(".png"):
            found = path.search((ROOT / "benchmarks" / "results" / name).read_text())
            assert not found, f"{name}: {found}"


def test_compiled_steps_of_several_ranks_are_compared_with_the_best_ddp(figures, tables, copy):
    def changed(row):
        own = {"over_best_stock": "0.7", "over_best_stock_low": "0.6", "over_best_stock_high": "0.8"}
        return {**row, **own} if (row["r"], row["variant"]) == ("1.0", "compile(mesh=)") else row

    before = tables["compile-ranks"](figures.Results(copy))
    change_rows(copy, "compile-ranks.csv", changed)
    after = tables["compile-ranks"](figures.Results(copy))
    assert "0.700 [0.600, 0.800]" in after
    assert "0.700 [0.600, 0.800]" not in before
