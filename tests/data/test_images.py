"""Images of rows: every form in which a column can hold one, what is refused, and their places in messages."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest
import torch
from PIL import Image as Pillow

from rlhf_suite.config.data import ImageDataConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate, take
from rlhf_suite.data.images import (
    Image,
    collapsed,
    expanded,
    image_file,
    open_image,
    row_images,
    with_places,
)
from rlhf_suite.data.row import LeftOut, Row, RowError
from rlhf_suite.data.text_encoders import cut
from vision import PICTURES, picture

PLACEHOLDER = 9
ROW = Row({}, "rows.jsonl", 3)


class Doubling:
    """A reader for which the first byte of a file says how many tokens it has."""

    placeholder = PLACEHOLDER

    def tokens(self, image: bytes) -> list[int]:
        return [8, *[PLACEHOLDER] * image[0], 8]


FILES = [b"\x01", b"\x03", b"\x02"]


def pixels(data: bytes) -> bytes:
    return open_image(data).tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_every_form_of_an_image_gives_its_file(tmp_path, kind):
    data = picture(kind=kind)
    (tmp_path / "one.img").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [
        data,
        bytearray(data),
        "one.img",
        str(tmp_path / "one.img"),
        text,
        "\n".join(text[n : n + 76] for n in range(0, len(text), 76)),
        f"data:image/{kind.lower()};base64,{text}",
        {"bytes": data, "path": None},
        {"bytes": None, "path": "one.img"},
        {"bytes": data, "path": "somewhere else.png"},
    ]
    assert all(image_file(form, tmp_path) == data for form in forms)
    assert pixels(image_file(Pillow.open(io.BytesIO(data)))) == pixels(data), "an image of Pillow, written again"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing.png", "does not exist"),
        (17, "of type int"),
        ({"file": "x"}, "of type dict"),
        (b"no image at all", "broken, or no image"),
        (picture()[:60], "broken, or no image"),
        (base64.b64encode(b"text " * 60).decode(), "broken, or no image"),
        ("data:image/png;base64,a", "not base64"),
        ("http://127.0.0.1:9/x.png", "data.image_urls_enable=true"),
    ],
)
def test_what_is_no_image_is_refused_with_its_place(tmp_path, value, reason):
    config = ImageDataConfig(image_key="image")
    with pytest.raises(RowError, match=reason) as error:
        row_images(Row({"image": value}, str(tmp_path / "rows.jsonl"), 3), config)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl:3: column 'image'")


def test_a_url_is_fetched_only_where_that_is_asked_for(tmp_path):
    (tmp_path / "x.png").write_bytes(PICTURES[0])
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    with HTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert image_file(f"{url}/x.png", with_urls=True) == PICTURES[0]
        with pytest.raises(ValueError, match="could not be fetched"):
            image_file(f"{url}/y.png", with_urls=True)
        with pytest.raises(ValueError, match=r"data.image_urls_enable"):
            image_file(f"{url}/x.png")
        server.shutdown()


def test_a_row_has_at_most_as_many_images_as_the_flag_allows():
    config = ImageDataConfig(image_key="image", max_images_per_prompt=2)
    assert row_images(Row({"image": PICTURES[:2]}, "r", 1), config) == PICTURES[:2]
    assert row_images(Row({"image": PICTURES[0]}, "r", 1), config) == PICTURES[:1]
    assert row_images(Row({"image": None}, "r", 1), config) == []
    with pytest.raises(RowError, match=r"3 images, and data.max_images_per_prompt=2"):
        row_images(Row({"image": PICTURES[:3]}, "r", 1), config)
    with pytest.raises(RowError, match="no column 'image'"):
        row_images(Row({"images": PICTURES[0]}, "r", 1), config)


IMAGE = {"type": "image"}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(content) -> dict:
    return {"role": "user", "content": content}


def test_images_stand_where_the_messages_say():
    tagged = with_places([user("a <image> b <image>")], 2, ROW)
    assert tagged == [user([words("a "), IMAGE, words(" b "), IMAGE])]
    listed = [user([{"type": "image", "url": "kept out"}, words("what is it?")])]
    assert with_places(listed, 1, ROW) == [user([IMAGE, words("what is it?")])]
    assert with_places([{"role": "system", "content": "s"}, user("x")], 2, ROW)[1] == user([IMAGE, IMAGE, words("x")])
    said = [user("x <image>"), {"role": "assistant", "content": "write <image>"}]
    assert with_places(said, 1, ROW)[1] == said[1], "what the model wrote has no images"
    assert with_places([user("x")], 0, ROW) == [user("x")]


@pytest.mark.parametrize(("text", "count"), [("<image> <image>", 1), ("<image>", 2), ("<image>", 0)])
def test_places_and_images_must_be_equally_many(text, count):
    with pytest.raises(RowError, match=f"places for {text.count('<')} images, and the row has {count}"):
        with_places([user(text)], count, ROW)


def test_a_placeholder_becomes_the_tokens_of_its_image_and_back():
    short = [1, PLACEHOLDER, 2, PLACEHOLDER, PLACEHOLDER, 3]
    ids, images = expanded(short, FILES, Doubling(), offset=100)
    assert ids == [1, 8, 9, 8, 2, 8, 9, 9, 9, 8, 8, 9, 9, 8, 3]
    assert [(i.start, i.length, i.data) for i in images] == [(101, 3, b"\x01"), (105, 5, b"\x03"), (110, 4, b"\x02")]
    again = expanded(short, FILES, Doubling())[1]
    assert collapsed(ids, again, PLACEHOLDER) == short
    assert collapsed([*ids, 5, 6], again, PLACEHOLDER) == [*short, 5, 6], "a response behind it stays"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_text_with_other_placeholders_than_images_is_refused(count):
    with pytest.raises(ValueError, match=f"places for 2 images, and there are {count}"):
        expanded([PLACEHOLDER, PLACEHOLDER], FILES[:count], Doubling())


def seen(*files: bytes, length: int = 3) -> Example:
    return Example([1] * length, [0] + [1] * (length - 1), images=tuple(Image(0, 1, data) for data in files))


def test_images_move_with_their_sequences():
    batch = collate([seen(b"a"), seen(), seen(b"b", b"c", length=2)], TokenBatch)
    assert batch.images == ((b"a",), (), (b"b", b"c"))
    taken = take(batch, [2, 0, 2])
    assert taken.images == ((b"b", b"c"), (b"a",), (b"b", b"c"))
    assert taken.lengths.tolist() == [2, 3, 2]
    assert take(batch, torch.tensor([1])).images == ((),), "a batch of a run with images, without one"
    assert collate([replace(seen(), images=None)], TokenBatch).images is None


def test_an_image_is_never_cut_off():
    example = Example(list(range(10)), [0] * 8 + [1] * 2, "r:1", images=(Image(2, 6, b"a"),))
    assert cut(example, 8).ids == list(range(8)), "it ends with the image"
    with pytest.raises(LeftOut, match=r"an image would be cut off at data.max_len=7"):
        cut(example, 7)
    assert len(cut(replace(example, images=()), 7)) == 7


def test_reading_rows_of_text_imports_no_library_of_images():
    code = "import sys, rlhf_suite.data.text_encoders, rlhf_suite.data.builtin; print('PIL' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
