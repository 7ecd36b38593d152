"""Policies, value models and tokenizers from Hugging Face directories or hub names, with errors a user can act on."""

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer
from transformers.dynamic_module_utils import init_hf_modules
from transformers.utils.hub import cached_file

from valor.config import PPOConfig
from valor.config.engine import BackboneConfig, CriticModelConfig, ModelConfig
from valor.data.images import ImageFiles
from valor.data.templates import template_text
from valor.errors import UserError
from valor.hub import hub_answers, instead_of_model, out_of_reach
from valor.models.classifier import register_classifier
from valor.models.hf import quiet_transformers, reads_later_tokens
from valor.models.images import FAMILIES, freeze_vision_tower, policy_class
from valor.models.internals import checkpoint_layers, processor_without_video, save_as_floats
from valor.models.lora import add_adapters
from valor.models.override import override
from valor.models.policy import PolicyModel
from valor.models.quantized import read_as_floats, whole_numbers, widen
from valor.models.value import HEAD_NAMES, ValueHead, ValueModel

_OR_NONE: Any = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
logger = logging.getLogger(__name__)


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    require_chat_template: bool = False,
) -> Any:
    """The tokenizer at `path`; its padding token is EOS where it has none. UserError: no tokenizer there, or no chat
    template although one is required."""
    source = _resolve(path)
    with _as_user_errors(path, "tokenizer"), quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        # transformers makes an empty tokenizer of the model's type when a directory has no tokenizer files.
        if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
            raise ValueError("it has no vocabulary")
        older = cached_file(source, "chat_template.json", **_OR_NONE)
    if older is not None and not tokenizer.chat_template:  # of a vision model: transformers' processors alone read it
        tokenizer.chat_template = json.loads(Path(older).read_bytes())["chat_template"]
    if custom_chat_template is not None:
        tokenizer.chat_template = template_text(custom_chat_template)
    if require_chat_template and not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer at '{path}' has no chat template: set model.custom_chat_template or use a chat model's"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.clean_up_tokenization_spaces = False  # graders read what was written, "a , b" too
    return tokenizer


def load_model_tokenizer(model: ModelConfig, *, at: str | None = None, chat: bool = False) -> Any:
    """The tokenizer at `at`, else the model's own, with the chat template that `model` gives it. UserError: there is
    none, or `chat` and it has no template."""
    return load_tokenizer(
        at or model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        require_chat_template=chat,
    )


def load_policy_tokenizer(config: PPOConfig) -> Any:
    """The tokenizer of the policy, with a chat template. UserError: there is none."""
    return load_model_tokenizer(config.actor_rollout_ref.model, chat=True)


def load_image_files(config: PPOConfig, tokenizer: Any) -> ImageFiles:
    """What reads images for the policy, whose tokenizer this is. UserError: its model reads no images, or not in a way
    that is known here."""
    data, model = config.data, config.actor_rollout_ref.model
    kind = load_model_config(model)
    if kind.model_type not in FAMILIES:
        raise UserError(
            f"data.image_key={data.image_key}: '{model.path}' is a model of type {kind.model_type}, and images "
            f"are read by {', '.join(FAMILIES)}: take such a model, or drop image_key"
        )
    with _as_user_errors(model.path, "processor"), quiet_transformers():
        processor = processor_without_video(kind).from_pretrained(_resolve(model.path), video_processor=None)
    processor.tokenizer, tokenizer.renders_parts = tokenizer, True
    apart = config.plays_episodes or config.actor_rollout_ref.rollout.name != "native"
    return ImageFiles(processor, kind.image_token_id, data.image_cache, data.mm_processor_kwargs, apart=apart)


