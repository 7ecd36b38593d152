"""The class of a critic or a reward model: transformers' classifier of the family, or one made of its backbone.

transformers has classifiers for about half of its families of causal language models. One made here has the same form
and the same names of weights: transformers' generic classifier over the family's PreTrainedModel. A directory with such
a model holds the class as a file too, so that transformers alone loads it, with `trust_remote_code=True`.
"""

import json
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from valor.errors import UserError
from valor.models.internals import read_weights_as, register_model

# Of each: the form of a class made here, and the config types for which transformers has a class.
_CLASSIFIERS: dict[Any, tuple[Any, Any]] = {
    AutoModelForTokenClassification: (GenericForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    AutoModelForSequenceClassification: (GenericForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
}
_FILE = "modeling_classifier.py"
_SOURCE = '''"""The backbone of {config} with a linear head: a value at each token, or a score of a text."""

from transformers import {config}
from transformers.modeling_layers import {generic}
from {module} import {family}


class {name}({generic}, {family}):
    config_class = {config}
    base_model_prefix = "{prefix}"

    @classmethod
    def is_custom_code(cls):
        return False  # weights are renamed, and buffers filled, as for the family's own classes
'''


def register_classifier(auto: Any, config: Any, path: str) -> None:
    """Make `auto`, AutoModelForTokenClassification or AutoModelForSequenceClassification, know a class for `config`,
    that of the model at `path`. UserError: transformers has no causal language model of this type."""
    kind, (generic, there) = type(config), _CLASSIFIERS[auto]
    if kind in there:
        return
    policies = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    causal: Any = next((mapping[kind] for mapping in policies if kind in mapping), None)
    if causal is None or kind not in MODEL_MAPPING:
        raise UserError(
            f"transformers itself has no causal language model of type '{config.model_type}', so '{path}' can be "
            "neither a critic nor a reward model: give a model of another family"
        )
    family = _family(causal)
    # Renames weights and fills buffers as for the family's own classes.
    parts: dict[str, Any] = {"is_custom_code": classmethod(lambda cls: False), "__module__": __name__}
    parts |= {"base_model_prefix": family.base_model_prefix or "model", "config_class": kind}
    name = family.__name__.removesuffix("PreTrainedModel") + generic.__name__.removeprefix("Generic")
    register_model(auto, kind, type(name, (generic, family), parts))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        read_weights_as(name, causal.__name__)


def is_made(hf: PreTrainedModel) -> bool:
    """Whether transformers has no such class."""
    return any(c.__module__ == __name__ for c in type(hf).__mro__)


def write_class(hf: PreTrainedModel, path: Path | str) -> None:
    """Write the class of `hf` into the directory `path` that holds the model, if transformers has no such class."""
    made: Any = next((c for c in type(hf).__mro__ if c.__module__ == __name__), None)
    if made is None:
        return
    family = _family(made)
    auto, generic = next((auto, form) for auto, (form, _) in _CLASSIFIERS.items() if form in made.__mro__)
    names = {"config": made.config_class.__name__, "module": family.__module__, "family": family.__name__}
    source = _SOURCE.format(**names, generic=generic.__name__, name=made.__name__, prefix=made.base_model_prefix)
    (Path(path) / _FILE).write_text(source, encoding="utf-8")
    file = Path(path) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["auto_map"] = {auto.__name__: f"{Path(_FILE).stem}.{made.__name__}"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _family(model: type) -> type[PreTrainedModel]:
    """The class that all models of the family derive from."""
    return next(c for c in model.__mro__ if PreTrainedModel in c.__bases__)
