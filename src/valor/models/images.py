"""How models read images: features of the vision tower in place of the embeddings of image tokens.

Shapes: b rows, L positions, F features of all images of the rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from valor.data.images import CONTENT, image_files
from valor.errors import UserError

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3", "smolvlm", "internvl")
"""Model types whose text decoder sees of an image features, positions, and of `IN_BLOCKS` where images are."""

IN_BLOCKS = ("gemma3",)
"""Those whose image tokens attend to later ones of their image, which packed rows do not have."""


@dataclass(frozen=True)
class ImageInputs:
    """Arguments of calls of the vision tower, and which of its features go where in the embeddings [b * L, H]."""

    pixels: Sequence[Mapping[str, Tensor]]
    places: Tensor  # [n] int64
    features: Tensor  # [n] int64, of F

    def to(self, device: torch.device) -> ImageInputs:
        pixels = [{name: x.to(device) for name, x in call.items()} for call in self.pixels]
        return ImageInputs(pixels, self.places.to(device), self.features.to(device))

    def read_by(self, model: Any, ids: Tensor, **options: Any) -> Any:
        """The output of a transformers model, or its base, on `ids` [b, L] with these images."""
        embeddings = model.get_input_embeddings()(ids)
        outputs = [model.get_image_features(**call, return_dict=True) for call in self.pixels]
        features = self._placed([output.pooler_output for output in outputs])
        flat = embeddings.flatten(0, 1).index_copy(0, self.places, features.to(embeddings.dtype))
        if model.config.model_type in IN_BLOCKS:
            options["token_type_ids"] = _at(ids, self.places).int()
        later = zip(*(getattr(output, "deepstack_features", ()) for output in outputs), strict=True)
        with _adding(model, ids, self.places, [self._placed(layer) for layer in later]):
            return model(inputs_embeds=flat.view_as(embeddings), **options)

    def _placed(self, outputs: Sequence[Any]) -> Tensor:
        """[n, H] of what each call gave: features [..., H], or a list of such by image."""
        parts = [x for output in outputs for x in ([output] if isinstance(output, Tensor) else output)]
        return torch.cat([x.flatten(0, -2) for x in parts]).index_select(0, self.features)


def _at(ids: Tensor, places: Tensor) -> Tensor:
    """[b, L], true at these places [n] of ids [b, L]."""
    return torch.zeros_like(ids, dtype=torch.bool).flatten().index_fill(0, places, True).view_as(ids)


@contextmanager
def _adding(model: Any, ids: Tensor, places: Tensor, layers: Sequence[Tensor]) -> Iterator[None]:
    """The text decoder adds features [n, H] at these places behind its first layers inside (Qwen3-VL's DeepStack). The
    model around it would make them itself, and takes none."""
    if not layers:
        yield
        return
    features = {"visual_pos_masks": _at(ids, places), "deepstack_visual_embeds": layers}
    decoder = model.base_model.language_model
    hook = decoder.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | features), with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class RowImages:
    """The images of rows of ids [b, L]; on the CPU.

    pixels: what each call of the vision tower reads, equal images once. source: [b, L] int64, the number of the feature
    at a position, -1 at text. positions: [3, b, L] int64 of a model whose positions are threefold (M-RoPE), else None.
    """

    pixels: Sequence[Mapping[str, Tensor]]
    source: Tensor
    positions: Tensor | None

    @staticmethod
    def of(hf: Any, ids: Tensor, images: Sequence[str]) -> RowImages | None:
        """Read for `hf` from the files that the rows name (`valor.data.images.IMAGES`); None where no row has any."""
        files = [file for row in images for file, _ in image_files(row)]
        distinct = [*dict.fromkeys(files)]
        if not distinct:
            return None
        source, read = image_sources(hf, ids, images), [_tensors(file) for file in distinct]
        positions = None
        if hasattr(hf.base_model, "get_rope_index"):
            by_file = dict(zip(distinct, read, strict=True))
            grids = torch.cat([by_file[file]["image_grid_thw"] for file in files])
            positions, _ = hf.base_model.get_rope_index(ids, (source >= 0).int(), image_grid_thw=grids)
        return RowImages(_joined(read), source, positions)

    def inputs(self, source: Tensor | None = None) -> ImageInputs:
        """For rows laid out as `source`, by default as these are."""
        flat = (self.source if source is None else source).flatten()
        places = (flat >= 0).nonzero()[:, 0]
        return ImageInputs(self.pixels, places, flat[places])


def image_sources(hf: Any, ids: Tensor, images: Sequence[str]) -> Tensor:
    """[b, L] of rows of ids [b, L]: the number of the feature at each position, counted over the distinct files, or -1.

    An image's tokens are the first ones from its position on; the policy may sample others, which stand for nothing.
    """
    source, starts, total = torch.full_like(ids, -1), dict[str, int](), 0
    references = ((row, *part) for row, named in enumerate(images) for part in image_files(named))
    for row, file, start in references:
        count = int(Path(file).stem.rpartition("-")[2])
        if file not in starts:
            starts[file], total = total, total + count
        places = start + (ids[row, start:] == hf.config.image_token_id).nonzero()[:count, 0]
        if len(places) < count:
            raise ValueError(f"a row has {len(places)} image tokens from {start} on, and its image has {count}")
        source[row, places] = torch.arange(starts[file], starts[file] + count, device=ids.device)
    return source


def _joined(read: Sequence[Mapping[str, Tensor]]) -> Sequence[Mapping[str, Tensor]]:
    """What is read of several files by one call, if its shapes allow that: a list of images or patches [n, ...], or
    lists of the images of a row [1, n, ...]."""
    dim = int(read[0]["pixel_values"].ndim == 5)
    shapes = {tuple((*x.shape[:dim], *x.shape[dim + 1 :]) for x in tensors.values()) for tensors in read}
    if len(shapes) > 1:
        return read
    return [{name: torch.cat([tensors[name] for tensors in read], dim) for name in read[0]}]


@lru_cache(maxsize=8)
def _tensors(file: str) -> dict[str, Tensor]:
    try:
        return {name: x for name, x in load_file(file).items() if name != CONTENT}
    except OSError as error:
        raise UserError(
            f"the images of a prompt cannot be read ({error}): data.image_cache must be a folder that all processes "
            "share, and is not to be emptied during a run"
        ) from error


def policy_class(config: Any) -> Any:
    """The Auto class of transformers for a policy with this config: one that reads images where no other knows it."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def vision_tower(hf: Any) -> nn.Module | None:
    """The part of a transformers model that reads images, if there is one."""
    tower = hf.get_encoder(modality="image") if isinstance(hf, PreTrainedModel) else hf
    return None if tower is hf or tower is hf.base_model else tower


def freeze_vision_tower(hf: Any) -> None:
    """Leave the vision tower as it is, where the model has one."""
    if (tower := vision_tower(hf)) is not None:
        tower.requires_grad_(False)