def check_critic(config: PPOConfig, tokenizer: Any, *, trains: bool = True) -> None:
    """UserError: the critic's vocabulary is not that of the policy's `tokenizer`, a frozen one has no head, or all of
    an ensemble would be equal. The critic never sees text: merges and templates do not matter. `trains`: it learns."""
    critic, model = config.critic, config.critic.model
    if not config.has_value_model:
        return
    config_of_critic = load_model_config(model)
    described = _where_head_is(model, config_of_critic)[1]
    if not _has_head(described) and (critic.freeze or not trains):
        line = (
            f"the critic '{model.path}' has no value head, and a new one knows nothing: valor critic pretrain fits it"
        )
        if critic.freeze:
            raise UserError(line)
        logger.warning(line)
    settings = {"target": critic.learns, "prompt_template": critic.prompt_template}
    for name, default in (("target", "absolute"), ("prompt_template", settings["prompt_template"])):
        learnt = getattr(described, f"value_{name}", default)
        if _has_head(described) and learnt != settings[name]:
            raise UserError(
                f"the critic '{model.path}' was trained with critic.{name}={learnt}, and this command has "
                f"{settings[name] or 'none'}: take another critic, or set critic.{name} to that in valor ppo"
            )
    apart = critic.shuffle or (model.lora_rank > 0 and model.lora_adapter_path is None)
    if critic.ensemble_size > 1 and not apart and _has_head(described):
        all_same = f"the critics would all be the same, as '{model.path}' has a head: set critic.shuffle=true"
        raise UserError(f"critic.ensemble_size={critic.ensemble_size}: {all_same}")
    if model.path == config.actor_rollout_ref.model.path:
        return
    if difference := other_tokenizer(model, config_of_critic, config.actor_rollout_ref.model, tokenizer):
        raise UserError(
            f"the critic '{model.path}' has another tokenizer than the policy: {difference}: set critic.model.path to "
            "a model with the policy's tokenizer"
        )


def other_tokenizer(model: BackboneConfig, config: Any, policy: BackboneConfig, tokenizer: Any) -> str | None:
    """How the tokens of `model` differ from those of the `tokenizer` whose last the `policy` itself may lack, if so."""
    size = int(config.get_text_config().vocab_size)
    if size < len(tokenizer) and size < int(load_model_config(policy).get_text_config().vocab_size):
        return f"it knows {size} tokens and the policy's tokenizer has {len(tokenizer)}"
    if any(Path(model.path).glob("tokenizer*")) or not Path(model.path).is_dir():  # else only sizes can be compared
        theirs = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).get_vocab()
        for token, number in tokenizer.get_vocab().items():
            if theirs.get(token) != number:
                return f"{token!r} is token {number} of the policy's and {theirs.get(token, 'none')} of its own"
    return None


def load_policy(
    model: ModelConfig, *, dtype: torch.dtype = torch.float32, seed: int = 42, frozen_vision: bool = False
) -> PolicyModel:
    """The causal language model at `model.path` on the CPU in `dtype`, dropout off. `seed`: of new adapters."""
    config = load_model_config(model)
    if reads_later_tokens(config) and not config.is_encoder_decoder:
        raise UserError(f"tokens of '{model.path}' ({config.model_type}) read later ones: give a causal language model")
    hf, info = _from_pretrained(policy_class(config), model, config, dtype)
    if info["unexpected_keys"]:
        logger.warning("weights in '%s' that the policy does not use: %s", model.path, _some(info["unexpected_keys"]))
    _prepare(hf, model, seed, frozen_vision=frozen_vision)
    return PolicyModel(hf, packed=model.use_remove_padding, shared=model.share_prefixes)


def load_value_model(
    model: CriticModelConfig,
    *,
    head: ValueHead | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 42,
    says: Mapping[str, Any] | None = None,
    frozen_vision: bool = False,
) -> ValueModel:
    """A token-classification model from the checkpoint at `model.path`, dropout off.

    A published critic keeps its head, which must be the `head` asked for, if any (UserError). A causal language model
    gets a new one: all zeros, or normal with the config's initializer_range (drawn from `seed`) for
    `value_head_init=normal`. `says`: attributes of an exported critic's config. The head
    stays float32 in every dtype.
    """
    config = load_model_config(model)
    path, described = _where_head_is(model, config)
    _agreed_head(path, described, head).write(config)
    for name, value in (says or {}).items():
        setattr(config, name, value)
    if reads_later_tokens(config) and (head is None or head.output != "label"):
        raise UserError(
            f"tokens of '{model.path}' ({config.model_type}) read later ones, and a value must not depend on them: set "
            "critic.model.path to a causal language model"
        )
    register_classifier(AutoModelForTokenClassification, config, model.path)
    head_keys = {f"{name}.{part}" for name in HEAD_NAMES for part in ("weight", "bias")}
    hf, info = _from_pretrained(
        AutoModelForTokenClassification, model, config, dtype, optional=lambda _, key: key in head_keys
    )
    value = ValueModel(hf, packed=model.use_remove_padding, shared=model.share_prefixes)
    _fill_head(value.head, info["missing_keys"], model.value_head_init, config, seed)
    _prepare(hf, model, seed, frozen_vision=frozen_vision)
    return value


