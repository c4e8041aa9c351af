"""Options become settings, or errors that name the option."""

import sys
from types import SimpleNamespace

import pytest
import torch

from gradweave.cli.settings import fits_in_memory, make_folder, make_setting, writing
from gradweave.errors import ArgumentError


def setting(**changes):
    given = {"model": "autoencoder", "optimizer": "adamw", "batch": None, "dtype": "float32", "device": "cpu"}
    return make_setting(**(given | changes))


def test_a_model_has_a_batch_of_its_own():
    assert setting().batch == setting().workload.default_batch
    made = setting(batch=7, dtype="bfloat16", lr=0.1)
    assert (made.batch, made.dtype, made.lr) == (7, torch.bfloat16, 0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "int8"}, "--dtype='int8': use one of"),
        ({"dtype": "float16"}, "gradient scaling"),
        ({"optimizer": "best"}, "--optimizer='best'"),
        ({"device": "tpu!"}, "--device='tpu!': use cpu or cuda"),
        ({"device": "meta"}, "use cpu or cuda"),
    ],
)
def test_mistakes_name_the_option(change, said):
    with pytest.raises(ArgumentError) as error:
        setting(**change)
    assert said in str(error.value)


def test_modules_of_the_current_folder_are_found(tmp_path, monkeypatch):
    (tmp_path / "ours_for_settings.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(3))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert setting(model="ours_for_settings:make").workload.name == "ours_for_settings:make"


def test_memory_that_is_not_there_is_an_error_of_the_batch():
    def fail():
        with fits_in_memory(SimpleNamespace(batch=9)):
            raise MemoryError

    with pytest.raises(ArgumentError, match="--batch=9: does not fit into memory"):
        fail()


def test_a_folder_is_made_and_must_be_writable(tmp_path):
    make_folder(tmp_path / "a" / "b", ["report.html"])
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ArgumentError, match=r"report\.html in it is a folder"):
        make_folder(tmp_path, ["report.html"])
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written to"):
        make_folder(tmp_path / "file", [])

    def fail():
        with writing(tmp_path):
            raise OSError(28, "No space left on device")

    with pytest.raises(ArgumentError, match="No space left"):
        fail()
