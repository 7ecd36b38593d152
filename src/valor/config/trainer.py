"""`trainer`, `resource_pools` and `ray_kwargs`: the run's length, processes, logging, validation, checkpoints."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from valor.config.base import CountOrOff, FolderStr, PathStr, Section, Seed, inherits, key, section


class RunConfig(Section):
    """What every kind of run has: a name, a length, devices, loggers, a folder."""

    project_name: str = "valor"
    """First part of the run's name."""
    experiment_name: str = "run"
    """Second part of the run's name."""
    default_local_dir: FolderStr = inherits("checkpoints/${.project_name}/${.experiment_name}")
    """Folder of the run: checkpoints, logs, report."""
    logger: list[str] = key(["console", "file"])
    """console, file (jsonl in the folder), tensorboard, wandb, trackio, mlflow, swanlab, or module:Name of your own."""
    total_epochs: PositiveInt = key(30, ".total_training_steps=null")
    """Passes over the training rows."""
    total_training_steps: PositiveInt | None = None
    """Length in steps; null is total_epochs."""
    save_freq: CountOrOff = -1
    """Checkpoint every so many steps (and after the last); -1 or 0 after the last alone."""
    test_freq: CountOrOff = key(-1, "data.val_files or data.val_share or data.val_tasks")
    """Validate every so many steps (and after the last); -1 or 0 after the last alone."""
    max_ckpt_to_keep: PositiveInt | None = None
    """Keep the newest checkpoints; null keeps all."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto goes on from the newest checkpoint in default_local_dir, if there is one."""
    resume_from_path: PathStr | None = key(None, ".resume_mode=resume_path")
    """resume_path: the checkpoint."""
    resume_changed: Literal["stop", "allow"] = "stop"
    """What happens when a resumed run would not compute what the run so far would have: stop, or go on and say so."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is any."""
    n_gpus_per_node: PositiveInt | None = None
    """Processes (one per device) on each node; null takes all GPUs, or one process on a CPU machine."""
    num_threads: PositiveInt | None = None
    """CPU threads of each process; null: OMP_NUM_THREADS, else of the cores' share as many as are quickest now."""
    seed: Seed = 42
    """Seed of everything random in the run; what is sampled depends on (seed, step, sample) alone."""
    full_determinism: bool = False
    """On GPUs: only algorithms that give the same bits every time, where torch has them; slower."""
    max_skipped_updates: PositiveInt = 5
    """Stop after so many updates in a row with gradients that are not finite."""

    def contradictions(self, at: str) -> Iterator[str]:
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            yield f"{at}resume_mode=resume_path needs {at}resume_from_path=<a checkpoint folder>"


class SeparateAsyncConfig(Section):
    """Generation in processes of its own, beside training."""

    parameter_sync_step: PositiveInt | None = None
    """Updates of the actor between two transfers of weights, a multiple of those of a step; null: those of a step."""


