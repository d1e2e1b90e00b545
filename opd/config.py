"""The configuration of a run: one pydantic model a section, one docstring a field.

The docstrings are the documentation: the JSON schema, `opd config explain` and docs/configuration.md are
generated from them. Reading recipes and overrides is the business of `recipes.py`.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

Support = Literal["sampled", "topk", "full"]
Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
Mass = Literal["tail", "renormalize", "weighted"]
SupportOfName = Literal["student", "teacher", "union", "intersection"]
Dtype = Literal["auto", "float32", "bfloat16"]
PathOrName = Annotated[str, AfterValidator(os.path.expanduser)]
TokenId = Annotated[int, Field(ge=0)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]
"""Below, logits / τ overflows; above, the distribution is uniform to the last digit and nothing is left to learn."""


def _check_url(url: str) -> str:
    """Returns the address without a slash at its end; raises ValueError for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not the address of a server, such as http://127.0.0.1:8100")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_check_url)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ChatSettings(Section):
    """How a prompt is rendered for one model."""

    system: str | None = None
    """System message put before the conversation (chat models only)."""
    template: str = "{prompt}"
    """Text put around a prompt that is plain text; `{prompt}` and any column of the data may be used."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template. auto: when the tokenizer has one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the chat template, such as `enable_thinking: false`."""


class LoraSettings(Section):
    """Low-rank adapters instead of full fine-tuning (needs the `lora` extra)."""

    rank: Annotated[int, Field(ge=1)] = 16
    """Rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Module names that get an adapter."""


class StudentSettings(Section):
    """The model that is trained."""

    model: PathOrName = ""
    """Folder or hub name of the student."""
    revision: str | None = None
    """Hub revision."""
    device: str = "auto"
    """auto: cuda when there is one, otherwise cpu."""
    compute_dtype: Dtype = "auto"
    """Type of the matrix products; master weights are always float32. auto: bfloat16 where the processor has fast bfloat16 products, otherwise float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    attention: Literal["auto", "packed", "padded"] = "auto"
    """Layout of training batches. packed: sequences back to back, no padding; padded: one right-padded row each. auto: packed where the model's attention allows it."""
    lora: LoraSettings | None = None
    """Train low-rank adapters only."""
    prompt: ChatSettings = ChatSettings()
    """How prompts are rendered for the student."""


def _url_as_urls(values: Any) -> Any:
    """A teacher that is named by its address is a server: `model: http://host:8100`, several with commas."""
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, str) or not model.startswith(("http://", "https://")):
        return values
    return {**values, "model": "", "urls": [url.strip() for url in model.split(",")]}


class TeacherSettings(Section):
    """The model that marks every token: in this process, or behind one or several servers."""

    kind: Literal["auto", "local", "opd_server", "vllm_server"] = "auto"
    """local: in this process. opd_server: `opd teacher serve`. vllm_server: a stock `vllm serve`. auto: opd_server where there are urls, local elsewhere."""
    model: PathOrName = ""
    """Folder or hub name of the teacher, or the URL of a scoring server. With kind: vllm_server it says where the tokenizer is; when absent, the tokenizer is looked for where the server took its model from."""
    revision: str | None = None
    """Hub revision."""
    device: str = "auto"
    """auto: cuda when there is one, otherwise cpu."""
    dtype: Dtype = "auto"
    """Type of the teacher's weights. auto: bfloat16 where the processor has fast bfloat16 products, otherwise float32."""
    batch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens (prompt and completion) scored in one forward pass; with a server, tokens of one request (a vllm serve with --enable-scale-out takes one completion a request)."""
    prompt: ChatSettings | None = None
    """How prompts are rendered for the teacher; when absent the teacher sees the student's prompt ids."""
    urls: list[Url] = Field(default_factory=list)
    """Addresses of servers that serve the same teacher; requests go to the least loaded one that answers. The environment variable OPD_TEACHER_TOKEN holds their token, if they want one."""
    window: Annotated[int, Field(ge=1)] = 4
    """Requests that are under way to each server at the same time. A vllm serve with --enable-scale-out takes one completion a request; 32 or more keep one on a GPU busy."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a server may take for one request before it is asked of another."""
    max_wait: Annotated[float, Field(ge=0)] = 600.0
    """Seconds for which a run waits while no server answers; then it saves a checkpoint and stops."""
    cache: PathOrName | None = None
    """Folder in which scored rollouts are kept: a resumed or repeated run does not ask for them again, and `opd distill --replay` trains on them. With loss.support=full it holds the teacher's hidden states, 2 to 4 bytes × the hidden size a token."""
    hedge_after: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which a request that has no answer is asked of a second server too; null = never."""

    _urls = model_validator(mode="before")(_url_as_urls)

    @property
    def resolved_kind(self) -> Literal["local", "opd_server", "vllm_server"]:
        """The kind, auto decided."""
        if self.kind == "auto":
            return "opd_server" if self.urls else "local"
        return self.kind

    @property
    def name(self) -> str:
        """What messages call it."""
        return ", ".join(self.urls) or self.model

    @model_validator(mode="after")
    def _has_urls(self) -> TeacherSettings:
        if self.resolved_kind != "local" and not self.urls:
            raise ValueError(f"kind: {self.kind} needs urls, such as [http://127.0.0.1:8100]")
        if self.resolved_kind == "local" and self.urls:
            raise ValueError("kind: local takes a model and no urls; leave one of them out")
        return self


class RoutedTeacher(TeacherSettings):
    """One of several teachers, and the prompts that are its own."""

    match: dict[str, Any] = Field(default_factory=dict)
    """Columns of the data and the value that each has to have (or a list of values) for a prompt to go to this teacher; empty = any prompt. The first teacher whose rule fits has the prompt."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts among teachers with the same rule."""


