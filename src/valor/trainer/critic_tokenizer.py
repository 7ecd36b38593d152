"""A critic reads the policy's token ids: does it know them by the same numbers? Asked before weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from valor.config import PPOConfig
from valor.errors import UserError
from valor.models.load import load_model_config, load_tokenizer


def check_critic_tokenizer(config: PPOConfig, tokenizer: Any) -> None:
    """UserError: some token of the policy's `tokenizer` is another one, or none, to the model at critic.model.path.

    The critic never sees text, so nothing but the vocabulary matters: other merges or another template are fine.
    """
    model = config.critic.model
    if not config.critic.enable or model.path == config.actor_rollout_ref.model.path:
        return
    size = int(load_model_config(model).get_text_config().vocab_size)
    if size < len(tokenizer):
        raise UserError(
            f"the critic '{model.path}' knows {size} tokens and the policy's tokenizer has {len(tokenizer)}: set "
            "critic.model.path to a model with the policy's tokenizer"
        )
    if Path(model.path).is_dir() and not any(Path(model.path).glob("tokenizer*")):
        return  # weights without a tokenizer: their number of tokens is all that can be compared
    theirs = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).get_vocab()
    other = next((item for item in tokenizer.get_vocab().items() if theirs.get(item[0]) != item[1]), None)
    if other is not None:
        raise UserError(
            f"the critic '{model.path}' has another tokenizer than the policy: {other[0]!r} is token {other[1]} of the "
            f"policy's and {theirs.get(other[0], 'none')} of the critic's: set critic.model.path to a model with the "
            "policy's tokenizer"
        )
