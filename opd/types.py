"""What travels between the stages: prompts, rollouts, teacher scores and micro-batches.

All of them are frozen. Index t of every per-token tensor holds the value *of* completion token t
given the tokens before it; prompt tokens never appear in these tensors and padding does not exist.

Dimensions: T completion tokens of one rollout (of one micro-batch in `Targets`), S ids of a support,
D hidden size. All log-probabilities are natural logarithms (nats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from opd.heads import Head

FinishReason = Literal["stop", "length"]
SupportOf = Literal["student", "teacher", "union", "intersection"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw from the prompt stream, already rendered and tokenised for both models.

    Example: the 7th draw of a run, asked of a Qwen student whose teacher has a system prompt of its own:
        Prompt(index=7, student_ids=(151644, 872, ...), teacher_ids=(151644, 8948, ...), fields={"prompt": "2+2?"})
    """

    index: int
    """Position in the endless prompt stream; seeds and the order of micro-batches come from it."""
    student_ids: tuple[int, ...]
    """Token ids that the student is prompted with."""
    teacher_ids: tuple[int, ...]
    """Token ids that the teacher sees before the completion; the same as student_ids unless teacher.prompt differs."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data set that the prompt came from."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion that the student wrote, as token ids; text is never re-tokenised.

    Example: a completion of three tokens that ended by itself has token_ids [T=3] whose last id is the
    end-of-sequence token, logprobs [3], finish_reason "stop".
    """

    prompt: Prompt
    sample: int
    """0 … group_size−1: which of the prompt's completions this is."""
    token_ids: Tensor
    """[T] int64; includes the end-of-sequence token when the student wrote it."""
    logprobs: Tensor
    """[T] float32: log-probability of each token under the distribution really sampled from (after temperature and truncation)."""
    finish_reason: FinishReason
    """"stop": ended by itself or by a stop string or id. "length": cut at rollout.max_tokens."""
    policy_version: int
    """Student version whose weights wrote it."""
    topk_ids: Tensor | None = None
    """[T, K] int64: the student's K most probable ids by descending probability, without the sampled one appended."""

    @property
    def key(self) -> tuple[int, int]:
        """(prompt index, sample): the order in which micro-batches are cut, whatever the order of arrival."""
        return (self.prompt.index, self.sample)


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """What a teacher is asked for. τ (`temperature`) divides its logits before the log-softmax."""

    kind: Literal["sampled", "topk", "full"]
    temperature: float = 1.0
    k: int = 0
    """Size of the supports (kind "topk")."""
    support_of: SupportOf = "student"
    diagnostics_k: int = 0
    """When positive, the teacher's own top-k ids and its entropy are returned too."""

    @property
    def wants_student_ids(self) -> bool:
        """Whether the support is (partly) the student's, so that the teacher has to be given it."""
        return self.kind == "topk" and self.support_of != "teacher"


