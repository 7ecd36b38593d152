"""Overrides, yaml files, and mistakes: all at once, one line each."""

from operator import attrgetter
from pathlib import Path

import pytest
from pydantic import ValidationError
from yaml import YAMLError

from valor.config import CriticPretrainConfig, PPOConfig, SFTConfig, dump_yaml, load, load_yaml
from valor.config.base import takes_lists
from valor.config.critic_runs import CriticSearchConfig
from valor.config.presets import DEFAULTS
from valor.config.tree import Key, fields
from valor.errors import UserError


def mistakes(*argv: str, root=PPOConfig) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(argv, root)
    return str(caught.value).splitlines()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "algorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref:\n"
        "  rollout: {n: 4}\n"
        "  actor: {optim: {lr: 1e-6}}\n"
        "data:\n"
        "  train_files: ${oc.env:VALOR_TEST_DIR}/train.parquet\n"
        "  max_prompt_length: 33\n"
        "trainer:\n"
        "  total_training_steps: ${data.max_prompt_length}\n"
    )
    return tmp_path


def test_grammar():
    config = load(
        [
            "data.train_files=['/a b/x.parquet', '/c.parquet']",
            "data.val_files=~/v.parquet",
            "actor_rollout_ref.actor.optim.lr=5e-7",
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            "++critic.optim.lr=2e-5",
            'trainer.logger=["console","tensorboard"]',
            "trainer.experiment_name='qwen2.5 v1'",
            "trainer.total_training_steps=null",
            "trainer.val_before_train=False",
            "critic={freeze_steps: 1-3, ppo_epochs: 2}",
            "actor_rollout_ref.rollout.engine_kwargs.vllm.x=1",
            "reward.custom_reward_function.path=/a=b.py",
        ]
    ).config
    assert config.data.train_files == ["/a b/x.parquet", "/c.parquet"]
    assert config.data.val_files == [str(Path("~/v.parquet").expanduser())]
    assert config.actor_rollout_ref.actor.optim.lr == 5e-7
    assert config.actor_rollout_ref.model.override_config == {"attn_implementation": "eager"}
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"x": 1}}
    assert (config.critic.optim.lr, config.critic.freeze_steps, config.critic.ppo_epochs) == (2e-5, ["1-3"], 2)
    assert config.trainer.logger == ["console", "tensorboard"]
    assert config.trainer.experiment_name == "qwen2.5 v1"
    assert config.trainer.total_training_steps is None and config.trainer.val_before_train is False
    assert config.reward.custom_reward_function.path == "/a=b.py"


def test_the_last_override_counts():
    assert load(["trainer.seed=1", "trainer.seed=2"]).config.trainer.seed == 2


def test_tilde_goes_back_to_the_default():
    loaded = load(["--config-name", "grpo_config", "~actor_rollout_ref.rollout.n", "~data"])
    assert loaded.config.actor_rollout_ref.rollout.n == 1
    assert loaded.config.data == PPOConfig().data
    assert "data.train_batch_size" not in loaded.explicit_keys
    assert load(["algorithm.lam=0.5", "~algorithm.lam"]).config.algorithm.lam_critic == 1.0
    request = "reward.reward_model.judge.request"
    entries = load([f"{request}.seed=1", f"~{request}.max_tokens"]).config.reward.reward_model.judge.request
    assert entries == {"temperature": 0.0, "seed": 1}
    assert load([f"{request}.seed=1", f"~{request}"]).config == load([]).config
    for missing in (f"~{request}.max_token", f"~{request}.a.b"):
        assert mistakes(missing)[0].startswith(f"unknown key '{missing[1:]}': did you mean '{request}'")


def test_explicit_keys_are_those_typed_or_changed():
    loaded = load(["trainer.seed=42", "critic={freeze: false}"])
    assert loaded.explicit_keys == {"trainer.seed", "critic.freeze"}


def test_named_configurations():
    ppo, grpo = load(["--config-name=ppo_config"]).config, load(["-cn", "grpo_config"]).config
    assert ppo.critic.enable and ppo.algorithm.adv_estimator == "gae"
    assert not grpo.critic.enable and grpo.actor_rollout_ref.rollout.n == 5 and grpo.needs_reference
    assert load(["--config-name", "sft_config"], SFTConfig).config.optim.lr_scheduler_type == "cosine"
    assert load(["--config-name", "ppo_trainer"]).config == load([]).config == PPOConfig()
    assert load([], SFTConfig).config == SFTConfig()


