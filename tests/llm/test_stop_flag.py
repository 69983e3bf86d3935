"""The stop flag: read at once on a CPU, one look late where the device runs ahead."""

from __future__ import annotations

import pytest
import torch

from dit_graphs.llm.stop_flag import StopFlag


def test_a_cpu_reads_the_newest_value():
    flag = StopFlag(torch.device("cpu"))
    assert not flag.is_set()
    done = torch.tensor(False)
    flag.post(done)
    assert not flag.is_set()
    done.fill_(True)
    assert not flag.is_set()  # what was posted is a copy
    flag.post(done)
    assert flag.is_set()


@pytest.mark.gpu
def test_a_gpu_reads_the_value_before_the_newest():
    flag = StopFlag(torch.device("cuda"))
    flag.post(torch.tensor(True, device="cuda"))
    assert not flag.is_set()
    flag.post(torch.tensor(False, device="cuda"))
    assert flag.is_set()
    assert not flag.is_set()
