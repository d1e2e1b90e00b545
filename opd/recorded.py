"""Scored rollouts on disk: safetensors shards that are there as a whole or not at all, found again by key.

A shard holds rollouts of one call of the teacher, concatenated: lengths [R, 3] (student prompt, teacher prompt,
completion), their ids, what the sampler said, and the fields of TeacherScores. Its metadata says the rest as JSON. Where
the scores are hidden states, head-<hash>.safetensors beside it is the head that they are read with.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from opd.errors import DataError, TrainingError
from opd.heads import Head
from opd.teachers.fingerprint import raw_bytes
from opd.types import Prompt, Query, Rollout, ScoredRollout, ScoreRequest, TeacherScores

FORMAT = 1
KEPT_SHARDS = 8
"""Shards whose tensors stay in memory, for the many rollouts of a step that are in the same one."""
SCORES = tuple(field.name for field in fields(TeacherScores))


def key_of(query: Query, teacher: Mapping[str, str]) -> str:
    """Returns the name of a query's answer: a hash of everything that it depends on, the teacher's identity included."""
    digest = hashlib.blake2b(digest_size=16)
    asked = [FORMAT, dict(sorted(teacher.items())), asdict(query.request), query.vocab_size, len(query.prompt_ids)]
    digest.update(json.dumps(asked).encode())
    for ids in (torch.tensor(query.prompt_ids), query.token_ids, query.student_ids):
        if ids is not None:
            digest.update(raw_bytes(ids.to(torch.int64)))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a scored rollout is."""

    shard: Path
    number: int