@pytest.mark.parametrize("option", ["--config-path", "--config-dir"])
def test_own_yaml(folder, monkeypatch, option):
    monkeypatch.setenv("VALOR_TEST_DIR", "/data")
    loaded = load([option, str(folder), "--config-name", "run.yaml", "actor_rollout_ref.rollout.n=8"])
    assert loaded.config.data.train_files == ["/data/train.parquet"]
    assert loaded.config.actor_rollout_ref.rollout.n == 8
    assert loaded.config.trainer.total_training_steps == 33
    assert loaded.explicit_keys >= {"algorithm.adv_estimator", "actor_rollout_ref.rollout.n", "data.train_files"}
    assert "trainer.seed" not in loaded.explicit_keys


def test_yaml_without_defaults_and_config_groups(tmp_path):
    (tmp_path / "bare.yaml").write_text("trainer: {seed: 5}\n")
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "sums.yaml").write_text("# @package _global_\ndata: {max_prompt_length: 77}\n")
    config = load(["-cp", str(tmp_path), "-cn", "bare", "+task=sums"]).config
    assert config.trainer.seed == 5 and config.data.max_prompt_length == 77


def test_composition_writes_nothing(folder, monkeypatch, tmp_path_factory):
    here = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(here)
    monkeypatch.setenv("VALOR_TEST_DIR", "/data")
    load(["--config-path", str(folder), "--config-name", "run", "trainer.seed=1"])
    assert list(here.iterdir()) == [] and [p.name for p in folder.iterdir()] == ["run.yaml"]


def test_all_mistakes_at_once_one_line_each():
    lines = mistakes(
        "actor_rollout_ref.actor.optim.learning_rate=1e-6",
        "actor.optim.lr=1",
        "trainer.total_epochs=abc",
        "trainer.device=gpu",
        "algorithm.lam=1.5",
        "critic=null",
        "trainer.logger.console=true",
        "trainer.seed=None",
        "actor_rollout_ref.rollout.n=true",
        "data.train_files=[a",
        "nonsense",
        "~trainer.sed",
    )
    assert len(lines) == 12
    text = "\n".join(lines)
    for line in (
        "unknown key 'actor_rollout_ref.actor.optim.learning_rate': did you mean 'actor_rollout_ref.actor.optim.lr'?",
        "unknown key 'actor.optim.lr': did you mean 'actor_rollout_ref.actor.optim.lr'?",
        "trainer.total_epochs: expected integer > 0, got 'abc'",
        "trainer.device: expected one of auto, cpu, cuda, got 'gpu'",
        "algorithm.lam: expected number from 0 to 1 or auto, got 1.5",
        "critic: is a section, got null: set its keys (see `valor config keys critic`)",
        "unknown key 'trainer.logger.console': 'trainer.logger' is a value, it has no keys of its own",
        "trainer.seed: write null, not None",
        "actor_rollout_ref.rollout.n: true/false is not a value for this key",
        "cannot read 'data.train_files=[a': '[' and ']' do not match",
        "cannot read 'nonsense': write key=value",
        "unknown key 'trainer.sed': did you mean 'trainer.seed'",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("actor_rollout_ref.actor.optim.lrr", "actor_rollout_ref.actor.optim.lr"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("train_batch_size", "data.train_batch_size"),
        ("critic.kl_ctrl", "algorithm.kl_ctrl"),
        ("actor_rollout_ref.actor.entropy_coef", "actor_rollout_ref.actor.entropy_coeff"),
        ("actor_rollout_ref.model.chat_template", "actor_rollout_ref.model.custom_chat_template"),
        ("acter_rollout_ref.actor.shuffle", "actor_rollout_ref.actor.shuffle"),
    ],
)
def test_the_key_that_was_meant_is_named(key, meant):
    [line] = mistakes(f"{key}=1")
    assert line.startswith(f"unknown key '{key}': did you mean") and f"'{meant}'" in line


def test_one_wrong_source_is_one_line():
    assert mistakes("actor_rollout_ref.actor.ppo_epochs=x", "algorithm.lam=y") == [
        "actor_rollout_ref.actor.ppo_epochs: expected integer > 0, got 'x'",
        "algorithm.lam: expected number from 0 to 1 or auto, got 'y'",
    ]


def test_an_entry_without_its_name_is_shown_where_the_name_belongs():
    assert mistakes("distillation.teacher_models.model_path=/x") == [
        "distillation.teacher_models.model_path: got '/x', but each entry has a name: write "
        "distillation.teacher_models.NAME.model_path"
    ]


