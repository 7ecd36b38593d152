"""Images of prompts: what is accepted and refused, and the files that rows name."""

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tiny_vision import IMAGE, make_model, picture
from valor.collector.inputs import load_images
from valor.config import DataConfig
from valor.data.files import read_rows
from valor.data.images import CONTENT, ImageFiles, _picture, in_parts, parse_images, shown_images
from valor.data.prompts import PromptDataset
from valor.errors import UserError
from valor.models.internals import processor_without_video
from valor.models.load import load_tokenizer


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoConfig

    path = make_model(tmp_path_factory.mktemp("vision") / "model")
    made = processor_without_video(AutoConfig.from_pretrained(path)).from_pretrained(path)
    made.tokenizer = load_tokenizer(str(path))
    return made


def row(content: str, images: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": content}],
        "images": images,
        "data_source": "digits",
        "reward_model": {"style": "rule", "ground_truth": "1"},
    }


def dataset(tmp_path: Path, processor: Any, rows: list[dict[str, Any]], **options: Any) -> PromptDataset:
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    settings = {"train_files": [str(tmp_path / "rows.parquet")], "image_key": "images", "shuffle": False, **options}
    data = DataConfig(image_cache=str(tmp_path / "cache"), seed=0, **settings)
    images = ImageFiles(processor, IMAGE, data.image_cache, data.mm_processor_kwargs)
    return PromptDataset(data, processor.tokenizer, "train", images=images)


def test_every_form_of_an_image_is_the_same_image(tmp_path: Path) -> None:
    from PIL import Image

    content, where = picture(8, 8, 0), f"{tmp_path / 'rows.parquet'}, row 3"
    (tmp_path / "a.png").write_bytes(content)
    absolute = f"file://{tmp_path / 'a.png'}"
    forms = [content, {"bytes": content, "path": None}, "a.png", {"path": "a.png"}, {"image": absolute}]
    read = parse_images([*forms, Image.open(io.BytesIO(content))], where)
    contents = [image if isinstance(image, bytes) else image.read_bytes() for image in read]
    assert contents[:5] == [content] * 5
    assert Image.open(io.BytesIO(contents[5])).tobytes() == Image.open(io.BytesIO(content)).tobytes()
    assert parse_images(None, where) == () and parse_images("a.png", where) == (tmp_path / "a.png",)


def test_a_placeholder_is_a_part_where_it_stands() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "<image>a<image>"}]
    image, text = {"type": "image"}, {"type": "text", "text": "a"}
    assert [message["content"] for message in in_parts(messages, 2, "row")] == [
        [{"type": "text", "text": "s"}],
        [image, text, image],
    ]


def test_prompts_are_those_of_the_processor_and_equal_images_one_file(tmp_path: Path, processor: Any) -> None:
    from PIL import Image

    one, two = picture(16, 24, 1), picture(24, 16, 2)
    contents = [("<image>what", [one]), ("and <image>", [one]), ("<image> or <image>", [one, two]), ("none", [])]
    rows = dataset(tmp_path, processor, [row(text, [{"bytes": x} for x in images]) for text, images in contents])
    for prompt, (content, images) in zip(rows, contents, strict=True):
        parts = in_parts([{"role": "user", "content": content}], len(images), "row")
        text = processor.tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
        pictures = [Image.open(io.BytesIO(x)) for x in images] or None
        expected = processor(text=[text], images=pictures, return_tensors="pt")
        assert prompt.prompt_ids == expected["input_ids"][0].tolist()
        assert prompt.messages[0]["content"] == content  # as graders read it
        if not images:
            assert prompt.images == ""
            continue
        assert prompt.images is not None and prompt.images.endswith(f"-{prompt.prompt_ids.count(IMAGE)}.safetensors")
        tensors = load_file(prompt.images)
        assert sorted(tensors) == ["image_grid_thw", "pixel_values"]
        assert all((tensors[name] == expected[name]).all() for name in tensors)
    assert rows[0].images == rows[1].images
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()}
    assert len(written) == 2
    again = dataset(tmp_path, processor, [row("<image>", [{"bytes": one}])])
    assert again[0].images == rows[0].images and written == {
        file: file.stat().st_mtime_ns for file in (tmp_path / "cache").iterdir()
    }
    smaller = dataset(tmp_path, processor, [row("<image>", [{"bytes": one}])], mm_processor_kwargs={"max_pixels": 128})
    assert smaller[0].images != rows[0].images and smaller[0].prompt_ids.count(IMAGE) < 6


def test_a_run_on_text_has_no_images(tmp_path: Path, processor: Any) -> None:
    pq.write_table(pa.Table.from_pylist([row("what", [{"bytes": b"no image"}])]), tmp_path / "rows.parquet")
    data = DataConfig(train_files=[str(tmp_path / "rows.parquet")], seed=0)
    prompts = PromptDataset(data, processor.tokenizer)
    assert prompts[0].images is None and len(prompts) == 1