def load_sequence_classifier(
    model: BackboneConfig, *, dtype: torch.dtype = torch.float32, new_head_seed: int | None = None
) -> Any:
    """The *ForSequenceClassification model at `model.path` on the CPU in `dtype`.

    new_head_seed: give a checkpoint without a classification head one of one label, drawn from this seed as the
    architecture does it; None: a UserError.
    """
    config = load_model_config(model)
    has_head = (config.architectures or ["?"])[0].endswith("ForSequenceClassification")
    if new_head_seed is not None:
        if has_head and config.num_labels != 1:
            raise UserError(f"'{model.path}' classifies into {config.num_labels} labels; a reward model has 1")
        config.num_labels = 1
    new_head = new_head_seed is not None and not has_head
    if has_head or new_head:
        register_classifier(AutoModelForSequenceClassification, config, model.path)

    def of_the_head(hf: Any, key: str) -> bool:
        return new_head and not key.startswith(f"{hf.base_model_prefix}.")

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(new_head_seed or 0)
        hf, _ = _from_pretrained(AutoModelForSequenceClassification, model, config, dtype, optional=of_the_head)
    _prepare(hf, model, new_head_seed or 0)
    return hf


def _agreed_head(path: str, config: Any, wanted: ValueHead | None) -> ValueHead:
    """The head to load. A checkpoint with a head that says nothing of itself may have any head of one output."""
    has_head, saved = _has_head(config), ValueHead.of(config)
    by_label = wanted is not None and wanted.output == "label"
    if has_head and saved is None and not by_label and (config.num_labels != 1 or (wanted and wanted.size != 1)):
        needed = f"outputs for {wanted}" if wanted is not None and wanted.size != 1 else "exactly 1"
        raise UserError(f"'{path}' classifies into {config.num_labels} labels; this critic needs {needed}")
    if has_head and None not in (saved, wanted) and saved != wanted:
        raise UserError(
            f"the head of the critic '{path}' gives {saved}, and this run trains one that gives {wanted}: set "
            "critic.value_loss and critic.value_loss_kwargs to those it was trained with"
        )
    return wanted or (saved if has_head else None) or ValueHead()


def _has_head(config: Any) -> bool:
    return (config.architectures or ["?"])[0].endswith(("ForTokenClassification", "ForSequenceClassification"))


def _where_head_is(model: CriticModelConfig, config: Any) -> tuple[str, Any]:
    """The directory that the head comes from, and its config: that of a critic's adapter, or the model's own."""
    adapter = model.lora_adapter_path
    if model.lora_rank and adapter is not None and (Path(adapter) / "config.json").is_file():
        with _as_user_errors(adapter, "adapter"):
            saved = AutoConfig.from_pretrained(adapter)
        if (saved.architectures or ["?"])[0].endswith("ForTokenClassification"):
            return adapter, saved
    return model.path, config


def _fill_head(head: nn.Linear, missing: set[str], init: str, config: Any, seed: int) -> None:
    """Set what the checkpoint lacked; a reward model's head, which has no bias, keeps its weight."""
    with torch.no_grad():
        if any(key.endswith(".bias") for key in missing) and head.bias is not None:
            head.bias.zero_()
        if not any(key.endswith(".weight") for key in missing):
            return
        if init == "zero":
            head.weight.zero_()
        else:
            std = float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)
            generator = torch.Generator().manual_seed(seed)
            head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * std)


def _resolve(path: str) -> str:
    """A local directory (~ expanded), or a hub name as it is. UserError for what is neither."""
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    if local.exists():
        raise UserError(f"'{path}' is a file; a model path is a directory with a config.json, or a hub name")
    if path.startswith(("/", "~", ".")) or path.count("/") > 1:
        raise UserError(f"there is no model directory '{path}'")
    hub_answers()
    return path


def import_model_code(model: BackboneConfig) -> None:
    """Import `external_lib`, and make importable what came with the model, if that is trusted. UserError: it cannot."""
    if model.external_lib:
        for name in model.external_lib.split(","):
            try:
                importlib.import_module(name.strip())
            except ImportError as error:
                raise UserError(f"model.external_lib '{name.strip()}' cannot be imported: {error}") from error
    if model.trust_remote_code:
        init_hf_modules()  # what another process of this node has fetched can be imported


