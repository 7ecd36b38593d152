"""How many tokens a model reads."""

from collections.abc import Mapping
from typing import Any


def num_positions(text_config: Any) -> int | None:
    """The longest row that a model of transformers can be given; None where its config sets no limit."""
    limits = (getattr(text_config, "max_position_embeddings", None), rope_limit(text_config))
    return min((limit for limit in limits if limit is not None), default=None)


def rope_limit(text_config: Any) -> int | None:
    """Up to which length rotary frequencies are constant; None where they always are.

    Those of the types `longrope` and `dynamic` follow the longest row of a batch: beyond the length that the model was
    first trained with a row's numbers would depend on its neighbours, and cached keys on how long their row becomes.
    """
    ropes = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    limits = []
    for rope in [rope for rope in ropes.values() if isinstance(rope, Mapping)] or [ropes]:  # by type of layer
        kind = str(rope.get("rope_type") or rope.get("type"))
        if kind in ("longrope", "su") or "dynamic" in kind:
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text_config, "original_max_position_embeddings", None)
            limits.append(original or text_config.max_position_embeddings)
    return min(limits, default=None)
