"""Diagnostics of LOSSES section 8, on distributions small enough to work out by hand."""

import math

import pytest
import torch

from opd import diagnostics

STUDENT_IDS = torch.tensor([[4, 1, 7], [0, 1, 2], [3, 5, -1]])
TEACHER_IDS = torch.tensor([[7, 9, 4], [3, 4, 5], [5, -1, -1]])


def test_overlap_is_the_share_of_the_students_ids_that_the_teacher_has_too():
    shared = diagnostics.shared_ids(STUDENT_IDS, TEACHER_IDS)
    assert shared.tolist() == [[True, False, True], [False] * 3, [False, True, False]]
    torch.testing.assert_close(diagnostics.overlap_ratio(shared), torch.tensor([2 / 3, 0, 1 / 3]))


def test_shared_ids_are_those_of_comparing_each_with_each():
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.rand(50, 40, generator=generator).topk(k).indices for k in (12, 20))
    for ids in (student, teacher):
        ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    matches = (student[:, :, None] == teacher[:, None, :]) & (student[:, :, None] >= 0)
    place, found = diagnostics.places_of(student, teacher)
    assert torch.equal(diagnostics.shared_ids(student, teacher), matches.any(-1))
    assert torch.equal(found, matches.any(-1))
    assert torch.equal(teacher.gather(1, place)[found], student[found])


def test_whole_vocabularies_are_compared_without_the_square_of_their_size():
    vocabulary = 49_152
    student, teacher = torch.arange(vocabulary)[None], torch.arange(vocabulary).flip(0)[None]
    with torch.profiler.profile(profile_memory=True) as profile:
        assert diagnostics.shared_ids(student, teacher).all()
    assert max(event.cpu_memory_usage for event in profile.events()) < 100 * vocabulary


def test_overlap_advantage_renormalises_both_on_the_shared_ids_and_is_0_without_one():
    shared = diagnostics.shared_ids(STUDENT_IDS, TEACHER_IDS)
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.3, 0.1], [0.5, 0.4, 0.1]]).log()
    q = torch.tensor([[0.1, 0.5, 0.3], [0.1, 0.1, 0.1], [0.2, 0.1, 0.1]]).log()
    # p̄ = (6/7, 1/7), q̄ = (1/4, 3/4); one shared id is all of its own distribution.
    expected = (6 / 7 * math.log((1 / 4) / (6 / 7)) + 1 / 7 * math.log((3 / 4) / (1 / 7))) / 2
    found = diagnostics.overlap_token_advantage(p, q, shared)
    torch.testing.assert_close(found, torch.tensor([expected, 0.0, 0.0]))
    torch.testing.assert_close(diagnostics.overlap_mass(p, shared), torch.tensor([0.7, 0.0, 0.4]))


def test_overlap_advantage_is_never_positive():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(200, 8, generator=generator).log_softmax(-1) for _ in range(2))
    shared = torch.rand(200, 8, generator=generator) < 0.5
    assert (diagnostics.overlap_token_advantage(p, q, shared) <= 1e-7).all()


def test_entropy_of_a_distribution_that_excludes_tokens():
    log_p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25] * 4]).log()
    torch.testing.assert_close(diagnostics.entropy_of(log_p), torch.tensor([math.log(2), 0.0, math.log(4)]))


def test_entropy_gap_has_no_sign():
    gap = diagnostics.entropy_gap(torch.tensor([1.0, 3.0]), torch.tensor([2.5, 2.0]))
    assert gap.tolist() == [1.5, 1.0]


def test_the_mean_mismatch_is_the_kl_of_sampler_and_student():
    sampler = torch.tensor([0.7, 0.2, 0.1]).double()
    student = torch.tensor([0.5, 0.3, 0.2]).double()
    each = diagnostics.engine_mismatch(student.log(), sampler.log())
    assert (each > 0).all()
    torch.testing.assert_close((sampler * each).sum(), (sampler * (sampler / student).log()).sum())
    assert not diagnostics.engine_mismatch(student.log(), student.log()).any()


@pytest.mark.parametrize(
    ("edges", "expected"),
    [([2, 4], [0.5, 2.5, 4.5]), ([1, 100], [0.0, 3.0, None]), ([], [2.5]), ([6], [2.5, None])],
)
def test_means_by_position(edges, expected):
    values = torch.arange(6.0)
    assert diagnostics.by_position(values, torch.arange(6), edges) == expected
