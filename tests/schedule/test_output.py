from pathlib import Path

import pytest

from gradweave.errors import ArgumentError
from gradweave.schedule import Costs, plan, save_timelines, single
from gradweave.schedule.output import check_ending


def test_the_ending_of_the_name_decides_between_picture_and_trace(tmp_path):
    timeline = plan(single(Costs.uniform(2)), policy="in_order").simulate()
    save_timelines([timeline], tmp_path / "x.json")
    timeline.save(str(tmp_path / "x.svg"))
    assert (tmp_path / "x.json").read_text().startswith('{"traceEvents"')
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("name", ["x.gif", "x", "png"])
def test_other_endings_are_refused_before_anything_is_drawn(name):
    with pytest.raises(ArgumentError, match=rf"path='{name}': end it in \.png, \.svg, \.pdf \(picture\) or \.json"):
        check_ending(Path(name))
    with pytest.raises(ArgumentError, match="end it in"):
        save_timelines([], name)
