"""Every setting of a run, as frozen dataclasses: one class per section of the YAML file.

The comment behind a field is its documentation; `config/load.py` merges files and command-line
overrides into these classes and refuses what does not fit; `config/check.py` refuses contradictions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(frozen=True)
class RunConfig:
    name: str = "run"  # shown in the console and the report
    folder: str = "runs/${run.name}"  # everything that the run writes lies under it
    seed: int = 0  # the only source of randomness: data order, sampling, initialisation
    resume: str = "auto"  # auto: the latest valid checkpoint, if any | none: a fresh folder | a checkpoint's path
    graph: str = "spmd_rl.recipes.grpo:graph"  # package.module:function that declares the graph
    threads: int = 0  # CPU threads per rank; 0: cores of the node / ranks on the node


@dataclass(frozen=True)
class ModelConfig:
    path: str = MISSING  # folder in Hugging Face format (config.json, safetensors, tokenizer)
    compute_dtype: str = "bfloat16"  # of the matrix products: bfloat16 | float32; master weights are float32
    activation_checkpointing: bool = False  # recompute each layer in the backward pass
    prefix_sharing: bool = True  # compute the prompt of a group once for all of its responses
    logprob_chunk: int = 1024  # tokens whose logits exist at one time
    lora_rank: int = 0  # above 0: adapters of this rank are trained and the model itself stays (LoRA); 0: all weights
    lora_alpha: float = 0.0  # adapters are scaled by lora_alpha / lora_rank; 0: 2 * lora_rank
    lora_targets: list[str] = field(default_factory=list)  # names of the linear layers that get one, e.g. q_proj;
    #   none: all of attention and MLP. There is no dropout: it would make the policy differ from its own samples


@dataclass(frozen=True)
class SourceConfig:
    """One data set. `path` (jsonl, parquet, or a Hugging Face dataset on disk) or `generator` (reasoning-gym)."""

    name: str = MISSING  # label in metrics and samples
    path: str = ""  # *.jsonl | *.parquet | folder made by datasets.save_to_disk
    generator: str = ""  # reasoning-gym task name
    params: dict[str, Any] = field(default_factory=dict)  # parameters of the generator
    size: int = 0  # rows to generate, or the first rows to use; 0: all (not for a generator)
    seed: int = 0  # of the generator; keep evaluation and training seeds apart
    prompt_column: str = "prompt"  # text, or a list of {role, content} messages
    answer_column: str = "answer"  # handed to the reward functions with the whole row
    system_prompt: str = ""  # first message, where the row is plain text
    prompt_template: str = "{prompt}"  # wraps a plain-text prompt
    examples: list[list[str]] = field(default_factory=list)  # [prompt, response] turns shown before a plain-text prompt
    weight: float = 1.0  # how often an epoch goes through the rows (training only); 0.5: half of them, in turns


@dataclass(frozen=True)
class DataConfig:
    train: list[SourceConfig] = field(default_factory=list)
    eval: list[SourceConfig] = field(default_factory=list)
    epochs: int = 0  # stop after so many passes over the training rows; 0: as many as train.steps needs
    shuffle: bool = True  # a seeded permutation of each epoch; false: file order
    curriculum: str = ""  # a column of numbers in whose ascending order each epoch runs, e.g. the difficulty
    max_prompt_tokens: int = 1024  # longer prompts are left out (counted and said)
    chat_template: bool = True  # false: the prompt text is tokenised as it stands
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # e.g. enable_thinking: false


@dataclass(frozen=True)
class RolloutConfig:
    engine: str = "vllm"  # vllm | transformers
    tensor_parallel: int = 1  # consecutive ranks that share one engine (vllm)
    temperature: float = 1.0  # also divides the trainer's logits
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int = 256  # of one response
    stop: list[str] = field(default_factory=list)  # strings that end a response
    dtype: str = "bfloat16"  # of the weights: bfloat16 | float32
    max_sequences: int = 256  # decoded together
    kv_cache_gib: float = 1.0  # per rank (vllm on CPU)
    gpu_memory_fraction: float = 0.5  # per GPU (vllm on CUDA)
    enforce_eager: bool = True  # false: compile / CUDA graphs (slower start, faster decoding)
    prefix_caching: bool = True
    max_model_tokens: int = 0  # prompt + response; 0: data.max_prompt_tokens + rollout.max_tokens


@dataclass(frozen=True)
class RewardFunctionConfig:
    function: str = MISSING  # package.module:function, or a built-in: math_verify | reasoning_gym
    weight: float = 1.0  # total reward = sum of weight * value
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments
    batched: bool = False  # called once with lists instead of once per sample


@dataclass(frozen=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    workers: int = 1  # processes per rank; 0: in the rank itself, without a time limit
    timeout_s: float = 30.0  # per call
    load_timeout_s: float = 300.0  # for a worker to import the modules of the functions
    on_error: str = "stop"  # stop | exclude (the sample leaves its group's statistics and the loss)


@dataclass(frozen=True)
class RewardModelConfig:
    """A model whose score is added to the functions' rewards; the part `reward_model` in samples and metrics."""

    path: str = ""  # folder of a transformers model for sequence classification with one label; "": none
    weight: float = 1.0  # total reward = that of the functions + weight * score