class DataSource(Section):
    """Where prompts come from. On the command line: `file.jsonl,prompt=question` or `hf://org/name@revision,name=main,split=train,prompt=question`."""

    path: PathOrName
    """A .jsonl, .json, .csv or .parquet file, a folder saved by `datasets`, `hf://org/name`, or `-` for standard input (JSONL)."""
    prompt: str = "prompt"
    """Column with the prompt: a text or a list of chat messages."""
    name: str | None = None
    """Configuration of a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set; slices such as `train[:1000]` are allowed."""
    revision: str | None = None
    """Revision of a Hugging Face data set."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Relative share of the stream that this source makes up."""


def _read_sources(value: Any, info: ValidationInfo) -> Any:
    """A recipe may write a source as on the command line, and a single one without a list."""
    from opd.errors import ConfigError
    from opd.sources import parse_source

    items = value if isinstance(value, list) else [value]
    if not any(isinstance(item, str) for item in items):
        return value
    try:
        return [parse_source(item) if isinstance(item, str) else item for item in items]
    except ConfigError as error:
        raise ValueError(f"data.{info.field_name}: {error.what.rstrip('.')} ({error.fix or error.where})") from error


DataSources = Annotated[
    list[DataSource], BeforeValidator(_read_sources, json_schema_input_type=str | list[str | DataSource])
]


class DataSettings(Section):
    """The prompts."""

    train: DataSources = Field(default_factory=list)
    """Sources of training prompts, mixed by weight."""
    heldout: DataSources = Field(default_factory=list)
    """Sources of held-out prompts for the evaluation. When empty, `eval.prompts` prompts are set aside from the training sources and never trained on."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1024
    """Prompts longer than this are handled as `overlong` says (the longer of the student's and the teacher's rendering counts)."""
    overlong: Literal["drop", "truncate_left"] = "drop"
    """drop: leave the prompt out and count it. truncate_left: keep its last tokens."""
    shuffle: bool = True
    """Shuffle every epoch, by seed."""


class RolloutSettings(Section):
    """What the student writes in each step."""

    sampler: Literal["auto", "vllm", "hf"] = "auto"
    """auto: vllm wherever it imports, otherwise hf (transformers)."""
    prompts: Annotated[int, Field(ge=1)] = 16
    """Prompts a step."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """Completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Completion tokens at most."""
    temperature: Temperature = 1.0
    """Sampling temperature. 1 samples from the policy itself, which the losses assume."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 some tokens can never be drawn, which biases `loss.support: sampled`."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k most probable tokens only; 0 = off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens below this share of the most probable one's probability; 0 = off."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion."""
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    """Token ids that end a completion, besides the end-of-sequence token."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens of the policy can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class VllmSettings(Section):
    """The in-process vLLM engine."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Share of one GPU's memory for the engine (weights and KV cache)."""
    cpu_kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """KV cache on a CPU machine. Unset: room for every sequence that is written at the same time, at most 4 GiB or one sequence."""
    enforce_eager: bool | None = None
    """Skip compilation: starts in seconds, samples slower. Unset: eager on a CPU, compiled on a GPU."""
    sleep: bool = False
    """Free the engine's GPU memory while teacher and student compute."""
    dtype: Dtype = "auto"
    """Type of the engine's weights. auto: as `student.compute_dtype`."""
    max_concurrent: Annotated[int, Field(ge=1)] = 256
    """Sequences sampled at the same time."""