@dataclass(frozen=True, slots=True)
class Query:
    """One completion to be scored, and what is asked of it."""

    prompt_ids: Sequence[int]
    """Token ids before the completion, as the teacher sees them."""
    token_ids: Tensor
    """[T] int64: the completion."""
    request: ScoreRequest
    vocab_size: int
    """V: the log-softmax runs over the ids below it."""
    student_ids: Tensor | None = None
    """[T, K] int64: the student's support, where the request wants one."""

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """What the teacher says of one rollout. Fields that were not asked for are None."""

    sampled_logprobs: Tensor | None = None
    """[T] float32: log q(y_t); None with `hidden`, from which the loss computes it."""
    support_ids: Tensor | None = None
    """[T, S] int64 ids of the support, −1 where a position has fewer than S (union and intersection)."""
    support_logprobs: Tensor | None = None
    """[T, S] float32 log q at support_ids; −inf where the id is −1."""
    tail_logprobs: Tensor | None = None
    """[T] float32: log of the teacher's mass outside the support, as a logsumexp over the complement."""
    hidden: Tensor | None = None
    """[T, D] final hidden states (after the last norm), for full-vocabulary losses with the teacher's head."""
    topk_ids: Tensor | None = None
    """[T, k] int64: the teacher's k most probable ids by descending probability, for diagnostics."""
    entropy: Tensor | None = None
    """[T] float32 full-vocabulary entropy in nats."""

    def split(self, lengths: Sequence[int]) -> list[TeacherScores]:
        """Returns the scores of each of several completions of `lengths` tokens, whose scores these are, joined."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {name: value.split(list(lengths)) for name, value in values.items() if value is not None}
        return [TeacherScores(**{name: part[i] for name, part in parts.items()}) for i in range(len(lengths))]


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout together with the teacher's scores of it; the unit that `Student.update` consumes."""

    rollout: Rollout
    scores: TeacherScores
    head: Head | None = None
    """The output head that `scores.hidden` is to be read with; None for other scores."""
    recorded_as: str = ""
    """Its key in the score cache, where there is one."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Everything the loss needs about the T completion tokens of a micro-batch, concatenated in `batching.in_order`."""

    token_ids: Tensor
    """[T] int64 sampled tokens y."""
    weights: Tensor
    """[T] float32: the reducer's weight of each token in the step's loss; 0 where masked."""
    sampler_logprobs: Tensor
    """[T] float32 log p_sampler(y)."""
    first_logprobs: Tensor | None = None
    """[T] float32 log p_first(y) at loss.temperature from the first pass over this batch; None during that pass."""
    teacher_logprobs: Tensor | None = None
    """[T] float32 log q(y) at loss.temperature; None with teacher_hidden."""
    support_ids: Tensor | None = None
    """[T, S] int64, −1 = no id."""
    support_logprobs: Tensor | None = None
    """[T, S] float32 log q on the support."""
    tail_logprobs: Tensor | None = None
    """[T] float32 log q of everything outside the support."""
    teacher_hidden: Tensor | None = None
    """[T, D_teacher]."""
    teacher_topk_ids: Tensor | None = None
    """[T, k] int64 for diagnostics."""
    teacher_entropy: Tensor | None = None
    """[T] float32 nats."""


@dataclass(frozen=True, slots=True)
class Segments:
    """The parts of a packed row. A segment continues its parent: it attends to it, and to what that one continues.

    Example: two completions of one prompt are lengths (5, 3, 4), parents (-1, 0, 0).
    """

    lengths: tuple[int, ...]
    """Tokens of each segment, in the order of the row."""
    parents: tuple[int, ...]
    """Number of the segment that each one continues; −1 = it begins a sequence, or continues a prefix."""
    prefixes: tuple[int, ...] = ()
    """Number of the remembered prefix, not in the row, that each one continues; −1 = none. Empty = none anywhere."""

    def chain(self, number: int) -> tuple[int, ...]:
        """The segments that one attends to, from the beginning of its sequence to itself."""
        chain = [number]
        while (parent := self.parents[chain[-1]]) >= 0:
            chain.append(parent)
        return tuple(reversed(chain))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Some sequences laid out for one forward pass, and which hidden states predict which completion tokens.

    Two layouts: *packed* (one row of segments, shared prefixes once) and *padded* (one right-padded row a sequence).

    Example, packed: two completions [7 8] and [9] of the prompt [1 2 3] give input_ids [1 2 3 7], segments of lengths
    (3, 1), predicting_index [2 3 2]: the hidden state *before* a token predicts it, and the last token predicts nothing.
    """

    input_ids: Tensor
    """[R, L] int64."""
    position_ids: Tensor
    """[R, L] int64, from 0 in every sequence."""
    segments: Segments | None
    """The parts of the packed row; None in the padded layout."""
    predicting_index: Tensor
    """[T] int64: flat index into R·L of the hidden state that predicts completion token t; R·L + i is the last of prefix i."""
    prompt_spans: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...] = ()
    """Packed: every prompt in the row, and where its tokens are, as (start, stop)."""