@dataclass(frozen=True)
class AlgorithmConfig:
    advantage: str = "grpo"  # grpo | grpo_no_std | grpo_leave_one_out | dr_grpo (with aggregation=constant) | rloo |
    #   reinforce_pp | reinforce_pp_baseline | opo | passk | cpgd (formulas: algorithms/group_advantages.py) |
    #   remax (one greedy response more per prompt is drawn, as the baseline) |
    #   gae (with the critic of run.graph=spmd_rl.recipes.ppo:graph; formulas: algorithms/gae.py)
    gae_gamma: float = 1.0  # gae: discount per token
    gae_lambda: float = 0.95  # gae: 1 trusts the rewards alone, 0 the critic's next value
    gae_whiten: bool = True  # gae: advantages get mean 0 and variance 1 over all tokens of the round
    pass_k: int = 0  # passk: the k of the maximised max-of-k reward
    overlong_buffer: float = 0.0  # last tokens before rollout.max_tokens over which a penalty grows (DAPO); below 1:
    #   a fraction of rollout.max_tokens; 0: off
    overlong_penalty: float = 1.0  # its greatest size, subtracted from the reward

    loss: str = "ppo_clip"  # ppo_clip | decoupled_ppo (samples older than the policy that bounds the step) | gspo |
    #   cispo | gmpo | cpgd | sapo | reinforce (formulas: algorithms/losses.py)
    aggregation: str = "token_mean"  # token_mean | seq_mean_token_mean | seq_mean_token_sum | constant
    loss_constant: float = 0.0  # tokens per sequence that `constant` divides by; 0: rollout.max_tokens
    clip_low: float = 0.2  # ratio is kept above 1 - clip_low (gmpo: above exp(-clip_low))
    clip_high: float = 0.2  # ratio is kept below 1 + clip_high (gmpo: below exp(clip_high))
    dual_clip: float = 0.0  # ppo_clip: greatest loss of a negative advantage, as a multiple of it; 0: off
    drift_coef: float = 0.0  # cpgd: weight of KL(old policy || policy)
    sapo_tau_positive: float = 1.0  # sapo: how fast the gate closes where the advantage is positive
    sapo_tau_negative: float = 1.05  # the same where it is negative

    kl_coef: float = 0.0  # 0: no reference model is loaded
    offload_reference: bool = False  # its weights lie in the host's memory between passes (for GPUs)
    kl_target: float = (
        0.0  # wanted kl/ref (nats per token), towards which kl_coef moves from step to step; 0: it is fixed
    )
    kl_horizon: float = 10000.0  # samples over which a full error of kl/ref would move kl_coef by its own size
    kl_in: str = "loss"  # loss | reward (k1 of the whole response is subtracted; gae: of each token at that token)
    kl_estimator: str = "k2"  # in the loss: k2 | k3_ratio (right gradient) | k3 (that of the reverse direction)
    entropy_coef: float = 0.0  # of the bonus

    correction: str = "none"  # rollout / trainer mismatch: none | tis (truncated importance sampling) | mis (masked) |
    #   icepop (masked on both sides)
    correction_level: str = "token"  # the weight of each: token | sequence (product) | geometric (mean over it)
    correction_cap: float = 2.0  # upper bound of the importance weight (also that of decoupled_ppo)
    correction_floor: float = 0.0  # icepop: lower bound
    dynamic_sampling: bool = False  # draw further prompts until train.prompts_per_step groups have rewards that differ
    dynamic_sampling_tries: int = 10  # rounds of prompts_per_step prompts per step; then the run stops
    mask_truncated: bool = False  # true: responses that hit max_tokens get no loss
    nonfinite_logprob: str = "stop"  # a NaN from the rollout engine: stop | exclude (the sample, from group and loss)


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0  # global norm; 0: no clipping
    schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0  # where linear and cosine end, as a fraction of lr


