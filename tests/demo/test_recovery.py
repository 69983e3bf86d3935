"""What a failed job leaves behind: no memory, and words that say what to do."""

from __future__ import annotations

import weakref

import pytest
import torch
from demo_studio import a_form, studio_of

from dit_graphs.app.demo import work
from dit_graphs.app.demo.problems import problem_of
from dit_graphs.app.demo.studio import Studio


def test_memory_is_free_while_a_failure_is_still_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error on the page holds its frames, and the first try's: neither may hold activations."""
    activations: list[weakref.ref[torch.Tensor]] = []

    def full(*args: object, **kwargs: object) -> None:
        first = torch.zeros(8)
        activations.append(weakref.ref(first))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError as error:
            second = torch.zeros(8)
            activations.append(weakref.ref(second))
            raise torch.OutOfMemoryError("CUDA out of memory, again") from error

    seen: list[bool] = []
    freed = Studio.recover_from_out_of_memory

    def recovered(studio: Studio) -> None:
        seen.extend(found() is None for found in activations)
        freed(studio)

    monkeypatch.setattr(Studio, "recover_from_out_of_memory", recovered)
    with studio_of() as studio:
        monkeypatch.setattr(type(studio.pipe.transformer), "forward", full)
        job = studio.queue.submit(lambda job: work.generate(studio, a_form(), job))
        assert job.wait(60)
        assert isinstance(job.error, torch.OutOfMemoryError)
    assert len(seen) >= 2
    assert all(seen)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_every_face_of_no_memory_has_the_same_words(words: str) -> None:
    assert problem_of(RuntimeError(words)).title == "Out of memory"