class HfSettings(Section):
    """The transformers sampler."""

    batch_size: Annotated[int, Field(ge=1)] = 32
    """Sequences generated at the same time."""


class TopkSettings(Section):
    """The support of `loss.support: topk`."""

    k: Annotated[int, Field(ge=1)] = 16
    """Ids in each support."""
    of: SupportOfName = "student"
    """Whose most probable tokens: student, teacher, their union or their intersection."""
    mass: Mass = "tail"
    """What becomes of the probability outside the support: one more outcome (tail), divided out (renormalize), or the THUNLP code's policy-gradient form (weighted)."""


class SampledSettings(Section):
    """The estimator of `loss.support: sampled`."""

    estimator: Literal["policy_gradient", "k2"] = "policy_gradient"
    """policy_gradient: −sg[A]·log p(y). k2: ½(log p − log q)², back-propagated directly. Both are unbiased for the reverse-KL gradient on-policy; k1 and k3 are refused because they are not."""
    baseline: Literal["none", "kl"] = "none"
    """Control variate taken off the advantage. kl: the reverse KL of the position in closed form, from the full vocabulary (asks the teacher for full scores)."""


class LossSettings(Section):
    """What is minimised, per completion token, in nats."""

    support: Support = "topk"
    """sampled: the sampled token only. topk: K ids and what lies outside them. full: the whole vocabulary."""
    divergence: Divergence = "reverse_kl"
    """reverse_kl = KL(student‖teacher), forward_kl = KL(teacher‖student), jsd = the generalised Jensen–Shannon divergence."""
    jsd_beta: float = 0.5
    """β of jsd, between 0 and 1: M = β·q + (1−β)·p."""
    topk: TopkSettings = TopkSettings()
    """Settings of `support: topk`."""
    sampled: SampledSettings = SampledSettings()
    """Settings of `support: sampled`."""
    temperature: Temperature = 1.0
    """τ: divides both models' logits before the log-softmax. No τ² factor is applied."""
    importance: Literal["none", "truncated", "clip"] = "none"
    """Correction for updates after the first on one batch (ratio of the student now to the student at first sight). clip needs `support: sampled`."""
    importance_cap: Annotated[float, Field(ge=1)] = 2.0
    """Cap c of truncated importance ratios."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """ε_low of `importance: clip`."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """ε_high of `importance: clip`; above clip_low it is "clip higher"."""
    sampler_correction: Literal["none", "truncated"] = "none"
    """truncated: weigh each token by min(p_first / p_sampler, sampler_correction_cap), for engines or sampling settings that differ from the student."""
    sampler_correction_cap: Annotated[float, Field(ge=1)] = 2.0
    """Cap of the sampler correction."""
    reduction: Literal["token_mean", "sequence_mean", "token_sum"] = "token_mean"
    """token_mean divides by the unmasked completion tokens of the whole step; sequence_mean averages each completion first; token_sum divides by the number of completions."""
    skip_first_tokens: Annotated[int, Field(ge=0)] = 0
    """Leave the first tokens of every completion out of the loss and its denominator."""
    mask_truncated: bool = False
    """Leave completions that were cut at rollout.max_tokens out of the loss and its denominator."""
    mask_token_ids: list[TokenId] = Field(default_factory=list)
    """Leave these token ids out of the loss and its denominator."""
    chunk_tokens: Annotated[int, Field(ge=1)] = 256
    """Completion tokens whose logits exist at the same time; bounds the memory of the head."""

    @model_validator(mode="after")
    def _combines(self) -> LossSettings:
        """What LOSSES forbids: each refusal gives its reason."""
        if self.support == "sampled" and self.divergence != "reverse_kl":
            raise ValueError(
                f"support: sampled takes divergence: reverse_kl only, not {self.divergence}: the sampled token estimates no other gradient"
            )
        if self.support == "topk" and self.topk.mass == "weighted" and self.divergence != "reverse_kl":
            raise ValueError(f"topk.mass: weighted takes divergence: reverse_kl only, not {self.divergence}")
        if self.support == "topk" and self.topk.mass == "renormalize" and self.topk.k == 1:
            raise ValueError("topk.k: 1 with mass: renormalize is identically zero; use k ≥ 2 or mass: tail")
        if self.divergence == "jsd" and not 0 < self.jsd_beta < 1:
            pointer = "forward_kl" if self.jsd_beta <= 0 else "reverse_kl"
            raise ValueError(
                f"jsd_beta: {self.jsd_beta} makes the divergence vanish; use divergence: {pointer}, or 0 < jsd_beta < 1"
            )
        if self.importance == "clip" and self.support != "sampled":
            raise ValueError("importance: clip needs an advantage, so support: sampled; use importance: truncated")
        if self.importance == "clip" and self.sampled.estimator == "k2":
            raise ValueError(
                "importance: clip needs an advantage, so sampled.estimator: policy_gradient; use importance: truncated"
            )
        return self


class TrainSettings(Section):
    """The optimizer and the length of the run."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Steps of rollout, score, update and sync."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes down after the warm-up (linear and cosine end at 0)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW β₁."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW β₂."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW ε."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradient clipping by global norm; null = off."""
    microbatch_tokens: Annotated[int, Field(ge=1)] = 8192
    """Tokens (prompt and completion) of one forward and backward pass. The gradient does not depend on it."""
    inner_epochs: Annotated[int, Field(ge=1)] = 1
    """Updates on each batch of rollouts. The advantage is recomputed from the current student in each."""