class Recorded:
    """A folder of shards. Several processes may write into one: shards have names of their own and are renamed into place."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers of what is there; raises DataError for a folder that cannot be used."""
        self.folder = folder
        self._places: dict[str, _Place] = {}
        self._shard = lru_cache(KEPT_SHARDS)(_read_shard)
        self._head = lru_cache(1)(_read_head)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shards = sorted(folder.glob("shard-*.safetensors"))
        except OSError as error:
            raise DataError(
                "The score cache cannot be used.",
                where=str(folder),
                why=error.strerror or str(error),
                fix="name a folder",
            ) from error
        for shard in shards:
            for number, key in enumerate(_keys_in(shard)):
                self._places[key] = _Place(shard, number)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, key: str) -> ScoredRollout:
        """Returns the scored rollout of a key that is there; raises DataError where its shard cannot be read."""
        place = self._places[key]
        shard = self._shard(place.shard)
        head = None
        if (name := shard.about.get("head")) is not None:
            head = self._head(self.folder / name, shard.about["vocab_size"])
        return shard.rollout(place.number, key, head)

    def vocab_size(self, key: str) -> int:
        """Returns the size of the vocabulary that the scores of a key are over."""
        return self._shard(self._places[key].shard).about["vocab_size"]

    def request(self, key: str) -> ScoreRequest:
        """Returns what the teacher was asked."""
        return ScoreRequest(**self._shard(self._places[key].shard).about["request"])

    def write(self, scored: Mapping[str, ScoredRollout], request: ScoreRequest, vocab_size: int) -> None:
        """Adds scored rollouts, by their keys, as one shard; raises TrainingError where the disk refuses."""
        items = list(scored.values())
        about = {
            "format": FORMAT,
            "vocab_size": vocab_size,
            "request": asdict(request),
            "head": None if items[0].head is None else self._written_head(items[0].head),
            "keys": list(scored),
            "prompts": [[item.rollout.prompt.index, item.rollout.sample] for item in items],
            "finish_reasons": [item.rollout.finish_reason for item in items],
            "policy_versions": [item.rollout.policy_version for item in items],
        }
        shard = self.folder / f"shard-{uuid.uuid4().hex}.safetensors"
        _save(shard, _tensors_of(items), {"opd": json.dumps(about)})
        for number, key in enumerate(scored):
            self._places[key] = _Place(shard, number)

    def _written_head(self, head: Head) -> str:
        """The name of the head's file, written once."""
        name = f"head-{_head_hash(head)}.safetensors"
        if not (self.folder / name).exists():
            tensors = {"weight": head.weight[: head.vocab_size]}
            if head.bias is not None:
                tensors["bias"] = head.bias[: head.vocab_size]
            about = {"logit_scale": head.logit_scale, "softcap": head.softcap}
            _save(self.folder / name, tensors, {"opd": json.dumps(about)})
        return name


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard in memory, cut by rollout."""

    about: dict[str, Any]
    parts: dict[str, Sequence[Tensor]]

    def rollout(self, number: int, key: str, head: Head | None) -> ScoredRollout:
        own = {name: part[number] for name, part in self.parts.items()}
        index, sample = self.about["prompts"][number]
        prompt = Prompt(index, tuple(own["student_ids"].tolist()), tuple(own["teacher_ids"].tolist()))
        rollout = Rollout(
            prompt,
            sample,
            own["token_ids"],
            own["logprobs"],
            self.about["finish_reasons"][number],
            self.about["policy_versions"][number],
            own.get("topk_ids_of_student"),
        )
        scores = TeacherScores(**{name: own[name] for name in SCORES if name in own})
        return ScoredRollout(rollout, scores, head, key)


def _tensors_of(items: Sequence[ScoredRollout]) -> dict[str, Tensor]:
    rollouts = [item.rollout for item in items]
    student = [torch.tensor(rollout.prompt.student_ids) for rollout in rollouts]
    teacher = [torch.tensor(rollout.prompt.teacher_ids) for rollout in rollouts]
    lengths = [[len(a), len(b), len(r.token_ids)] for a, b, r in zip(student, teacher, rollouts, strict=True)]
    tensors = {
        "lengths": torch.tensor(lengths),
        "student_ids": torch.cat(student),
        "teacher_ids": torch.cat(teacher),
        "token_ids": torch.cat([rollout.token_ids for rollout in rollouts]),
        "logprobs": torch.cat([rollout.logprobs for rollout in rollouts]),
    }
    supports = [rollout.topk_ids for rollout in rollouts if rollout.topk_ids is not None]
    if len(supports) == len(rollouts):
        tensors["topk_ids_of_student"] = torch.cat(supports)
    for name in SCORES:
        values = [value for item in items if (value := getattr(item.scores, name)) is not None]
        if values:
            tensors[name] = torch.cat(values)
    return tensors


def _save(file: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes a file aside and renames it."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, aside, metadata)
        aside.replace(file)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            "The score cache cannot be written.",
            where=str(file.parent),
            why=str(error),
            fix="free some space, or go on without teacher.cache",
        ) from error
    finally:
        aside.unlink(missing_ok=True)


def _keys_in(shard: Path) -> list[str]:
    """The keys of a shard; none where it is damaged, so that its rollouts are scored again."""
    try:
        with safe_open(shard, "pt") as file:
            about = json.loads(file.metadata()["opd"])
        return about["keys"] if about["format"] == FORMAT else []
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return []


def _read_shard(shard: Path) -> _Shard:
    try:
        with safe_open(shard, "pt") as file:
            about = json.loads(file.metadata()["opd"])
        tensors = load_file(shard)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(shard, error) from error
    student, teacher, completion = tensors.pop("lengths").T.tolist()
    of = {"student_ids": student, "teacher_ids": teacher}
    return _Shard(about, {name: tensor.split(of.get(name, completion)) for name, tensor in tensors.items()})


def _read_head(file: Path, vocab_size: int) -> Head:
    try:
        with safe_open(file, "pt") as opened:
            about = json.loads(opened.metadata()["opd"])
        tensors = load_file(file)
        return Head(tensors["weight"], tensors.get("bias"), about["logit_scale"], about["softcap"], vocab_size)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(
        "A file of the score cache cannot be read.",
        where=str(file),
        why=str(error).splitlines()[0],
        fix="remove it: what it held is scored again",
    )


def _head_hash(head: Head) -> str:
    digest = hashlib.blake2b(f"{head.logit_scale} {head.softcap} {head.vocab_size}".encode(), digest_size=16)
    for tensor in (head.weight[: head.vocab_size], head.bias):
        if tensor is not None:
            digest.update(raw_bytes(tensor))
    return digest.hexdigest()
