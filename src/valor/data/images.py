"""Images of prompts: found, checked, and made once into what the model reads, in files that rows name.

A row's images are a list, or one: bytes of an image file, a path (from the folder of the data file), a data URI, or a
dictionary with `bytes` or `path` (`image` in its place), as parquet files of the Hugging Face hub have them. PIL images
come from dataset classes. Each has one `<image>` in the row's messages, and is read as people see it: turned as its
EXIF data says, on white where it is transparent.
"""

import base64
import hashlib
import io
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import safe_open

from valor.data.messages import Messages, kind_of
from valor.errors import UserError, did_you_mean

IMAGES = "images"
"""The column of batches with the files of each row's images (`image_files`); empty text: the row has none."""

COLUMNS = {"images": None, "image": None}.keys()
"""The usual names of the columns of images in files."""
PLACEHOLDER = "<image>"
_FACT, _SHOWN, _SIDE = "shown", 4, 128  # in the head of a file: so many of its images, each of so many pixels at most
_IDS, _MARK = "ids", "mark"  # in the head of a file with one image: the tokens that stand for it, and those of the mark
# that the chat template writes for it
CONTENT = "content"
"""The image itself, in such a file: the bytes of an image file."""
_READING = 2  # of how images are read, a part of their files' names
_ORIENTATION = 0x112  # EXIF
_TURNS: dict[Any, Any] = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # what it says, and PIL.Image.Transpose
_URI = "data:image/jpeg;base64,"
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # of `size`, for processors that count pixels
_OF_THE_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")

_READS_TEXT = "this command reads text, leave the row out"
_KEYS = {"bytes": None, "path": None, "image": None}.keys()  # in their order

Source = bytes | Path
"""An image file, or what is in one."""


def parse_images(value: Any, where: str) -> tuple[Source, ...]:
    """A record's images. UserError: a value is no image, or its file does not exist. `where` begins with the data
    file, from whose folder paths count."""
    if value is None:
        return ()
    values = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    folder = Path(where.rpartition(",")[0]).parent
    return tuple(_source(value, folder, f"{where}, image {i}") for i, value in enumerate(values))


def _source(value: Any, folder: Path, where: str) -> Source:
    if isinstance(value, Mapping):
        if more := sorted(key for key in value.keys() - _KEYS if value[key] is not None):
            raise UserError(
                f"{where}: '{more[0]}' of a single image is not read: drop it, and set data.mm_processor_kwargs for all"
            )
        value = next((value[key] for key in _KEYS if value.get(key) is not None), value)
    if isinstance(value, str):
        return _from_text(value, folder, where)
    if hasattr(value, "save") and hasattr(value, "mode"):  # a PIL image
        return _png(_picture(value, where))
    if not isinstance(value, bytes | bytearray):
        raise UserError(f"{where}: must be bytes, a path, or a dictionary with one of them, got {kind_of(value)}")
    return bytes(value)


def _from_text(text: str, folder: Path, where: str) -> Source:
    """The image of a data URI, or a path."""
    try:
        if text.startswith("data:"):
            return base64.b64decode(text.partition(",")[2], validate=True)
        path = folder / Path(text.removeprefix("file://")).expanduser()
        if path.is_file():
            return path
    except (OSError, ValueError, RuntimeError):  # too long for a name, bytes that no name has, no such user
        pass
    raise UserError(
        f"{where}: there is no file '{text[:200]}': correct the path (base64 is read behind data:image/png;base64, and "
        "what has an address on the web has to be saved first), or leave the row out"
    )


def refuse_unread(columns: Collection[str], prompt: Any, where: str, advice: str = _READS_TEXT) -> None:
    """UserError: a prompt has the place of an image, from a column of these that a reader of text leaves out. `advice`
    may have {column}."""
    column = next((name for name in COLUMNS if name in columns), None)
    if column and any(place in str(prompt) for place in (PLACEHOLDER, "'type': 'image'")):
        advice = advice.format(column=column)
        raise UserError(f"{where}: an image is to stand in the text, and its column '{column}' is not read: {advice}")


def in_parts(messages: Messages, count: int, where: str) -> list[dict[str, Any]]:
    """Messages with lists of parts as content, a part {"type": "image"} for each `<image>`. UserError: there are not
    `count` of these."""
    places = sum(message["content"].count(PLACEHOLDER) for message in messages)
    if places != count:
        raise UserError(
            f"{where}: the messages have {places} {PLACEHOLDER} and the row has {count} images: write one for each"
        )
    return [with_parts(message, PLACEHOLDER) for message in messages]