def test_rows_of_json_may_leave_out_the_column_of_images(tmp_path: Path) -> None:
    file, data = tmp_path / "rows.jsonl", DataConfig(image_key="images")
    rows = [{name: value for name, value in row("none", []).items() if name != "images"}, row("<image>", ["a.png"])]
    (tmp_path / "a.png").write_bytes(b"x")
    file.write_text("\n".join(map(json.dumps, rows)))
    assert [len(read.images) for read in read_rows(file, data)] == [0, 1]
    file.write_text(json.dumps(rows[0]))
    with pytest.raises(UserError, match="column 'images' missing"):
        read_rows(file, data)


PARTS = [{"type": "text", "text": "a "}, {"type": "image", "text": None}, {"type": "text", "text": " b"}]


def test_a_part_of_a_message_is_the_place_of_an_image(tmp_path: Path, processor: Any) -> None:
    """As TRL's data sets and OpenAI's protocol have it; parquet files give each part the keys of all."""
    by_parts, by_text = (dataset(tmp_path, processor, [row(x, [picture(8, 8, 0)])])[0] for x in (PARTS, "a <image> b"))
    assert by_parts.prompt_ids == by_text.prompt_ids and by_parts.images == by_text.images
    with pytest.raises(
        UserError, match=r'image is \{"type": "image"\} here, and stands in the column that data.image_key'
    ):
        dataset(tmp_path, processor, [row([{"type": "image", "image": "a.png"}], [picture(8, 8, 0)])])


@pytest.mark.parametrize("content", ["<image>what", PARTS])
@pytest.mark.parametrize("name", ["images", "image"])
def test_images_that_a_reader_of_text_would_leave_out_are_told(tmp_path: Path, content: Any, name: str) -> None:
    prompt = [{"role": "user", "content": content}]
    rows = [{"prompt": prompt, name: [{"bytes": b"x"}], "answer": "1"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=f"column '{name}' is not read: set data.image_key={name}, or leave the column"):
        read_rows(tmp_path / "rows.parquet")
    pq.write_table(
        pa.Table.from_pylist([{**rows[0], "prompt": [{"role": "user", "content": "what"}]}]), tmp_path / "a.parquet"
    )
    assert len(read_rows(tmp_path / "a.parquet")) == 1


@pytest.mark.parametrize(
    ("content", "images", "options", "message"),
    [
        ("<image>", ["gone.png"], {}, "row 0, image 0: there is no file '.*gone.png'"),
        ("<image>", [{"bytes": b"no image"}], {}, "row 0, image 0: is no image that can be read"),
        ("<image>", [{"bytes": picture(16, 16, 0)[:-40]}], {}, "row 0, image 0: is no image that can be read"),
        ("<image><image>", [{"bytes": picture(8, 8, 0)}], {}, "the messages have 2 <image> and the row has 1 images"),
        ("what", [{"bytes": picture(8, 8, 0)}], {}, "the messages have 0 <image> and the row has 1 images"),
        ("<image>", [{"path": "a.png", "max_pixels": 9}], {}, "image 0: 'max_pixels' of a single image is not read"),
        ("<image>", [3], {}, "image 0: must be bytes, a path, or a dictionary with one of them, got int"),
        ("<image>", [{"bytes": picture(900, 4, 0)}], {}, "the model's processor refuses the images: absolute aspect"),
        ("<image>", [{"bytes": picture(8, 8, 0)}], {"truncation": "left", "max_prompt_length": 9}, "without images"),
        ("<image>", [{"bytes": picture(8, 8, 0)}], {"image_key": "pictures"}, "column 'pictures' missing"),
        (
            "<image>",
            [{"bytes": picture(8, 8, 0)}],
            {"mm_processor_kwargs": {"max_pixel": 9}},
            "did you mean max_pixels",
        ),
    ],
)
def test_what_cannot_be_read_is_told(
    tmp_path: Path, processor: Any, content: str, images: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        dataset(tmp_path, processor, [row(content, images)], **options)


def test_a_template_that_shows_no_images_is_told(tmp_path: Path, processor: Any) -> None:
    files = ImageFiles(processor, IMAGE, str(tmp_path / "cache"), {})
    for text in ("what", "<image><image>"):
        with pytest.raises(UserError, match=f"row 3: the rendered prompt has {text.count('<image>')} <image> for 1 im"):
            files.encode(text, [picture(8, 8, 0)], "row 3")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, processor: Any) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written to data\.image_cache"):
        dataset(tmp_path, processor, [row("<image>", [{"bytes": picture(8, 8, 0)}])])


def test_a_small_picture_lies_beside_the_tensors(tmp_path: Path, processor: Any) -> None:
    from PIL import Image

    rows = [row("<image>" * 6, [{"bytes": picture(300, 100, i)} for i in range(6)]), row("none", [])]
    first, second = dataset(tmp_path, processor, rows, max_prompt_length=2000)
    uri = shown_images(first.images or "") or ""
    assert len(uri) < 50_000
    content = base64.b64decode(uri.removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(content)).size == (4 * 128, 43)
    assert second.images == "" and shown_images(second.images) is None


def test_an_image_of_too_many_pixels_is_told(tmp_path: Path, processor: Any, monkeypatch: Any) -> None:
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(UserError, match=r"row 0, image 0: is no image that can be read .*decompression bomb"):
        dataset(tmp_path, processor, [row("<image>", [{"bytes": picture(8, 8, 0)}])])


def test_a_missing_library_is_told(monkeypatch: Any) -> None:
    config: Any = None
    monkeypatch.setattr("valor.collector.inputs.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs Pillow to read images: pip install 'valor-rl\[images\]'"):
        load_images(config, None)


def shown_as(tmp_path: Path, processor: Any, content: bytes) -> tuple[list[float], bytes]:
    """What the model reads of an image, and the file that servers get."""
    made = ImageFiles(processor, IMAGE, str(tmp_path / "cache"), {}, apart=True)
    tensors = load_file(made.file_of(content, "row 0"))
    return tensors["pixel_values"].flatten().tolist(), tensors[CONTENT].numpy().tobytes()


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("tag", [0x11A, 0x128, 0x132])
def test_a_photo_is_turned_whatever_else_its_exif_data_says(tag: int, orientation: int) -> None:
    """A text where a number belongs, as some cameras write it."""
    from PIL import Image, ImageOps

    wide = Image.open(io.BytesIO(picture(24, 16, 0)))
    entries = struct.pack("<HHI4sHHI2H", tag, 2, 3, b"ab", 0x112, 3, 1, orientation, 0)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0" + entries + b"\0\0\0\0"
    alone = Image.Exif()
    alone[0x112] = orientation
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded(wide, "JPEG", exif=alone)))).convert("RGB")
    read = _picture(encoded(wide, "JPEG", exif=exif), "row")
    assert (read.size, read.tobytes()) == (expected.size, expected.tobytes())