class SyncSettings(Section):
    """Pushing the student's weights into the sampler, and the proof that they arrived."""

    max_mismatch: Annotated[float, Field(gt=0)] = 0.05
    """Engine mismatch (nats/token) above which the run stops: the sampler does not hold the student's weights."""


class EvalSettings(Section):
    """Reverse KL and overlap on fixed held-out prompts."""

    prompts: Annotated[int, Field(ge=0)] = 64
    """Held-out prompts; 0 = no evaluation."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    """Completion tokens at most."""
    every: Annotated[int, Field(ge=0)] = 0
    """Also evaluate every so many steps; 0 = before and after only."""
    teacher_completions: Annotated[int, Field(ge=0)] = 64
    """How many of the `eval.prompts` held-out prompts, at most, the teacher completes, once: the reverse KL on these fixed texts is reported too (in-process teachers only); 0 = none."""


class DiagnosticsSettings(Section):
    """Overlap, mass and entropy of student and teacher, on student rollouts."""

    k: Annotated[int, Field(ge=1)] = 16
    """Size of the top-k sets that are compared."""
    position_edges: list[int] = Field(default_factory=lambda: [16, 64, 256, 1024])
    """Edges of the position buckets, in completion tokens: [0, 16), [16, 64), …"""
    every: Annotated[int, Field(ge=0)] = 1
    """Measure every so many steps; 0 = never."""


class CheckpointSettings(Section):
    """Saving and keeping."""

    every: Annotated[int, Field(ge=0)] = 50
    """Save every so many steps; 0 = only at the end or when interrupted."""
    keep_last: Annotated[int, Field(ge=1)] = 2
    """Checkpoints kept."""


class RunSettings(Section):
    """The run directory and who is told about it."""

    dir: str = "runs"
    """Folder under which run directories are made."""
    name: str | None = None
    """Name of the run directory; default <date>-<student>-<n>."""
    replay: PathOrName | None = None
    """A run whose recorded rollouts and scores (`teacher.cache`) are trained on, without sampler or teacher; `--replay` sets it."""
    seed: int = 0
    """Every random choice is a function of this seed, the step, the prompt and the sample."""
    trackers: list[Literal["trackio", "wandb", "tensorboard"]] = Field(default_factory=list)
    """Where metrics are sent besides metrics.jsonl. A tracker that fails never stops the run."""
    save_rollouts: bool = True
    """Write every step's rollouts, with per-token values, under rollouts/."""


class Config(Section):
    """A whole run. Every field has a default except student.model, teacher.model (or teachers) and data.train."""

    student: StudentSettings = StudentSettings()
    """The model that is trained."""
    teacher: TeacherSettings = TeacherSettings()
    """The model that marks every token."""
    teachers: list[RoutedTeacher] = Field(default_factory=list)
    """Several teachers instead of one, each with its own rule, kind and address."""
    data: DataSettings = DataSettings()
    """The prompts."""
    rollout: RolloutSettings = RolloutSettings()
    """What the student writes in each step."""
    vllm: VllmSettings = VllmSettings()
    """The in-process vLLM engine."""
    hf: HfSettings = HfSettings()
    """The transformers sampler."""
    loss: LossSettings = LossSettings()
    """What is minimised."""
    train: TrainSettings = TrainSettings()
    """The optimizer and the length of the run."""
    sync: SyncSettings = SyncSettings()
    """Weight synchronisation and its verification."""
    eval: EvalSettings = EvalSettings()
    """Evaluation on held-out prompts."""
    diagnostics: DiagnosticsSettings = DiagnosticsSettings()
    """What is measured besides the loss."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Saving and keeping."""
    run: RunSettings = RunSettings()
    """The run directory."""

    @property
    def all_teachers(self) -> list[TeacherSettings]:
        """The teacher, or the teachers."""
        return [*self.teachers] or [self.teacher]