class SamplerConfig(Section):
    """Age of samples, in versions of the weights that were transferred since the oldest token."""

    max_off_policy_threshold: NonNegativeInt = 8
    """Largest age of a sample that is trained on; 0: only the newest weights, as in synchronous training."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """drop: what is too old is left out and drawn again; wait: training waits for what would become too old."""


class V1Config(Section):
    """Synchronous and asynchronous training."""

    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """sync: generate, then train; colocate_async: unfinished samples go on next time; separate_async: both at once."""
    num_warmup_batches: PositiveInt = key(1, ".trainer_mode!=sync")
    """Batches of prompts that are begun beyond the one of the step."""
    separate_async: SeparateAsyncConfig = section(SeparateAsyncConfig, "trainer.v1.trainer_mode=separate_async")
    sampler: SamplerConfig = section(SamplerConfig, "trainer.v1.trainer_mode!=sync")
    deterministic: bool = key(False, "trainer.v1.trainer_mode=separate_async")
    """Every batch by weights exactly max_off_policy_threshold steps old, so that a run repeats bit for bit."""

    @property
    def runs_ahead(self) -> bool:
        """Whether samples may be of other weights than those that they train."""
        return self.trainer_mode != "sync" and self.sampler.max_off_policy_threshold > 0

    @property
    def by_batches(self) -> bool:
        """Whether each batch is generated as a whole, by weights of a prescribed age."""
        return self.trainer_mode == "separate_async" and (self.deterministic or not self.runs_ahead)

    @property
    def batches_ahead(self) -> int:
        """Batches that are begun beyond the one of the step."""
        return self.num_warmup_batches if self.runs_ahead else 0

    def contradictions(self, at: str) -> Iterator[str]:
        if self.trainer_mode == "colocate_async" and not self.runs_ahead:
            yield (
                f"{at}sampler.max_off_policy_threshold=0 leaves colocate_async nothing to carry over to the next step: "
                "raise it, or set trainer_mode=sync"
            )


_NO_SERVICES = {"console", "file", "tensorboard"}  # loggers that take numbers alone; samples are files anyway


class TrainerConfig(RunConfig):
    """The PPO run."""

    nnodes: PositiveInt = 1
    """Nodes."""
    node_rank: NonNegativeInt | None = None
    """This machine's number in a run started once per node."""
    master_addr: str | None = None
    """Address of node 0 in a run started once per node."""
    master_port: PositiveInt | None = None
    """Port of node 0 in a run started once per node; null is 6379."""
    node_timeout: PositiveFloat = 300.0
    """Seconds to wait for the other nodes of a run started once per node."""
    controller: Literal["auto", "local", "ray"] = "auto"
    """local runs all roles in this process; ray in processes of their own; auto takes local for one CPU process."""
    critic_warmup: NonNegativeInt = 0
    """Steps in which only the critic is trained."""
    val_before_train: bool = key(True, "data.val_files or data.val_tasks")
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    log_generations: NonNegativeInt = 4
    """Training samples (whole episodes) per step to keep, with each token's value and advantage."""
    console_sample_freq: CountOrOff = key(10, ".log_generations")
    """Print a training sample with its score in every so manyth step, from the first on; -1 or 0 prints none."""
    log_val_generations: NonNegativeInt = key(0, "data.val_files or data.val_tasks")
    """Validation samples to log."""
    trace_generations: NonNegativeInt = 0
    """Samples of a step, and of a validation, that services of trainer.logger get, with each token's value."""
    rollout_data_dir: PathStr | None = None
    """Write every step's rollouts to this folder as jsonl."""
    episode_data_dir: PathStr | None = key(None, {"plays_episodes": "answers have one turn here"})
    """Record the episodes of every step and validation in this folder, to read and to replay (agent.replay_dir)."""
    validation_data_dir: PathStr | None = key(None, "data.val_files or data.val_tasks")
    """Write every validation's samples to this folder as jsonl."""
    keep_best: bool = False
    """Keep the checkpoint with the best validation score besides the newest ones."""
    report: bool = True
    """Write report.html into the run's folder."""
    v1: V1Config = section(V1Config)
    rollout_probs_diff_warn: PositiveFloat = 0.05
    """Warn when rollout and training probabilities of the sampled tokens differ by more than this on average."""

    def contradictions(self, at: str) -> Iterator[str]:
        yield from super().contradictions(at)
        if self.trace_generations and {*self.logger} <= _NO_SERVICES:
            yield f"{at}trace_generations goes to services: name wandb, trackio, mlflow or swanlab in {at}logger"
        addressed = self.master_addr is not None or self.master_port is not None
        if self.node_rank is None and addressed:
            yield f"{at}master_addr is for a run started once per node: set {at}node_rank on each"
        if self.node_rank is not None and self.master_addr is None:
            yield f"{at}node_rank is for a run started once per node: set {at}master_addr, the address of node 0"
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            yield f"{at}node_rank={self.node_rank} counts from 0 to {at}nnodes - 1 = {self.nnodes - 1}"


class PoolConfig(Section):
    """Processes for the named roles; the others share those of `trainer.nnodes` and `trainer.n_gpus_per_node`."""

    roles: list[str]
    """Who lives there: critic (with its ensemble), ref, teacher (all), reward_model, rollout (with its own weights)."""
    nnodes: PositiveInt = 1
    """Nodes."""
    n_gpus_per_node: PositiveInt = 1
    """Processes (one per device) on each node."""
    num_threads: PositiveInt | None = None
    """CPU threads of each process; null is trainer.num_threads."""


class RayKwargsConfig(Section):
    """Ray."""

    ray_init: dict[str, Any] = key({})
    """Arguments of ray.init: address (of a cluster to join; auto joins the one that runs here), num_cpus, others."""
