"""Images: from the columns of a row to image files in memory, and from placeholders to the tokens of images.

An image travels as the bytes of its file until the forward pass of a model makes pixels of it. So batches stay small,
and the engine and the trainer read the same file.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_suite.certificates import certificate_problem
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.messages import Message
from rlhf_suite.data.row import Row, RowError, require_value

TAG = "<image>"  # where an image belongs in the text of a message
URL = re.compile(r"https?://")
DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")
BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
LONGEST_PATH, LONGEST_NAME = 4096, 256  # characters; a longer text is base64
URL_TIMEOUT_S = 30.0  # for all of an image, however slowly its server sends it
MOST_BYTES = 1 << 26  # 64 MiB, the largest file of an image
# Those that Pillow decodes by itself; others ask a program such as Ghostscript, which would run what is in the file.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
WHITE = (255, 255, 255)  # behind transparent images, as in vLLM
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # what Pillow raises for a broken file


@dataclass(frozen=True)
class Image:
    """An image in a sequence of tokens: the tokens that stand for it, and the bytes of its file."""

    start: int
    length: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Newlines:
    """The newlines around an image, which a tokenizer joins with those of the text beside it."""

    counts: Mapping[int, int]  # tokens that are newlines alone, with the number of these
    encode: Callable[[int], list[int]]  # the tokens of so many newlines

    def split(self, tokens: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the newlines before an image, its tokens without newlines around it, and the newlines after it."""
        start = next(place for place, token in enumerate(tokens) if token not in self.counts)
        end = next(place for place in range(len(tokens), 0, -1) if tokens[place - 1] not in self.counts)
        return list(tokens[:start]), list(tokens[start:end]), list(tokens[end:])

    def join_start(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with the newlines at their start as the tokenizer writes them."""
        end = next((place for place, token in enumerate(ids) if token not in self.counts), len(ids))
        return [*self.encode(sum(self.counts[token] for token in ids[:end])), *ids[end:]]

    def join_end(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with the newlines at their end as the tokenizer writes them."""
        start = next((place for place in range(len(ids), 0, -1) if ids[place - 1] not in self.counts), 0)
        return [*ids[:start], *self.encode(sum(self.counts[token] for token in ids[start:]))]


class ImageReader(Protocol):
    """What encoders need to know of a model that reads images (`models.vision.VisionProcessor`)."""

    @property
    def placeholder(self) -> int:
        """The token that stands for an image before it is expanded."""
        ...

    @property
    def newlines(self) -> Newlines | None:
        """The newlines that stand around each image, which are not among its tokens in a sequence; None: there are
        none."""
        ...

    def tokens(self, image: bytes) -> list[int]:
        """Return the tokens that stand for an image in a sequence.

        Raises:
            ValueError: the model cannot read this image, with the reason.
        """
        ...


def expand_placeholders(
    ids: Sequence[int], images: Sequence[bytes], reader: ImageReader, offset: int = 0
) -> tuple[list[int], tuple[Image, ...]]:
    """Return `ids` with the tokens of an image in place of each placeholder, and where the images are. `offset`: the
    number of tokens before `ids` in their sequence.

    Raises:
        ValueError: there are more or fewer placeholders than images, or the model cannot read an image.
    """
    num_placeholders = sum(token == reader.placeholder for token in ids)
    if num_placeholders != len(images):
        raise ValueError(f"the text has places for {num_placeholders} images, and there are {len(images)}")
    texts: list[list[int]] = [[]]
    for token in ids:
        if token == reader.placeholder:
            texts.append([])
        else:
            texts[-1].append(token)
    seen = [reader.tokens(data) for data in images]
    if newlines := reader.newlines:
        for number, tokens in enumerate(seen):
            before, seen[number], after = newlines.split(tokens)
            texts[number] = newlines.join_end(texts[number] + before)
            texts[number + 1] = newlines.join_start(after + texts[number + 1])
    result, places = texts[0], list[Image]()
    for data, tokens, text in zip(images, seen, texts[1:], strict=True):
        places.append(Image(offset + len(result), len(tokens), data))
        result += tokens + text
    return result, tuple(places)


def collapse_images(ids: Sequence[int], images: Sequence[Image], placeholder: int) -> list[int]:
    """Return `ids` with one placeholder in place of the tokens of each image: what vLLM expands itself."""
    result: list[int] = []
    done = 0
    for image in images:
        result += [*ids[done : image.start], placeholder]
        done = image.start + image.length
    return result + list(ids[done:])


def row_images(row: Row, config: DataConfig) -> list[bytes]:
    """Return the image files of a row; none if the column is null or an empty list.

    Raises:
        RowError: there are more than data.max_images_per_prompt, or one of them cannot be read.
    """
    assert config.image_key is not None
    if config.image_key in row.values and row.values[config.image_key] is None:
        return []
    value = require_value(row, config.image_key)
    values = value if isinstance(value, list | tuple) else [value]
    if len(values) > config.max_images_per_prompt:
        limit = f"data.max_images_per_prompt={config.max_images_per_prompt}"
        raise RowError(row.where, f"{len(values)} images, and {limit} allows fewer")
    try:
        return [image_file(source, Path(row.source).parent, config.image_urls_enable) for source in values]
    except ValueError as error:
        raise RowError(row.where, f"column {config.image_key!r}: {error}") from None


def image_file(value: Any, folder: Path | None = None, with_urls: bool = False) -> bytes:
    """Return the bytes of an image file.

    `value` is such bytes, the path of a file (relative to `folder`, or to the working folder), base64, a data URI, a
    URL, an image of Pillow, or what `datasets` stores: {"bytes": ..., "path": ...}.

    Raises:
        ValueError: it is none of these, or no image.
    """
    if isinstance(value, dict) and {"bytes", "path"} & value.keys():
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        data = file_of_text(value, folder, with_urls)
    elif isinstance(value, bytes | bytearray):
        data = bytes(value)
    elif hasattr(value, "save") and hasattr(value, "getbands"):  # an image of Pillow, which is not imported for this
        stream = io.BytesIO()
        convert_to_rgb(value).save(stream, "PNG")
        data = stream.getvalue()
    else:
        raise ValueError(f"an image is of type {type(value).__name__}, not a path, bytes, base64 or an image")
    open_image(data)
    return data


def file_of_text(text: str, folder: Path | None, with_urls: bool) -> bytes:
    """Return the image file that a text names or holds."""
    if URL.match(text):
        if not with_urls:
            raise ValueError("an image is a URL; add data.image_urls_enable=true to fetch it")
        return fetch(text)
    if start := DATA_URI.match(text):
        return decode_base64(text[start.end() :])
    if len(text) < LONGEST_PATH and max(map(len, text.split("/"))) < LONGEST_NAME:
        try:
            file = next((path for path in (Path(folder or "") / text, Path(text)) if path.is_file()), None)
        except OSError:  # a name that no file can have
            file = None
        if file is not None:
            return content_of(file)
    if not BASE64.fullmatch(text):
        raise ValueError("an image file does not exist")
    return decode_base64(text)


def content_of(path: Path) -> bytes:
    """Return the bytes of an image file, which has a size that an image may have."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"an image file has more than {MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"an image file cannot be read ({error.strerror})") from None


def decode_base64(text: str) -> bytes:
    """Return the bytes that base64 text stands for."""
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except binascii.Error:
        raise ValueError("an image is not base64") from None


def fetch(url: str) -> bytes:
    """Return the content at a URL. All of it must arrive in time.

    Raises:
        ValueError: it does not, is too large, or cannot be fetched.
    """
    import httpx

    try:
        return asyncio.run(download(url))
    except TimeoutError:
        raise ValueError(f"an image could not be fetched within {URL_TIMEOUT_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        reason = certificate_problem(error) or type(error).__name__
        raise ValueError(f"an image could not be fetched ({reason})") from None


async def download(url: str) -> bytes:
    """Return the content at a URL, uncompressed as it was asked for."""
    import httpx

    plain, data = {"Accept-Encoding": "identity"}, bytearray()
    async with (
        asyncio.timeout(URL_TIMEOUT_S),
        httpx.AsyncClient(follow_redirects=True, timeout=URL_TIMEOUT_S) as client,
        client.stream("GET", url, headers=plain) as reply,
    ):
        reply.raise_for_status()
        async for piece in reply.aiter_raw():
            data += piece
            if len(data) > MOST_BYTES:
                raise ValueError(f"an image at a URL has more than {MOST_BYTES >> 20} MiB")
    return bytes(data)


def open_image(data: bytes) -> Any:
    """Return the image in a file as an RGB image of Pillow, as it is looked at.

    Raises:
        ValueError: the bytes are not an image of a known format, or it is incomplete.
    """
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    Pillow.init()  # the plugins of all formats, of which an installation may lack some
    try:
        with Pillow.open(io.BytesIO(data), formats=[name for name in FORMATS if name in Pillow.OPEN]) as image:
            return convert_to_rgb(image)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise ValueError(f"an image file is broken, or no image of a known format ({known})") from None
    except (*UNREADABLE, Pillow.DecompressionBombError) as error:
        problem = "too large" if isinstance(error, Pillow.DecompressionBombError) else "broken, or no image"
        raise ValueError(f"an image file is {problem}") from None


def convert_to_rgb(image: Any) -> Any:
    """Return an image of Pillow in RGB as vLLM serves it: turned as its camera was held (EXIF), on white where it is
    transparent."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    with suppress(Exception):  # notes of cameras are often damaged, and the image is not
        image = ImageOps.exif_transpose(image)
    has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if not has_alpha or image.mode == "RGB":  # there vLLM does not look for a transparent colour
        return image.convert("RGB")
    image = image.convert("RGBA")
    result = Pillow.new("RGB", image.size, WHITE)
    result.paste(image, mask=image.getchannel("A"))
    return result


def with_places(messages: Sequence[Message], count: int, row: Row) -> list[Message]:
    """Return messages in which each of `count` images has its place, as chat templates expect it.

    A place is an item {"type": "image"} of a content list, or `<image>` in a text. Where there is none, all images
    stand at the start of the first message of the user.

    Raises:
        RowError: there are places, but not `count`, or a part of a content is neither text nor an image.
    """
    try:
        result = [with_items(message) for message in messages]
    except ValueError as error:
        raise RowError(row.where, str(error)) from None
    num_placed = sum(map(num_places, result))
    if not num_placed and count:
        first = next((i for i, message in enumerate(result) if message["role"] == "user"), None)
        if first is None:
            raise RowError(row.where, "the prompt has no user message, to which its images could belong")
        items = [{"type": "image"}] * count + as_items(result[first]["content"])
        result[first] = {**result[first], "content": items}
    elif num_placed != count:
        raise RowError(row.where, f"the messages have places for {num_placed} images, and the row has {count}")
    return result


def with_items(message: Message) -> Message:
    """Return a message whose `<image>` tags are items of its content; the text of the model stays as it is."""
    content = message.get("content")
    if isinstance(content, str) and (TAG not in content or message["role"] == "assistant"):
        return message
    return message if content is None else {**message, "content": list(items_of(as_items(content)))}


def as_items(content: Any) -> list[dict[str, Any]]:
    """Return the content of a message as a list of items."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def items_of(items: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the items of a content list, `<image>` tags in its texts as items. What an image item says of its image is
    left out, since templates may print it.

    Raises:
        ValueError: an item is neither text nor an image.
    """
    for item in items:
        if item.get("type") in ("image", "image_url"):
            yield {"type": "image"}
            continue
        if not str(item.get("type") or "text").endswith("text"):  # input_text, output_text
            raise ValueError(f"a message has a part of type {item.get('type')!r}; text and images alone can be read")
        for number, text in enumerate(str(item.get("text") or "").split(TAG)):
            if number:
                yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def num_places(message: Message) -> int:
    """Return how many images have a place in a message."""
    content = message.get("content")
    return 0 if content is None or isinstance(content, str) else sum(item["type"] == "image" for item in content)