@dataclass(frozen=True)
class CriticConfig:
    """The value model of run.graph=spmd_rl.recipes.ppo:graph."""

    path: str = ""  # folder that it starts from: a causal model, or a reward model, whose head is kept; "": model.path
    warmup_steps: int = 0  # first steps in which only the critic is trained and the actor stays as it is
    epochs: int = 1  # passes over each round's samples, in train.updates_per_step optimizer steps each
    lora_rank: int = 0  # above 0: adapters of this rank and the head are trained, as model.lora_rank does; 0: all
    value_clip: float = 0.0  # how far a value may move within a round before its loss holds it back; 0: any distance
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100  # rollout-and-update rounds
    prompts_per_step: int = 8  # over all ranks; the last step of an epoch gets those that are left
    samples_per_prompt: int = 8  # the group
    updates_per_step: int = 1  # optimizer steps per round; the round's groups are divided among them
    tokens_per_microbatch: int = 4096  # budget of one forward and backward pass on one rank
    shard: str = "full"  # full: FSDP2 over the ranks | keep: the same, parameters stay gathered within a step
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True)
class EvalConfig:
    every: int = 0  # steps; 0: never between start and end
    at_start: bool = True
    at_end: bool = True
    samples_per_prompt: int = 1
    temperature: float = 0.0  # 0: greedy (then one sample per prompt)
    pass_at: list[int] = field(default_factory=lambda: [1])  # each k <= samples_per_prompt
    pass_threshold: float = 1.0  # a sample passes with reward >= this


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 0  # steps; 0: only at the end
    keep: int = 2  # older ones are removed; 0: keep all
    export: bool = True  # write Hugging Face safetensors at the end


@dataclass(frozen=True)
class CommConfig:
    backend: str = "auto"  # auto: nccl on CUDA, gloo elsewhere | gloo | nccl
    transport: str = "torch"  # carries samples between stages: torch (the backend above) | mpi (mpi4py, on CPU)
    timeout_s: float = 600.0  # of one collective
    init_timeout_s: float = 120.0  # until all ranks have met
    heartbeat_s: float = 60.0  # a rank that is silent for so long is stuck
    stage_timeout_s: float = 1800.0  # of one stage on one rank (dynamic sampling: of all rounds of a step)


@dataclass(frozen=True)
class ObserveConfig:
    console_samples: int = 2  # completions shown per table; 0: no table
    console_every: int = 10  # steps between tables
    samples_per_step: int = 64  # lines per step in samples.jsonl; 0: none
    tensorboard: bool = True
    timeline: bool = True  # timeline.json for Perfetto
    nvtx: bool = False  # NVTX ranges for Nsight


@dataclass(frozen=True)
class PlacementConfig:
    """Which ranks draw and which train, of mode: async. Each is a number of ranks (2), a fraction of all (0.5) or a
    list of ranks ([0, 1, 5]); one of them may be left out and gets the ranks that the other leaves."""

    rollout: Any = None
    train: Any = None


@dataclass(frozen=True)
class StreamConfig:
    """Of mode: async."""

    staleness: int = 1  # steps by which the weights that drew a sample may be behind those that it trains; 0: on-policy
    on_stale: str = "wait"  # wait: each step trains on its own round of prompts and waits for it | drop: on what came
    #   first; a group that is too old by then is given back and drawn again
    surplus: int = 0  # over-provisioning: groups drawn beyond those of a step, which trains on the first that are ready
    #   and leaves the others to the next ones; 0: as far ahead as `staleness` allows, and as `on_stale` says
    tail_tokens: int = 0  # tail batching: a group that is still being drawn after so many tokens is put aside, and goes
    #   on with others like it in a round of their own; needs `surplus`; 0: off
    train_on: str = "microbatch"  # microbatch: training begins once one is full | step: once all groups have come
    limit_mib: float = 256.0  # of groups from one replica that are being drawn, on their way, or waiting
    swap: str = "between_groups"  # a replica takes new weights: between_groups: once nothing is being drawn |
    #   rolling: the same, one replica after the other | in_flight: between two tokens of what is being drawn
    send: str = (
        "background"  # weights: background: while training goes on | blocking: trainers wait until they are there
    )
    tolerate_replica_loss: bool = False  # true: where an engine fails or hangs, or its process dies and the launcher
    #   lets the others live, the other replicas go on with its groups
    keep_cache: bool = False  # in_flight: running responses keep the keys and values of their tokens; false: made anew


@dataclass(frozen=True)
class Config:
    mode: str = "sync"  # sync: all ranks draw, then all train | async: some ranks draw while others train
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