def with_parts(message: Mapping[str, Any], placeholder: str | None = None) -> dict[str, Any]:
    """A message whose content is text as one with a list of parts."""
    if not isinstance(message["content"], str):
        return dict(message)
    content: list[dict[str, str]] = []
    for number, piece in enumerate(message["content"].split(placeholder) if placeholder else [message["content"]]):
        content += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return {**message, "content": content}


class ImageFiles:
    """Makes what a model reads of a prompt's images, and writes it to `folder`, by its content: equal images lie there
    once, and are found by later runs.

    processor: transformers' of the model. token: the id at which the model reads a feature of an image. options:
    keyword arguments of the processor, such as min_pixels. apart: a prompt has a file for each image, so that
    further ones may follow. UserError: it has no option of that name.
    """

    def __init__(
        self, processor: Any, token: int, folder: str, options: Mapping[str, Any], *, apart: bool = False
    ) -> None:
        images = processor.image_processor
        self.processor, self._token, self._folder, self._apart = processor, token, Path(folder), apart
        self._options = _with_size(options, images)
        names = images.valid_kwargs.__annotations__
        if unknown := next((name for name in options if name not in names), None):
            listed = ", ".join(sorted(names))
            raise UserError(
                f"data.mm_processor_kwargs.{unknown}: {type(images).__name__} has no such option"
                f"{did_you_mean(unknown, names) or f' (it has {listed})'}"
            )
        facts = [_READING, type(images).__name__, images.to_dict(), self._options]
        self._facts = json.dumps(facts, sort_keys=True, default=str).encode()

    def encode(self, text: str, images: Sequence[Source], where: str) -> tuple[list[int], str]:
        """Token ids of a rendered prompt, and the files of its images (`image_files`).

        UserError: an image cannot be read, or the processor refuses it.
        """
        token = self.processor.image_token
        if text.count(token) != len(images):
            raise UserError(
                f"{where}: the rendered prompt has {text.count(token)} {token} for {len(images)} images: texts may not "
                "have that token, and the chat template has to write it (actor_rollout_ref.model.custom_chat_template)"
            )
        if not self._apart:
            return self._encode(text, images, where)
        tokenizer = self.processor.tokenizer
        first, *others = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in text.split(token))
        files = [self.file_of(image, f"{where}, image {i}") for i, image in enumerate(images)]
        return with_images(first, zip(files, others, strict=True))

    def file_of(self, image: Source, where: str) -> str:
        """The file of one image, which has its tokens too (`image_ids`). UserError: as `encode`."""
        return self._encode(self.processor.image_token, [image], where)[1]

    def _encode(self, text: str, images: Sequence[Source], where: str) -> tuple[list[int], str]:
        """Ids, and a file named <digest>-<number of its tokens>."""
        contents = [image.read_bytes() if isinstance(image, Path) else image for image in images]
        pictures = [_picture(content, f"{where}, image {i}") for i, content in enumerate(contents)]
        try:
            options = {"add_special_tokens": False, "return_tensors": "pt", **self._options}
            encoded = dict(self.processor(text=[text], images=pictures or None, **options))
        except Exception as error:  # processors raise whatever they like
            raise UserError(f"{where}: the model's processor refuses the images: {error}") from error
        ids = encoded["input_ids"][0].tolist()
        if not images:
            return ids, ""
        head = dict[str, str]()
        if text == self.processor.image_token:
            mark = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            head = {_IDS: json.dumps(ids), _MARK: json.dumps(mark)}
        digest = hashlib.sha256(self._facts + "".join(head.values()).encode())
        for content in contents:
            digest.update(hashlib.sha256(content).digest())
        path = self._folder / f"{digest.hexdigest()}-{ids.count(self._token)}.safetensors"
        if not path.is_file():
            tensors = {name: x for name, x in encoded.items() if name not in _OF_THE_TEXT}
            tensors |= {CONTENT: _as_tensor(_same_elsewhere(contents[0], pictures[0]))} if head else {}
            self._write(path, tensors, {_FACT: _small(pictures[:_SHOWN]), **head}, where)
        return ids, str(path)

    def _write(self, path: Path, tensors: Mapping[str, Any], head: dict[str, str], where: str) -> None:
        from safetensors.torch import save_file

        part = path.with_suffix(f".{os.getpid()}.partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({name: x.contiguous() for name, x in tensors.items()}, part, head)
            os.replace(part, path)
        except OSError as error:
            raise UserError(f"{where}: its images cannot be written to data.image_cache ({error})") from error


def _with_size(options: Mapping[str, Any], images: Any) -> dict[str, Any]:
    """With `min_pixels` and `max_pixels` as `size`, where the image processor has them there: transformers 5.17 reads
    them nowhere else in a call, and later ones deprecate them."""
    bounds = {edge: options[name] for name, edge in _EDGES.items() if options.get(name) is not None}
    size = dict(getattr(images, "size", None) or {})
    if not bounds or not bounds.keys() <= size.keys() or options.get("size") is not None:
        return dict(options)
    return {**{name: x for name, x in options.items() if name not in _EDGES}, "size": size | bounds}


def image_files(images: str) -> list[tuple[str, int]]:
    """What a row's text in the column `IMAGES` says: files, and the positions in the row from which on each one's
    image tokens are. A line for each file, with its position behind a tab, if that is not 0."""
    lines = (line.partition("\t") for line in images.splitlines())
    return [(file, int(start or 0)) for file, _, start in lines]


def with_images(ids: Sequence[int], parts: Iterable[tuple[str, Sequence[int]]]) -> tuple[list[int], str]:
    """Token ids of a text with images, and their files, from the ids of what stands before the first one, and the file
    of each with the ids of what follows it."""
    ids, lines = [*ids], list[str]()
    for file, following in parts:
        lines.append(f"{file}\t{len(ids)}")
        ids += [*image_ids(file), *following]
    return ids, "\n".join(lines)


@lru_cache(maxsize=256)
def image_ids(file: str) -> list[int]:
    """The tokens that stand for the image of a file by `ImageFiles.file_of`."""
    return json.loads(_head(file)[_IDS])


def with_marks(ids: Sequence[int], images: str) -> tuple[list[int], list[str]]:
    """The token ids of a row [L] with the chat template's mark in place of each image's tokens, and the images as data
    URIs, for an engine that reads images itself."""
    row, done, uris = list[int](), 0, list[str]()
    for file, start in image_files(images):
        row += [*ids[done:start], *json.loads(_head(file)[_MARK])]
        done = start + len(image_ids(file))
        uris.append(_content(file))
    return [*row, *ids[done:]], uris


@lru_cache(maxsize=64)
def _content(file: str) -> str:
    with safe_open(file, "pt") as tensors:
        content = tensors.get_tensor(CONTENT).numpy().tobytes()
    return "data:image/*;base64," + base64.b64encode(content).decode()


def opened(uri: str) -> Any:
    """The picture of a data URI by `with_marks`."""
    return _picture(base64.b64decode(uri.partition(",")[2]), "an image of a prompt")


def _as_tensor(content: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _head(file: str) -> dict[str, str]:
    with safe_open(file, "pt") as tensors:
        return tensors.metadata() or {}


def shown_images(images: str) -> str | None:
    """A small picture of a row's first images side by side, from their files, as a data URI; None: it has none."""
    from PIL import Image

    files = [file for file, _ in image_files(images)[:_SHOWN] if Path(file).is_file()]
    shown = [head[_FACT].partition(",")[2] for head in map(_head, files) if _FACT in head]
    if len(shown) < 2:
        return _URI + shown[0] if shown else None
    return _small([Image.open(io.BytesIO(base64.b64decode(picture))) for picture in shown])


def _small(pictures: Sequence[Any]) -> str:
    """The data URI of a JPEG: pictures [RGB] side by side, each at most _SIDE pixels wide and high."""
    from PIL import Image

    shown = [picture.copy() for picture in pictures]
    for picture in shown:
        picture.thumbnail((_SIDE, _SIDE))
    sheet = Image.new("RGB", (sum(p.width for p in shown), max(p.height for p in shown)), "white")
    for i, picture in enumerate(shown):
        sheet.paste(picture, (sum(p.width for p in shown[:i]), 0))
    stream = io.BytesIO()
    sheet.save(stream, "JPEG")
    return _URI + base64.b64encode(stream.getvalue()).decode()


def _picture(image: Any, where: str) -> Any:
    """RGB, as people see it, of the bytes of an image file or a PIL image."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image
        # ImageOps.exif_transpose also writes the EXIF data again, which ends with struct.error for some cameras' data.
        if (turn := _TURNS.get(picture.getexif().get(_ORIENTATION))) is not None:
            picture = picture.transpose(turn)
        if picture.mode.startswith("I;16"):  # which Pillow cuts at 255
            picture = picture.convert("I").point(lambda grey: grey * (1 / 257)).convert("L")
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{where}: is no image that can be read ({error}): repair it, or leave the row out") from None


def _png(picture: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def _same_elsewhere(content: bytes, picture: Any) -> bytes:
    """An image file that other programs read as `picture` too: they do not agree on what is transparent or turned."""
    from PIL import Image

    file = Image.open(io.BytesIO(content))
    plain = file.mode in ("RGB", "L") and not file.has_transparency_data
    return content if plain and file.getexif().get(_ORIENTATION, 1) == 1 else _png(picture)
