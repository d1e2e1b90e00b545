"""Facts about weight sync: what is pushed, and that an engine which disagrees stops the run."""

import math
from types import SimpleNamespace

import pytest

from opd.errors import TrainingError
from opd.sync import check_mismatch, push_weights


def test_push_hands_over_every_weight_and_the_students_version():
    received = {}
    student = SimpleNamespace(version=7, named_weights=lambda: iter([("a", 1), ("b", 2)]))
    sampler = SimpleNamespace(
        load_weights=lambda tensors, version: received.update(tensors=dict(tensors), version=version)
    )
    push_weights(student, sampler)
    assert received == {"tensors": {"a": 1, "b": 2}, "version": 7}


@pytest.mark.parametrize("mismatch", [0.0, 1e-6, 0.05])
def test_mismatch_up_to_the_limit_passes(mismatch):
    check_mismatch(mismatch, 0.05, 3)


@pytest.mark.parametrize("mismatch", [0.0501, 3.0, math.nan, math.inf])
def test_larger_or_non_finite_mismatch_stops_the_run_and_names_likely_causes(mismatch):
    with pytest.raises(TrainingError) as caught:
        check_mismatch(mismatch, 0.05, 3)
    message = str(caught.value)
    for part in ("step 4", "sync.max_mismatch=0.05", "tied output head", "temperature", "vllm.dtype"):
        assert part in message