def test_a_near_choice_is_offered():
    [line] = mistakes("actor_rollout_ref.actor.loss_agg_mode=token_mean")
    assert line.endswith("got 'token_mean'; did you mean token-mean?")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--config-name", "nope"], "there is no configuration 'nope': built in are ppo_trainer, ppo_config, grpo_con"),
        (["--config-name"], "--config-name needs a value"),
        (["--dry-rum"], "unknown option '--dry-rum': there are --config-name"),
        (["--learning_rate", "1e-5"], "unknown option '--learning_rate': a setting is written learning_rate=VALUE"),
        (["--config-path", "/no/such/folder"], "--config-path /no/such/folder: there is no such folder"),
        (
            ["algorithm.lam=0.9,0.95"],
            "algorithm.lam has several values: write a [list] or a 'quoted text'; several runs",
        ),
        (["-m", "trainer.seed=1"], "unknown option '-m': several runs are a sweep (valor lab sweep FILE.yaml)"),
        (["=3"], "cannot read '=3': the part before = must be a dotted key"),
        (["trainer.project_name=it's"], "cannot read 'trainer.project_name=it's': quote the value"),
        (["~trainer.seed=3"], "cannot read '~trainer.seed=3': write ~trainer.seed alone"),
        (["actor_rollout_ref.model.path=???"], "actor_rollout_ref.model.path: has no value yet (???)"),
    ],
)
def test_other_mistakes(argv, line):
    [found] = mistakes(*argv)
    assert line in found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: [1\n b: 2", "/bad.yaml, line 2: not valid yaml"),
        ("- 1\n- 2\n", "/bad.yaml: must hold keys"),
        ("defaults: [ppo_trainerr, _self_]\n", "/bad.yaml: In 'bad': Could not load 'ppo_trainerr'."),
        ("data:\n  train_files: ${nope.x}\n", "data.train_files: Interpolation key 'nope.x' not found"),
        ("trainer:\n  seed: ???\n", "trainer.seed: has no value yet (???)"),
        ("trainer: {sede: 1}\n", "unknown key 'trainer.sede': did you mean 'trainer.seed'"),
        ("trainer: 3\n", "trainer: is a section, got 3: set its keys"),
    ],
)
def test_mistakes_in_yaml(tmp_path, text, line):
    (tmp_path / "bad.yaml").write_text(text)
    [found] = mistakes("--config-path", str(tmp_path), "--config-name", "bad")
    assert found.removeprefix(str(tmp_path)).startswith(line)


def test_missing_yaml_names_those_there_are(folder):
    [line] = mistakes("--config-path", str(folder), "--config-name", "ran")
    assert line.endswith(f"{folder} has run")


def test_a_search_path_that_is_not_there_is_a_note(tmp_path):
    text = "hydra: {searchpath: ['file://no/such/dir']}\ndefaults: [ppo_trainer, _self_]\n"
    (tmp_path / "verl.yaml").write_text(text)
    loaded = load(["--config-path", str(tmp_path), "--config-name", "verl", "hydra.run.dir=x"])
    assert len(loaded.notes) == 2
    assert any("path=no/such/dir is not available" in note for note in loaded.notes)
    assert any(note.startswith("hydra.run.dir has no effect") for note in loaded.notes)


def test_help_prints_the_usage(capsys):
    with pytest.raises(SystemExit) as exit:
        load(["--help"])
    assert exit.value.code == 0 and "--config-name" in capsys.readouterr().out


def test_resolved_config_reloads_to_an_equal_object(tmp_path):
    argv = ["-cn", "grpo_config", "actor_rollout_ref.rollout.n=3", "ray_kwargs.ray_init.include_dashboard=false"]
    config = load([*argv, "trainer.seed=9"]).config
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load(["--config-path", str(tmp_path), "--config-name", "config"]).config == config
    (tmp_path / "sft.yaml").write_text(dump_yaml(SFTConfig()))
    assert load(["--config-path", str(tmp_path), "--config-name", "sft"], SFTConfig).config == SFTConfig()


