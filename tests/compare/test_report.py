"""The report is one page that needs nothing else."""

import json

from compare.own import own, small
from compare.sharing import together
from gradweave.compare import compare
from gradweave.compare.figures import save_figures
from gradweave.compare.report import save_report
from gradweave.compare.trial import Setting


@together
def test_figures_and_a_report_that_needs_nothing_else(comparison, tmp_path):
    paths = save_figures(comparison, tmp_path)
    assert all(path.stat().st_size > 5000 for path in paths)
    save_report(comparison, paths, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "")
    assert "identical" in page
    assert comparison.title in page
    assert "autoencoder (364,240 parameters), adamw at lr 0.003, batch 64, float32" in page
    assert "of 86 steps: 60 to settle, 20 timed" in page
    save_report(comparison, paths, tmp_path / "report.html", "gradweave compare <x>")
    assert "<code>gradweave compare &lt;x&gt;</code>" in (tmp_path / "report.html").read_text()
    json.dumps(comparison.as_dict(), allow_nan=False)


def test_the_rule_of_auto_stands_beside_its_times(tmp_path):
    pages = []
    for mode in ("auto", "forward"):
        compared = compare(Setting(own(small)), [mode], steps=20)
        save_report(compared, save_figures(compared, tmp_path), tmp_path / "report.html")
        pages.append((tmp_path / "report.html").read_text())
    rule = "at least 3% faster in the median, and faster in every one of its own rounds"
    assert [rule in page for page in pages] == [True, False]