def test_images_are_read_as_people_see_them(tmp_path: Path, processor: Any) -> None:
    from PIL import Image

    ink = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    ink.paste((0, 0, 0, 255), (4, 4, 8, 8))
    on_white = Image.new("RGB", (16, 16), "white")
    on_white.paste("black", (4, 4, 8, 8))
    palette = Image.new("P", (16, 16), 0)
    palette.putpalette([0, 0, 0, 0, 0, 0])
    palette.paste(1, (4, 4, 8, 8))
    wide = Image.open(io.BytesIO(picture(24, 16, 0)))
    turned = Image.Exif()
    turned[0x112] = 6
    photo = encoded(wide, "JPEG", exif=turned, quality=95)
    upright = Image.open(io.BytesIO(photo)).convert("RGB").transpose(Image.Transpose.ROTATE_270)
    grey = Image.new("I;16", (16, 16), 0x8080)
    cases = [
        (encoded(ink), on_white),
        (encoded(ink.convert("LA")), on_white),
        (encoded(palette, transparency=0), on_white),
        (photo, upright),
        (encoded(grey), Image.new("RGB", (16, 16), (128, 128, 128))),
    ]
    for content, expected in cases:
        read, sent = shown_as(tmp_path, processor, content)
        assert read == shown_as(tmp_path, processor, encoded(expected))[0]
        assert list(Image.open(io.BytesIO(sent)).convert("RGB").tobytes()) == list(expected.tobytes())
    plain = encoded(wide, "JPEG")
    assert shown_as(tmp_path, processor, plain)[1] == plain


@pytest.mark.parametrize("mode", ["CMYK", "HSV", "I;16", "RGBa", "YCbCr", "1"])
def test_pil_images_of_every_mode_are_read(mode: str) -> None:
    from PIL import Image

    (content,) = parse_images([Image.new(mode, (3, 3))], "rows.parquet, row 0")
    assert isinstance(content, bytes) and Image.open(io.BytesIO(content)).mode == "RGB"


def test_texts_that_are_images_or_none(tmp_path: Path) -> None:
    content, where = picture(8, 8, 0), f"{tmp_path / 'rows.parquet'}, row 3"
    text = base64.b64encode(content * 9).decode()
    assert parse_images([f"data:image/png;base64,{text}"], where) == (content * 9,)
    for wrong in (text, "https://example.com/a.png", f"data:image/png;base64,{text}é", "~nobody-of-this-name/a.png"):
        with pytest.raises(UserError, match=r"row 3, image 0: there is no file .*base64 is read behind data:") as told:
            parse_images([wrong], where)
        assert len(str(told.value)) < 500