def test_text_with_dollar_signs_survives_the_yaml_file(tmp_path):
    template = "{% if x %}${y} '${{ z }}' \\n # :{% endif %}\nline"
    config = PPOConfig.model_validate({"actor_rollout_ref": {"model": {"custom_chat_template": template}}})
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load(["--config-path", str(tmp_path), "--config-name", "config"]).config == config


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["critic.freeze_steps=5-2"], "no range of steps"),
        (["critic.ensemble_size=2"], "critic.model.value_head_init=normal"),
        (["algorithm.reward_mask_ratio=1.2"], "algorithm.reward_mask_ratio"),
        (
            ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=256"],
            "actor_rollout_ref.actor.ppo_mini_batch_size=256 prompts is more than data.train_batch_size=32 prompts",
        ),
        (["critic.ppo_mini_batch_size=2000"], "critic.ppo_mini_batch_size=2000 prompts is more than"),
        (
            ["actor_rollout_ref.rollout.prompt_length=99", "data.max_prompt_length=9"],
            "actor_rollout_ref.rollout.prompt_length=99 and data.max_prompt_length=9 are the same setting",
        ),
        (["actor_rollout_ref.rollout.max_model_len=1000"], "actor_rollout_ref.rollout.max_model_len=1000 is less than"),
        (
            ["data.val_files=a", "actor_rollout_ref.rollout.val_kwargs.do_sample=true"],
            "actor_rollout_ref.rollout.val_kwargs.do_sample=tr",
        ),
        (
            ["algorithm.rollout_correction.rollout_rs=token_k1"],
            "algorithm.rollout_correction.rollout_rs=token_k1 needs algorithm.rollout_correction.rollout_rs_threshold",
        ),
        (
            ["reward.reward_kwargs.overlong_buffer_cfg.enable=true"],
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true is read with reward.reward_manager.name=dapo",
        ),
        (
            ["reward.reward_kwargs.overlong_buffer_cfg.enable=true", "reward.reward_manager.name=dapo"],
            "reward.reward_kwargs.overlong_buffer_cfg.len=4096 is more than data.max_response_length=512",
        ),
        (["trainer.val_only=true"], "trainer.val_only=true needs validation prompts: set data.val_files"),
        (["trainer.keep_best=true"], "trainer.keep_best=true needs validation prompts: set data.val_files"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_mode=resume_path needs trainer.resume_from_path"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path="],
            "trainer.resume_mode=resume_path needs trainer.resume_from_path",
        ),
        (["trainer.default_local_dir="], "trainer.default_local_dir: expected the path of a folder, got nothing"),
    ],
)
def test_contradictions_between_keys(argv, line):
    [found] = mistakes(*argv)
    assert line in found


def test_higher_rooms_are_asked_once_the_tree_is_valid():
    def check(config: PPOConfig) -> list[str]:
        return [f"seed {config.trainer.seed} is taken"]

    with pytest.raises(UserError) as caught:
        load(["trainer.seed=3", "trainer.val_only=true"], PPOConfig, check)
    needs = "trainer.val_only=true needs validation prompts: set data.val_files"
    assert str(caught.value).splitlines() == [needs, "seed 3 is taken"]
    wrong, needs_too = ["trainer.seed=x", "trainer.val_only=true"], ["trainer.seed is taken", "so is it"]
    for typed, more in ((wrong, []), (["--dry-run", *wrong], ["so is it"])):  # of a wrong key nothing more is told
        with pytest.raises(UserError) as caught:
            load(typed, PPOConfig, lambda config: needs_too)
        assert str(caught.value).splitlines() == ["trainer.seed: expected integer >= 0, got 'x'", needs, *more]


def test_no_contradiction_without_a_critic_to_train():
    config = load(
        ["algorithm.adv_estimator=grpo", "critic.ppo_mini_batch_size=2000", "data.train_batch_size=256"]
    ).config
    assert not config.critic.enable


@pytest.mark.parametrize("bounds", ["0.5_2.0", "0.5_5", "1_5"])
def test_two_bounds_of_a_threshold_are_not_a_number(bounds):
    config = load([f"algorithm.rollout_correction.rollout_is_threshold={bounds}"]).config
    assert config.algorithm.rollout_correction.rollout_is_threshold == bounds


def test_a_single_value_is_a_list_of_one():
    """Whatever the type of the items is: of each list key of each tree, read as the command line reads it."""
    sections = {section: name for root in DEFAULTS for name, section in _sections(root)}
    for section in sections:
        for name, info in section.model_fields.items():
            if not takes_lists(info.annotation):
                continue
            item = next(iter(Key(name, info).default or ()), None)
            for value in {"text", 7} if item is None else {item}:
                try:
                    wanted = section.model_validate({name: [value]})
                except ValidationError:  # an item of another type
                    with pytest.raises(ValidationError):
                        section.model_validate({name: value})
                else:
                    assert section.model_validate({name: value}) == wanted, f"{sections[section]}.{name}"


def _sections(root):
    return [(key.name, key.section) for key in fields(root).values() if key.section is not None]


