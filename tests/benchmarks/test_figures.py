"""Tables of README and docs are made from the results, and each result is named by what is claimed."""

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


def test_a_result_that_somebody_has_changed_is_found(figures, tables, copy):
    suite = copy / "benchmarks" / "results" / "suite-h200.csv"
    suite.write_text(suite.read_text().replace("1.0099,1.0078,1.0143", "1.9099,1.9078,1.9143"))
    assert copy / "docs" / "compile.md" in figures.outdated(copy, tables)


def test_models_that_are_not_measured_are_rows_of_the_suite(figures, tables, copy):
    suite = copy / "benchmarks" / "results" / "suite-h200.csv"
    header, *lines = suite.read_text().splitlines(keepends=True)
    suite.write_text("".join([header, *(line for line in lines if line.startswith("resnet50-32"))]))
    text = tables["suite"](figures.Results(copy))
    assert text.count("not measured yet") == 15
    assert "(1 of 16 models)" in text


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


def test_results_have_no_paths_of_the_machine_they_were_measured_on(figures):
    path = re.compile(r"(?<![\w.])/(?:home|root|tmp|opt|usr|work|mnt|var)/")
    for name in figures.Results(ROOT).names():
        if not name.endswith(".png"):
            found = path.search((ROOT / "benchmarks" / "results" / name).read_text())
            assert not found, f"{name}: {found}"
