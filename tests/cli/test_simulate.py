import json
import subprocess
import sys

import pytest

from gradweave.cli.app import main
from gradweave.cli.simulate import _MOST_TASKS, _steps_to_steady_state, _tasks
from gradweave.schedule import Costs, Link


@pytest.fixture
def gradweave(monkeypatch, capsys):
    """Run the command in this process; return status, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gradweave", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return exit_.value.code, captured.out, captured.err

    return run


def test_json_is_one_object_with_a_result_per_policy(gradweave):
    status, out, err = gradweave(
        "simulate", "pipeline", "--policy", "gpipe,fast_forward,modulo", "--network", "uniform",
        "--stages", "4", "--layers", "24", "--microbatches", "4", "--json",
    )  # fmt: skip
    assert (status, err) == (0, "")
    results = json.loads(out)["results"]
    assert [(r["policy"], r["makespan"], r["step_time"]) for r in results] == [
        ("gpipe", 126.0, 126.0),
        ("fast_forward", 90.0, 90.0),
        ("modulo", 75.0, 75.0),
    ]
    for result in results:
        assert result["peak_bytes"] > 0
        assert set(result["busy"]) == {"gpu0", "gpu1", "gpu2", "gpu3"}


@pytest.mark.parametrize(
    ("scenario", "policies"),
    [
        ("single", 7),
        ("data-parallel", 4),
        ("pipeline", 7),
        ("daso", 2),
    ],
)
def test_the_defaults_give_a_table_and_a_picture(gradweave, scenario, policies, tmp_path):
    status, out, err = gradweave("simulate", scenario, "--out", str(tmp_path / "x.png"))
    assert status == 0
    assert all(line.startswith("simulating ") for line in err.splitlines())  # only where it takes long
    assert sum("x  " in line for line in out.splitlines()) == policies
    assert "…" not in out
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_cost_files_are_read(gradweave, tmp_path):
    path = tmp_path / "mine.json"
    Costs.uniform(6).save(path)
    status, out, _ = gradweave("simulate", "single", "--network", str(path), "--policy", "in_order", "--json")
    assert status == 0
    assert json.loads(out)["results"][0]["step_time"] == 18


def test_options_reach_the_policies_that_take_them(gradweave):
    base = ("simulate", "pipeline", "--layers", "24", "--microbatches", "4", "--json", "--policy", "gpipe,modulo")
    _, out, _ = gradweave(*base, "--group", "2")
    assert [r["makespan"] for r in json.loads(out)["results"]] == [126, 78]
    _, out, _ = gradweave(*base, "--link", "1B/s")
    assert [r["makespan"] for r in json.loads(out)["results"]] == [132, 101]
    _, out, _ = gradweave("simulate", "data-parallel", "--policy", "reverse_first_k", "--k", "7", "--json")
    assert json.loads(out)["results"][0]["options"] == {"k": 7}
    _, out, _ = gradweave("simulate", "pipeline", "--policy", "gpipe", "--max-in-flight", "2", "--json")
    assert json.loads(out)["results"][0]["options"] == {"max_in_flight": 2}
    _, out, _ = gradweave("simulate", "daso", "--policy", "daso", "--every", "3", "--wait", "2", "--json")
    assert json.loads(out)["results"][0]["options"] == {"every": 3, "wait": 2}
    _, out, _ = gradweave("simulate", "daso", "--policy", "daso", "--payload", "bfloat16")
    assert "payload=bfloat16" in out
    assert "…" not in out


def test_what_does_not_fit_is_left_out_of_all_and_said_so(gradweave):
    status, out, err = gradweave("simulate", "pipeline", "--stages", "5", "--json")
    assert status == 0
    assert "interleaved" not in out
    assert err.startswith("left out interleaved: microbatches=8")
    status, _, err = gradweave("simulate", "pipeline", "--byte-budget", "3")
    assert status == 2
    assert err.startswith("error: byte_budget=3")


def test_enough_steps_are_shown_for_a_slow_exchange(gradweave):
    _, out, _ = gradweave(
        "simulate", "daso", "--every", "20", "--wait", "20", "--link", "1Gbit/s", "--local-link", "free", "--json"
    )
    ddp, daso = json.loads(out)["results"]
    exchange = 2 * 3 / 4 * 4 * 25_557_032 / 125e6
    assert daso["step_time"] == pytest.approx(exchange / 20, rel=0.01)
    assert ddp["step_time"] > daso["step_time"]


def test_what_daso_refuses_is_not_simulated_either(gradweave):
    status, _, err = gradweave("simulate", "daso", "--every", "2", "--wait", "5")
    assert status == 2
    assert err.startswith("error: wait=5: give at most every=2")


def test_one_node_gains_nothing_from_exchanging_less(gradweave):
    _, out, _ = gradweave("simulate", "daso", "--nodes", "1", "--link", "1Gbit/s", "--json")
    ddp, daso = json.loads(out)["results"]
    assert daso["step_time"] == pytest.approx(ddp["step_time"], rel=0.05)


def test_names_and_paths_are_printed_as_they_are(gradweave, tmp_path):
    path = tmp_path / "mine.json"
    Costs(Costs.uniform(3).layers, name="[bold]x[/red]").save(path)
    picture = tmp_path / "[b]x.png"
    status, out, _ = gradweave("simulate", "single", "--network", str(path), "--out", str(picture))
    assert status == 0
    assert "[bold]x[/red]" in out
    assert picture.name in out
    assert picture.exists()


NEGATIVE = '{"layers": [{"name": "conv1", "forward": -1, "input_grad": 1, "weight_grad": 1}]}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pipeline", "--policy", "gpipes"], "--policy='gpipes': use one or more of gpipe, one_f_one_b"),
        (["single", "--policy", "gpipe"], "--policy='gpipe': use one or more of in_order"),
        (["pipeline", "--policy", ""], "--policy='': use one or more of"),
        (["single", "--network", "resnet"], "network='resnet': use one of uniform, resnet50"),
        (["single", "--network", "missing.json"], "cost file='missing.json': cannot be read"),
        (["single", "--network", "{malformed}"], "is not valid JSON"),
        (["single", "--network", "{negative}"], "layer 'conv1', forward=-1: give a number, zero or more"),
        (["single", "--network", "resnet50", "--layers", "3"], '--layers=3: is for "--network uniform"'),
        (["pipeline", "--policy", "gpipe", "--byte-budget", "3"], "byte_budget=3: gpipe holds 50 bytes on gpu"),
        (["single", "--policy", "joint", "--byte-budget", "3"], "byte_budget=3: give at least"),
        (["pipeline", "--byte-budget", "-1"], "--byte-budget=-1: give a positive number"),
        (["pipeline", "--stages", "0"], "stages=0: give 1 to 24"),
        (["pipeline", "--stages", "99"], "stages=99: give 1 to 24"),
        (["pipeline", "--stages", "many"], "--stages='many'"),
        (["daso", "--nodes", "0"], "nodes=0: give at least 1"),
        (["pipeline", "--batch", "3"], "--batch=3: is for known networks"),
        (["pipeline", "--policy", "interleaved", "--stages", "5"], "microbatches=8: interleaved needs a multiple"),
        (["pipeline", "--link", "1e-320B/s"], "seconds of C(layer"),
        (["daso", "--steps", "5"], "steps=5: give at least 9"),
        (["pipeline", "--microbatches", "0"], "microbatches=0"),
        (["pipeline", "--link", "fast"], "link='fast': write a positive rate"),
        (
            ["pipeline", "--policy", "gpipe", "--group", "2"],
            "--group=2: is for modulo, memory_bounded; add one",
        ),
        (["pipeline", "--out", "x.gif"], "path='x.gif': end it in .png"),
        (["pipeline", "--nonsense"], "--nonsense"),
        (["daso", "--every", "0"], "every=0: give at least 1 step"),
        (["circular"], "circular"),
        (["pipeline", "--microbatches", "1000000000"], "--microbatches=1000000000: gives too many tasks to simulate"),
        (["pipeline", "--microbatches", "3000"], "with 24 layers and 1 step; give at most 2,777"),
        (["pipeline", "--microbatches", "9", "--layers", "100000"], "use a network of fewer layers"),
        (["single", "--steps", "1000000"], "--steps=1000000: gives too many tasks to simulate with 121 layers"),
        (["data-parallel", "--steps", "741"], "--steps=741"),
        (["daso", "--steps", "1000000"], "--steps=1000000"),
        (["single", "--network", "uniform", "--layers", "1000000000"], "--layers=1000000000: give at most 200,000"),
    ],
)
def test_mistakes_are_one_line_and_status_2(gradweave, tmp_path, arguments, message):
    (tmp_path / "malformed.json").write_text("{")
    (tmp_path / "negative.json").write_text(NEGATIVE)
    files = {"{malformed}": "malformed.json", "{negative}": "negative.json"}
    arguments = [str(tmp_path / files[a]) if a in files else a for a in arguments]
    status, out, err = gradweave("simulate", *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert message in err


def test_the_bound_is_where_it_says(gradweave):
    base = (
        "simulate",
        "pipeline",
        "--policy",
        "gpipe",
        "--network",
        "uniform",
        "--layers",
        "4",
        "--stages",
        "4",
        "--json",
    )
    assert gradweave(*base, "--microbatches", "300")[0] == 0
    assert _tasks(Costs.uniform(24), 1, 2777) <= _MOST_TASKS < _tasks(Costs.uniform(24), 1, 2778)
    assert _steps_to_steady_state(Costs.uniform(10_000), Link.parse("1B/s"), 4, None, None) == 4


def test_a_picture_that_cannot_be_made_is_refused_before_the_work(gradweave, monkeypatch):
    monkeypatch.setattr("gradweave.cli.simulate.plan", None)
    status, _, err = gradweave("simulate", "single", "--out", "x.gif")
    assert (status, err) == (2, "error: path='x.gif': end it in .png, .svg, .pdf (picture) or .json (trace)\n")


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("single", ["in_order", "side_region", "densenet121", "gpt3_175b"]),
        ("data-parallel", ["ddp", "reverse_first_k"]),
        ("pipeline", ["gpipe", "fast_forward", "modulo"]),
        ("daso", ["ddp", "daso", "uniform"]),
    ],
)
def test_help_names_policies_and_networks(gradweave, monkeypatch, scenario, words):
    monkeypatch.setenv("COLUMNS", "400")
    status, out, _ = gradweave("simulate", scenario, "--help")
    assert status == 0
    assert all(word in out for word in words)


def test_json_can_be_piped_from_a_process():
    command = [sys.executable, "-m", "gradweave", "simulate", "single", "--policy", "in_order", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert json.loads(ran.stdout)["results"][0]["policy"] == "in_order"
    assert ran.stderr == ""
