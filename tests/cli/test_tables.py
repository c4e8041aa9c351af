import pytest

from gradweave.cli.tables import bytes_text, progress, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (3.2e-6, "3.2 us"), (0.0125, "12.5 ms"), (1.0, "1 s"), (126.0, "126 s")]
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (5 * 2**40, "5 TiB")]
)
def test_bytes(size, text):
    assert bytes_text(size) == text


def test_progress_goes_through_all(capsys):
    with progress(["a", "b"], "doing", quiet=False) as each:
        assert list(each) == ["a", "b"]
    with progress(["a", "b"], "doing", quiet=True) as each:
        assert list(each) == ["a", "b"]
    assert capsys.readouterr().out == ""