def load_model_config(model: BackboneConfig) -> Any:
    """The Hugging Face config at `model.path`, `override_config` applied. UserError when there is none."""
    import_model_code(model)
    source = _resolve(model.path)
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise UserError(str(instead_of_model(model.path)))
    overrides = dict(model.override_config)
    overrides.update(overrides.pop("model_config", None) or {})
    overrides.pop("attn_implementation", None)
    with _as_user_errors(model.path, "model"), quiet_transformers():
        config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    return override(config, overrides, "model.override_config")


def _from_pretrained(
    auto: Any,
    model: BackboneConfig,
    config: Any,
    dtype: torch.dtype,
    *,
    optional: Callable[[Any, str], bool] = lambda hf, key: False,
) -> tuple[Any, dict[str, Any]]:
    """A model and transformers' report of what was missing. UserError: a weight is missing that is not `optional`."""
    read_as_floats(config, model.path)
    with _as_user_errors(model.path, "model", _with_overrides(model)), quiet_transformers():
        hf, info = auto.from_pretrained(
            _resolve(model.path),
            config=config,
            dtype=dtype,
            attn_implementation=model.override_config.get("attn_implementation"),  # None: sdpa where the class has it
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    if missing := {key for key in info["missing_keys"] if not optional(hf, key)}:
        promise = f"config.json{_with_overrides(model)} promises"
        raise UserError(f"the checkpoint '{model.path}' lacks weights that its {promise}: {_some(missing)}")
    if integers := whole_numbers(_resolve(model.path)) & {name for name, _ in hf.named_parameters()}:
        raise UserError(
            f"weights in '{model.path}' are whole numbers, and nothing says how to read them: {_some(integers)}"
        )
    if broken := {name for name, p in hf.named_parameters() if not (p.is_meta or p.isfinite().all())}:
        raise UserError(f"weights in '{model.path}' are not finite: {_some(broken)}")
    save_as_floats(hf)
    widen(hf, dtype)
    return hf, info


def _prepare(hf: Any, model: BackboneConfig, seed: int, *, frozen_vision: bool = False) -> None:
    """Adapters and gradient checkpointing, as `model` asks for them, and what is not trained."""
    add_adapters(hf, model, base=_resolve(model.path), seed=seed)
    if frozen_vision:
        freeze_vision_tower(hf)
    if not model.enable_gradient_checkpointing:
        return
    try:
        checkpoint_layers(hf)
    except ValueError as error:
        raise UserError(
            f"{type(hf).__name__} has no gradient checkpointing: set model.enable_gradient_checkpointing=false"
        ) from error


def _with_overrides(model: BackboneConfig) -> str:
    return f" with model.override_config={model.override_config}" if model.override_config else ""


def _some(keys: set[str]) -> str:
    return ", ".join(sorted(keys)[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


@contextmanager
def _as_user_errors(path: str, what: str, more: str = "") -> Iterator[None]:
    """One clear line, which ends with `more`, in place of exceptions about files, architectures and the network."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "SafetensorError":
            raise UserError(f"the weight files in '{path}' are damaged: {error}") from error
        raise UserError(_explain(path, what, str(error)) + more) from error


def _explain(path: str, what: str, text: str) -> str:
    first = " ".join(text.split())[:200] or "no reason given"
    untokenized = (folder := Path(path).expanduser()).is_dir() and not any(folder.glob("*token*.*"))
    if (untokenized or "no file named" in text) and (line := instead_of_model(path)):
        return line
    if untokenized and what == "tokenizer":
        return f"'{path}' holds no tokenizer: put its files there or set tokenizer_path"
    if "couldn't connect" in text or "offline mode" in text:
        return out_of_reach(path)
    if "not a valid model identifier" in text or "Repo id must" in text:
        return f"'{path}' is neither a local directory nor a {what} on the Hugging Face hub"
    if "contains custom code" in text:
        return f"the {what} at '{path}' has code of its own: read its .py files, then set model.trust_remote_code=true"
    if "does not recognize this architecture" in text or "Unrecognized" in text:
        return f"transformers {transformers.__version__} cannot build the {what} at '{path}': {first}"
    if "ignore_mismatched_sizes" in text:
        return f"the weights in '{path}' have other sizes than its config.json says"
    if "no file named" in text:
        return f"'{path}' has a config.json but no weights: {first}"
    return f"the {what} at '{path}' cannot be loaded: {first}"
