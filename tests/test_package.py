"""The package as its users meet it: its front door, its import, its wheel."""

import importlib.util
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import gradweave

ROOT = Path(__file__).parents[1]
SOURCE = Path(gradweave.__file__).parents[1]


def python(*arguments, executable=sys.executable, **more):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [executable, *arguments], env=environment, capture_output=True, text=True, timeout=250, check=False, **more
    )


def test_every_name_of_the_front_door_opens():
    for name in gradweave.__all__:
        assert getattr(gradweave, name).__module__.startswith("gradweave")
    assert set(gradweave.__all__) < set(dir(gradweave))
    assert len(gradweave.__all__) <= 15
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        gradweave.nonsense  # noqa: B018


def test_every_part_can_be_imported_first():
    script = """
import importlib, pkgutil, sys
import torch, gradweave
parts = [module.name for module in pkgutil.iter_modules(gradweave.__path__, "gradweave.")]
for part in parts:
    for name in [name for name in sys.modules if name.split(".")[0] == "gradweave"]:
        del sys.modules[name]
    importlib.import_module(part)
print(len(parts))
"""
    run = python("-c", script)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 10


BLOCK_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Blocker())
"""


def test_schedules_need_no_torch(tmp_path):
    script = (
        BLOCK_TORCH
        + f"""
import gradweave as gw
from gradweave.schedule import Costs, pipeline
timeline = gw.plan(pipeline(Costs.uniform(4), stages=2, microbatches=2), policy="modulo").simulate()
timeline.save({str(tmp_path / "x.png")!r})
timeline.save({str(tmp_path / "x.json")!r})
try:
    import torch
except ImportError:
    print("blocked", timeline.makespan)
"""
    )
    ran = python("-c", script)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("blocked ")


def test_importing_is_quiet_and_loads_nothing_heavy():
    script = """
import logging, sys
import gradweave, gradweave.schedule
heavy = [name for name in ("torch", "matplotlib", "numpy", "typer", "rich") if name in sys.modules]
print(heavy, logging.getLogger("gradweave").handlers, logging.root.handlers)
"""
    ran = python("-c", script)
    assert (ran.stdout, ran.stderr) == ("[] [] []\n", "")


def test_the_module_runs_without_installation(tmp_path):
    ran = python("-m", "gradweave", "--version", cwd=tmp_path)
    assert ran.stdout == f"gradweave {gradweave.__version__}\n"


def test_versions_agree_with_the_changelog():
    assert f"## {gradweave.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_stays_short_and_its_pictures_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    pictures = [part.partition(")")[0] for part in text.split("](")[1:]]
    for target in pictures:
        if "://" not in target:
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_torch_is_pinned_in_one_place():
    pins = [p for p in ROOT.glob("*.t*") if "torch==" in p.read_text()]
    assert [p.name for p in pins] == ["constraints.txt"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11" in project["dependencies"]


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds the wheel")
def test_the_wheel_installs_into_a_clean_environment(tmp_path):
    """Built here, installed where there is nothing; only its dependencies are borrowed."""
    script = (
        f"import os; os.chdir({str(ROOT)!r}); from hatchling.build import build_wheel as b; print(b({str(tmp_path)!r}))"
    )
    built = python("-c", script)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "gradweave/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "docs"))]

    clean = tmp_path / "clean"
    venv.create(clean, with_pip=True)
    executable = clean / "bin" / "python"
    install = [str(executable), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=250)
    site = next(clean.glob("lib/*/site-packages"))
    borrowed = sorted({str(Path(importlib.util.find_spec(name).origin).parents[1]) for name in ("typer", "matplotlib")})
    (site / "zz_borrowed.pth").write_text("\n".join(borrowed) + "\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(clean / "bin" / "gradweave"), "--version"]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, cwd=tmp_path, check=False
    )
    assert ran.stdout == f"gradweave {gradweave.__version__}\n", ran.stderr
    where = "import gradweave; print(gradweave.__file__)"
    ran = subprocess.run(
        [executable, "-c", where], env=environment, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert ran.stdout.startswith(str(site))