@pytest.mark.parametrize(
    ("override", "root", "value"),
    [
        ("critic.freeze_steps=7", PPOConfig, ["7"]),
        ("critic.unclipped_steps=1-5", PPOConfig, ["1-5"]),
        ("global_profiler.steps=2", PPOConfig, [2]),
        ("global_profiler.ranks=0", PPOConfig, [0]),
        ("search.samples=4", CriticSearchConfig, [4]),
        ("data.val_files=a.parquet", SFTConfig, ["a.parquet"]),
    ],
)
def test_a_single_value_on_the_command_line(override, root, value):
    required = ["data.val_files=a.parquet"] if root is CriticSearchConfig else []
    config = load([*required, override], root).config
    assert attrgetter(override.partition("=")[0])(config) == value


def test_a_typo_is_told_without_asking_higher_rooms():
    def check(config: PPOConfig) -> list[str]:
        raise AssertionError("this imports torch")

    with pytest.raises(UserError, match=r"unknown key 'trainer.sed': did you mean 'trainer.seed'"):
        load(["trainer.sed=1"], PPOConfig, check, check)


@pytest.mark.parametrize(
    ("typed", "enabled"), [((), True), (("critic.enable=null",), True), (("critic.enable=false",), False)]
)
def test_null_keys_take_what_is_derived(typed, enabled):
    loaded = load(
        [*typed, "algorithm.adv_estimator=rloo"], PPOConfig, lambda config: [], lambda config: {"critic.enable": True}
    )
    assert loaded.config.critic.enable is enabled


@pytest.mark.parametrize(
    ("root", "override"),
    [
        (CriticPretrainConfig, "actor_rollout_ref.actor.ppo_mini_batch_size=2048"),
        (CriticPretrainConfig, "global_profiler.ranks=3"),
        (CriticPretrainConfig, "trainer.v1={trainer_mode: colocate_async, sampler: {max_off_policy_threshold: 0}}"),
        (CriticSearchConfig, "critic.ppo_mini_batch_size=2048"),
        (PPOConfig, "critic.freeze_steps=3"),
    ],
)
def test_keys_of_what_does_not_run_refuse_nothing(root, override):
    needs = ["data.val_files=a.parquet"] if root is CriticSearchConfig else []
    more = ["critic.ppo_mini_batch_size=4"] if root is CriticPretrainConfig else []
    more += ["algorithm.adv_estimator=grpo"] if root is PPOConfig else []
    loaded = load([*needs, *more, override], root)
    assert override.partition("=")[0].partition("{")[0] in " ".join(loaded.explicit_keys)


@pytest.mark.parametrize("name", ["0.10", "1_000", "1e-5", "8e12345", "+5", "007"])
def test_a_name_that_looks_like_a_number_stays_as_it_is_typed(name, tmp_path):
    lists = [f"data.val_files=[a,{name}]", f"trainer.logger=[~/a, {name}]"]
    config = load([f"trainer.experiment_name={name}", f"data.train_files={name}", "trainer.seed=1_0", *lists]).config
    assert (config.trainer.experiment_name, config.data.train_files) == (name, [name])
    assert (config.data.val_files, config.trainer.logger) == (["a", name], ["~/a", name])
    assert config.trainer.default_local_dir == f"checkpoints/valor/{name}" and config.trainer.seed == 10
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load(["--config-path", str(tmp_path), "--config-name", "config"]).config == config


def test_texts_in_lists_and_dicts_need_no_quotes_and_json_is_read():
    home = str(Path("~/a.parquet").expanduser())
    config = load(
        [
            "data.train_files=[~/a.parquet, /data/文 (1).parquet]",
            'data.apply_chat_template_kwargs={"enable_thinking": false, "roles of": ["a", 1e-5, null]}',
            "reward.custom_reward_function.reward_kwargs={'a': {b: [~/c, 1e5, '1e5', on, 0x1f]}}",
            "trainer.default_local_dir=runs (old)/[x]",
        ]
    ).config
    assert config.data.train_files == [home, "/data/文 (1).parquet"]
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False, "roles of": ["a", 1e-5, None]}
    assert config.reward.custom_reward_function.reward_kwargs == {"a": {"b": ["~/c", 1e5, "1e5", "on", "0x1f"]}}
    assert config.trainer.default_local_dir == "runs (old)/[x]"
    [line] = mistakes("data.train_files=[/a?b=1&c, 'd']")
    assert "quote each text in it, and all of it for the shell: \"data.train_files=['...','...']\"" in line


def test_yaml_of_other_files_has_the_numbers_of_the_command_line():
    assert load_yaml("- {a: 1e5, b: [1e-5, x, '1e5'], c: '${d}'}") == [{"a": 1e5, "b": [1e-5, "x", "1e5"], "c": "${d}"}]
    for text in ("{a: 1, a: 2}", "a: '${b'", "a: !!set {b}", "a: ["):
        with pytest.raises(YAMLError):
            load_yaml(text)
