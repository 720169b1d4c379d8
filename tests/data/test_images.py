"""Images of rows: every form in which a column can hold one, what is refused, and their places in messages."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image as Pillow

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data import images
from rlhf_suite.data.batch import Example, TokenBatch, collate, take
from rlhf_suite.data.images import (
    Image,
    Newlines,
    collapse_images,
    expand_placeholders,
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
    newlines: Newlines | None = None

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


@pytest.mark.notices("URLs are fetched without being asked for", "data/images.py", "if not with_urls:", "if not text:")
@pytest.mark.notices(
    "the file of an image is not opened when its row is read",
    "data/images.py",
    "    open_image(data)\n    return data",
    "    return data",
)
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing.png", "does not exist"),
        ("\u56fe" * 200, "does not exist"),  # more bytes than the name of a file can have
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
    config = DataConfig.of("sft", image_key="image")
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


class Dripping(BaseHTTPRequestHandler):
    """Sends its reply byte by byte: with 600 of them, it takes 30 s where nobody hangs up."""

    slow = "body"

    def do_GET(self):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n" + b"X-Long: " + b"x" * 600 + b"\r\n\r\n"
        try:
            if self.slow == "body":
                self.wfile.write(head)
            for byte in head if self.slow == "head" else bytes(600):
                self.wfile.write(bytes([byte]))
                if self.server.over.wait(0.05):
                    return
        except OSError:
            pass

    def log_message(self, *_):
        pass


@pytest.mark.notices(
    "a server that sends a byte now and then is waited for",
    "data/images.py",
    "asyncio.timeout(URL_TIMEOUT_S),",
    "asyncio.timeout(None),",
)
@pytest.mark.parametrize("slow", ["head", "body"])
def test_a_server_has_one_deadline_for_all_of_an_image(slow, monkeypatch):
    monkeypatch.setattr(images, "URL_TIMEOUT_S", 0.5)
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Slow", (Dripping,), {"slow": slow})) as server:
        server.over, server.daemon_threads = threading.Event(), True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ValueError, match=r"could not be fetched within 0\.5 s"):
            image_file(f"http://127.0.0.1:{server.server_port}/x.png", with_urls=True)
        server.over.set()
        server.shutdown()


@pytest.mark.notices(
    "a server may send as much as it likes", "data/images.py", "if len(data) > MOST_BYTES:", "if False:"
)
def test_a_server_cannot_lead_to_a_file_and_sends_so_much(tmp_path, monkeypatch):
    (tmp_path / "x.png").write_bytes(PICTURES[0])

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self):
            large = self.path == "/large"
            self.send_response(200 if large else 302)
            self.send_header("Location", f"file://{tmp_path}/x.png")
            self.end_headers()
            if large:
                self.wfile.write(bytes(2000))

        def log_message(self, *_):
            pass

    monkeypatch.setattr(images, "MOST_BYTES", 1000)
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ValueError, match="could not be fetched"):
            image_file(f"{url}/other", with_urls=True)
        with pytest.raises(ValueError, match="more than"):
            image_file(f"{url}/large", with_urls=True)
        server.shutdown()
    with pytest.raises(ValueError, match="more than"):
        image_file(write(tmp_path / "large.png", bytes(2000)))


def write(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n%%EOF\n"


@pytest.mark.notices(
    "an image may be in any format that Pillow knows",
    "data/images.py",
    ", formats=[name for name in FORMATS if name in Pillow.OPEN]",
    "",
)
def test_only_formats_that_pillow_decodes_itself_are_opened(monkeypatch):
    """Pillow hands EPS to Ghostscript, a program of its own, where that is installed."""
    with Pillow.open(io.BytesIO(EPS)) as image:
        assert image.format == "EPS", "Pillow itself opens it"
    with pytest.raises(ValueError, match=r"no image of a known format \(PNG, JPEG, "):
        image_file(EPS)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert open_image(image_file(picture(kind=kind))).size == (40, 56)


def saved(image, kind: str = "PNG", **settings) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def corners(data: bytes) -> list[tuple[int, int, int]]:
    image = open_image(data)
    return [image.getpixel((x, y)) for x in (0, image.width - 1) for y in (0, image.height - 1)]


def turned(orientation: int) -> bytes:
    """A picture whose left half is red, and which a camera says it has turned."""
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    image = Pillow.new("RGB", (40, 20), (255, 0, 0))
    image.paste((0, 0, 255), (20, 0, 40, 20))
    return saved(image, exif=exif)


@pytest.mark.notices("a picture lies on its side", "data/images.py", "image = ImageOps.exif_transpose(image)", "pass")
def test_a_picture_stands_as_its_camera_was_held():
    assert corners(turned(1)) == [(255, 0, 0)] * 2 + [(0, 0, 255)] * 2
    assert corners(turned(3)) == [(0, 0, 255)] * 2 + [(255, 0, 0)] * 2
    assert open_image(turned(6)).size == (20, 40) and corners(turned(6))[0] == (255, 0, 0)
    assert corners(image_file(Pillow.open(io.BytesIO(turned(3))))) == corners(turned(3)), "one of Pillow too"


def transparent_pictures() -> dict[str, bytes]:
    """Pictures whose transparent pixels have a colour, in each way that a file can say so."""
    clear = Pillow.new("RGBA", (8, 8), (255, 0, 0, 0))
    clear.putpixel((0, 0), (0, 0, 255, 255))
    half = Pillow.new("RGBA", (8, 8), (0, 0, 0, 128))
    palette = Pillow.new("P", (8, 8), 3)
    palette.putpalette([*range(255)] + [0] * 513)
    grey = Pillow.new("LA", (8, 8), (0, 0))
    return {
        "clear": saved(clear),
        "half": saved(half),
        "palette": saved(palette, transparency=3),
        "palette of a GIF": saved(palette, "GIF", transparency=3),
        "grey": saved(grey),
        "one grey": saved(Pillow.new("L", (8, 8), 9), transparency=9),
        "webp": saved(clear, "WEBP", lossless=True),
    }


@pytest.mark.notices(
    "what is transparent has the colour that nobody sees",
    "data/images.py",
    'if not has_alpha or image.mode == "RGB":',
    "if True:",
)
@pytest.mark.notices(
    "transparent pixels of palettes have the colour that nobody sees",
    "data/images.py",
    ' or "transparency" in image.info',
    "",
)
@pytest.mark.parametrize("name", transparent_pictures())
def test_what_is_transparent_is_white(name):
    last = corners(transparent_pictures()[name])[-1]
    assert last == ((127, 127, 127) if name == "half" else (255, 255, 255))
    image = Pillow.open(io.BytesIO(transparent_pictures()[name]))
    assert corners(image_file(image))[-1] == last, "one of Pillow too"


@pytest.mark.stack
def test_an_image_is_what_the_engine_would_serve():
    served = pytest.importorskip("vllm.multimodal.media.image").ImageMediaIO()
    files = [saved(Pillow.new("RGB", (8, 8), (9, 8, 7)), transparency=(9, 8, 7))]
    files += [*transparent_pictures().values(), *map(turned, range(1, 9)), turned(1)[:-12]]
    files += [picture(kind=kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")]
    files += [saved(Pillow.new(mode, (8, 8))) for mode in ("1", "L", "P", "I;16", "RGB", "RGBA", "LA")]
    files += [saved(Pillow.new("CMYK", (8, 8), (10, 20, 30, 40)), "JPEG")]
    for data in files:
        ours, theirs = open_image(data), served.load_bytes(data).media
        assert (ours.mode, ours.size, ours.tobytes()) == (theirs.mode, theirs.size, theirs.tobytes())


@pytest.mark.notices(
    "a row may have any number of images",
    "data/images.py",
    "if len(values) > config.max_images_per_prompt:",
    "if not values:",
)
def test_a_row_has_at_most_as_many_images_as_the_flag_allows():
    config = DataConfig.of("sft", image_key="image", max_images_per_prompt=2)
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
    ids, images = expand_placeholders(short, FILES, Doubling(), offset=100)
    assert ids == [1, 8, 9, 8, 2, 8, 9, 9, 9, 8, 8, 9, 9, 8, 3]
    assert [(i.start, i.length, i.data) for i in images] == [(101, 3, b"\x01"), (105, 5, b"\x03"), (110, 4, b"\x02")]
    again = expand_placeholders(short, FILES, Doubling())[1]
    assert collapse_images(ids, again, PLACEHOLDER) == short
    assert collapse_images([*ids, 5, 6], again, PLACEHOLDER) == [*short, 5, 6], "a response after it stays"


class Spaced(Doubling):
    """A reader of images with two newlines around them; 101 to 104 are tokens of one to four newlines."""

    newlines = Newlines({100 + count: count for count in (1, 2, 3, 4)}, lambda count: [100 + count] * (count > 0))

    def tokens(self, image: bytes) -> list[int]:
        return [102, *super().tokens(image), 102]


@pytest.mark.notices(
    "the newlines around an image are not joined with those of the text",
    "data/images.py",
    "texts[number] = newlines.join_end(texts[number] + before)",
    "texts[number] = texts[number] + before",
)
def test_newlines_around_an_image_join_those_of_the_text():
    short = [1, 101, PLACEHOLDER, PLACEHOLDER, 102, 101, 2, 101, PLACEHOLDER]
    ids, images = expand_placeholders(short, [FILES[0], FILES[2], FILES[0]], Spaced(), offset=10)
    assert ids == [1, 103, 8, 9, 8, 104, 8, 9, 9, 8, *[105], 2, 103, 8, 9, 8, 102]
    assert [(image.start, image.length) for image in images] == [(12, 3), (16, 4), (23, 3)]
    once = [1, 103, PLACEHOLDER, 104, PLACEHOLDER, 105, 2, 103, PLACEHOLDER, 102]
    assert collapse_images([0] * 10 + ids, images, PLACEHOLDER) == [0] * 10 + once, "an engine adds no newlines"
    assert expand_placeholders([102, 101, 1], [], Spaced())[0] == [102, 101, 1], "text without images stays"


@pytest.mark.notices(
    "placeholders and images need not be equally many",
    "data/images.py",
    "if num_placeholders != len(images):",
    "if num_placeholders > len(images):",
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_text_with_other_placeholders_than_images_is_refused(count):
    with pytest.raises(ValueError, match=f"places for 2 images, and there are {count}"):
        expand_placeholders([PLACEHOLDER, PLACEHOLDER], FILES[:count], Doubling())


def seen(*files: bytes, length: int = 3) -> Example:
    return Example([1] * length, [0] + [1] * (length - 1), images=tuple(Image(0, 1, data) for data in files))


@pytest.mark.notices(
    "the images of a batch stay where they are when its sequences move",
    "data/batch.py",
    "tuple(batch.images[row] for row in chosen.tolist())",
    "batch.images[: len(chosen)]",
)
def test_images_move_with_their_sequences():
    batch = collate([seen(b"a"), seen(), seen(b"b", b"c", length=2)], TokenBatch)
    assert batch.images == ((b"a",), (), (b"b", b"c"))
    taken = take(batch, [2, 0, 2])
    assert taken.images == ((b"b", b"c"), (b"a",), (b"b", b"c"))
    assert taken.lengths.tolist() == [2, 3, 2]
    assert take(batch, torch.tensor([1])).images == ((),), "a batch of a run with images, without one"
    assert collate([replace(seen(), images=None)], TokenBatch).images is None


@pytest.mark.notices(
    "an image is cut off",
    "data/text_encoders.py",
    "example.images[-1].start + example.images[-1].length > max_len",
    "example.images[-1].start > max_len",
)
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
