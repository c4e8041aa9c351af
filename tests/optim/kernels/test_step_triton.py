"""All Triton modules, compiled for a GPU that need not be there; what kernels compute, the interpreter tests say."""

import pytest

from optim.kernels.processes import HERE, run

pytest.importorskip("triton")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtypes", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path, dtypes):
    failure = run([str(HERE / "compiled_kernels.py"), dtypes], TRITON_CACHE_DIR=str(tmp_path))
    assert not failure, failure
