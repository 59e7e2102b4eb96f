from __future__ import annotations

import pytest
import torch

from tests.benchmark.device_steps import CYCLE, SIZES, measure


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_benchmark_of_device_steps_exchanges_while_it_takes_the_time(dtype: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more threads would wait for each other on a busy machine
    try:
        found = measure(SIZES["tiny"], device="cpu", dtype=dtype, turns=1, steps=4 * CYCLE)
    finally:
        torch.set_num_threads(threads)
    assert found.adopted > 0
    assert found.step_ms > 0
    assert found.blocked_p99_ms > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_124_million_parameters_is_hardly_slower_with_the_agent(dtype: str) -> None:
    found = measure(SIZES["124M"], device="cuda", dtype=dtype, turns=2, steps=2 * CYCLE)
    print(found)
    assert found.adopted >= 12
    assert found.step_with_shoal_ms < 1.05 * found.step_ms
    assert found.blocked_p99_ms < 5
