"""Commands as verl's examples for Qwen2.5-VL on Geometry3K write them: planned, and run on a tiny model."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import read_metrics

from tiny_vision import make_model, picture
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

KEYS = """
    algorithm.use_kl_in_reward=False data.image_key=images data.train_batch_size=4 data.max_prompt_length=400
    data.max_response_length=8 data.filter_overlong_prompts=True data.filter_overlong_prompts_workers=8
    data.truncation=error data.return_raw_chat=True data.image_patch_size=14 data.return_multi_modal_inputs=True
    +data.mm_processor_kwargs.max_pixels=1024
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.freeze_vision_tower=True
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.dtype=float32
    actor_rollout_ref.rollout.name=native actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.enable_chunked_prefill=False
    actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=True
    actor_rollout_ref.rollout.multi_stage_wake_up=True actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
    +actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0
    +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True
    trainer.balance_batch=True trainer.logger=["console","file"] trainer.project_name=verl_grpo_geo3k
    trainer.experiment_name=qwen2_5_vl_7b trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=-1
    trainer.test_freq=5 trainer.total_epochs=15 trainer.total_training_steps=2 trainer.device=cpu trainer.num_threads=1
    reward.num_workers=1
"""
GRPO = """
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.fsdp_config.param_offload=True
    actor_rollout_ref.model.lora_rank=4 actor_rollout_ref.model.lora_alpha=8
    actor_rollout_ref.model.target_modules=all-linear actor_rollout_ref.model.exclude_modules=.*visual.*
"""
PPO = """
    algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.strategy=fsdp2
    critic.model.enable_gradient_checkpointing=False critic.ppo_micro_batch_size_per_gpu=4
    critic.model.fsdp_config.param_offload=False trainer.critic_warmup=0
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("geo3k")
    (root / "a.png").write_bytes(picture(24, 16, 9))
    images = [{"bytes": picture(16, 24, i), "path": None} for i in range(4)] + [{"bytes": None, "path": "a.png"}] * 4
    rows = [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [
                {"role": "system", "content": "Solve."},
                {"role": "user", "content": "<image>Find x. Think in <think> </think>, and answer in \\boxed{}."},
            ],
            "images": [image],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "12"},
            "extra_info": {"split": "train", "index": i, "answer": "12", "question": "<image>Find x."},
        }
        for i, image in enumerate(images)
    ]
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), root / f"{name}.parquet")
    files = [f"data.train_files={root / 'train.parquet'}", f"data.val_files={root / 'test.parquet'}"]
    model = [f"actor_rollout_ref.model.path={make_model(root / 'model')}", f"data.image_cache={root / 'cache'}"]
    return [*KEYS.split(), *files, *model]


@pytest.mark.parametrize("more", [GRPO, PPO], ids=["grpo", "ppo"])
def test_a_script_runs(script: list[str], more: str, tmp_path: Path) -> None:
    command = [*script, *more.split(), f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main([*command, "--dry-run"]) == 0 and not (tmp_path / "run").exists()
    assert main(command) == 0
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-5 for row in rows[1:])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["actor_rollout_ref.rollout.name=sglang"],
            "vllm and server (vLLM's) alone take token ids with images",
        ),
        (
            ["actor_rollout_ref.rollout.name=trtllm"],
            "vllm and server (vLLM's) alone take token ids with images",
        ),
        (["actor_rollout_ref.actor.strategy=megatron"], "strategy=fsdp2 alone trains on images"),
        (["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"], "divides rows of text"),
        (["data.video_key=videos"], "no video and no audio"),
        (["+data.audio_key=audios"], "no video and no audio"),
        (["+data.mm_processor_kwargs.fps=2"], "Qwen2VLImageProcessorPil has no such option"),
    ],
)
def test_what_is_not_supported_is_one_line(
    script: list[str], more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*script, *GRPO.split(), f"trainer.default_local_dir={tmp_path / 'run'}", *more]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
