"""Weight sync: the student's weights go to the sampler, and the proof that they arrived.

A reload can leave part of an engine stale without any error, so it is not trusted: the log-probabilities that the
sampler reports are compared with the student's own at every step (`diagnostics.engine_mismatch`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from opd.errors import TrainingError

if TYPE_CHECKING:
    from opd.samplers import Sampler
    from opd.student import Student


def push_weights(student: Student, sampler: Sampler) -> None:
    """Gives the sampler the student's weights as they are now; rollouts from then on carry the student's version."""
    sampler.load_weights(student.named_weights(), student.version)


def check_mismatch(mismatch_nats: float, limit_nats: float, version: int) -> None:
    """Raises TrainingError when the engine mismatch (nats/token, LOSSES section 8) is above the limit or not finite."""
    if math.isfinite(mismatch_nats) and mismatch_nats <= limit_nats:
        return
    raise TrainingError(
        f"The sampler and the student disagree about the same tokens: engine mismatch {mismatch_nats:.3g} nats/token.",
        where=f"step {version + 1}, policy version {version}; the limit is sync.max_mismatch={limit_nats:g}",
        why="likely causes, in order: the engine kept old weights (a tied output head that was not reloaded, a reload "
        "that skipped a layer); it samples from another distribution (temperature, truncation or a penalty that the "
        "student does not apply); its type is much coarser than the student's (vllm.dtype, student.compute_dtype)",
        fix="compare with rollout.sampler=hf, which runs the student's own module; if only that works, try "
        "vllm.dtype=float32; raise sync.max_mismatch only when the rollouts read well",
    )
