"""Messages of the protocol as bytes: what google.protobuf, which other packages bring, reads and writes is the same."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.losses import LOSSES, named_loss
from rlhf_suite.train_server.messages import FLOAT32, INT64, OUTPUT, REQUEST, Pass, to_batch
from rlhf_suite.train_server.wire import Field, decode, encode
from train_client import shifted, to_message

pytestmark = pytest.mark.quick
TYPES = {"int": 3, "double": 1, "bytes": 12, "text": 9}  # of google's descriptors: int64, double, bytes, string


def class_of(schema, name):
    """Return google's class of a schema's messages."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name, syntax="proto3")
    count = iter(range(10_000))

    def add(schema, title, is_map=False):
        message = file.message_type.add(name=title)
        for number, field in schema.items():
            many = field.many or field.map
            own = message.field.add(name=field.name, number=number, label=3 if many else 1)
            if isinstance(field.kind, str):
                own.type = TYPES[field.kind]
            else:
                inner = f"M{next(count)}"
                add(field.kind, inner)
                own.type, own.type_name = 11, f".{name}.{inner}"

    add(schema, "Top")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{name}.Top"))


def message():
    tokens = [3, 4, 5, 6]
    return {
        "model_id": "é:train:0",
        "seq_id": 300,
        "data": [to_message(shifted(tokens, weights=[0.0, -1.5, 2.0])), to_message(shifted([1, 2]))],
        "loss_fn": "ppo",
        "forward_only": 1,
        "settings": {"clip_low_threshold": {"number": 0.8}, "other": {"text": "x"}},
    }


def test_what_we_write_google_reads_and_writes_again_byte_for_byte():
    data = encode(REQUEST, message())
    read = class_of(REQUEST, "request").FromString(data)
    assert (read.model_id, read.seq_id, len(read.data), read.loss_fn) == ("é:train:0", 300, 2, "ppo")
    assert {entry.key: entry.value.number for entry in read.settings}["clip_low_threshold"] == 0.8
    again = read.SerializeToString(deterministic=True)
    assert decode(REQUEST, again) == decode(REQUEST, data) == message()


def test_an_answer_is_what_google_reads():
    written = {
        "type": "ArrayRecord",
        "records": [{"type": "x", "fields": {}, "count": 2}],
        "metrics": {"loss:sum": -0.25},
    }
    read = class_of(OUTPUT, "output").FromString(encode(OUTPUT, written))
    assert read.type == "ArrayRecord" and read.records[0].count == 2 and read.metrics[0].value == -0.25


@pytest.mark.parametrize("number", [0, 1, 127, 128, 2**31, 2**63 - 1, -1, -(2**63)])
def test_numbers_of_any_size_and_sign_come_back(number):
    schema = {1: Field("a", "int"), 2: Field("b", "int", many=True)}
    data = encode(schema, {"a": number, "b": [number, 7]})
    assert decode(schema, data) == {"a": number, "b": [number, 7]}
    assert class_of(schema, f"n{abs(number)}{'m' if number < 0 else 'p'}").FromString(data).a == number


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab", b"\x0b", b"\x08" + b"\xff" * 11, b"\x12\x01a"])
def test_what_is_no_message_is_refused_with_a_reason(data):
    with pytest.raises(BadRequest, match="not a message of the protocol"):
        decode({1: Field("a", "int"), 2: Field("b", "int")}, data)


@pytest.mark.notices(
    "a value that an entry of a map omits is not that of its kind",
    "train_server/wire.py",
    'entry.get("value", absent)',
    'entry.get("value")',
)
def test_an_entry_of_a_map_may_omit_a_value_that_is_zero_or_empty():
    """Google's library writes such values, encoders of other languages leave them out."""
    key = b"clip_low_threshold"
    entry = bytes([0x0A, len(key)]) + key
    for field in (5, 7):  # numbers of older clients, and settings
        asked = Pass.of(encode(REQUEST, message() | {"settings": {}}) + bytes([field << 3 | 2, len(entry)]) + entry)
        assert asked.settings == {"clip_low_threshold": 0.0}
        changes = named_loss("ppo").request(asked.settings).changes
        assert changes["eps_clip_low_high"] == pytest.approx([1.0, 0.2])


def asked(loss, *data, **settings):
    fields = message() | {"data": [to_message(datum) for datum in data], "loss_fn": loss}
    fields["settings"] = {key: {"number": value} for key, value in settings.items()}
    return Pass.of(encode(REQUEST, fields))


def test_numbers_of_a_target_stand_at_its_token():
    batch = to_batch(asked("cross_entropy", shifted([7, 8, 9], weights=[0.5, -2.0])), LOSSES["cross_entropy"], 260, 8)
    assert batch.ids.tolist() == [7, 8, 9] and batch.lengths.tolist() == [3]
    assert batch.mask.tolist() == [0, 1, 1] and batch.correction.tolist() == [0, 0.5, -2.0]


def test_a_target_that_is_not_the_next_token_counts_for_nothing():
    """As cookbook's loop pads the targets of the prompt with zeros."""
    datum = {"input": [7, 8, 9], "target_tokens": [0, 0, 5], "advantages": [0, 0, 1.0], "logprobs": [0, 0, -1.0]}
    batch = to_batch(asked("ppo", datum), LOSSES["ppo"], 260, 8)
    assert batch.ids.tolist() == [7, 8, 9, 5] and batch.mask.tolist() == [0, 0, 0, 1]
    assert batch.advantages.tolist() == [0, 0, 0, 1] and batch.old_log_probs.tolist() == [0, 0, 0, -1]


RL = {"advantages": [1.0, 1.0], "logprobs": [-1.0, -1.0]}
WRONG = [
    ("ppo", shifted([7, 8, 9]), {}, "datum 0 has no advantages, which ppo reads"),
    ("ppo", shifted([7, 8, 9], **RL, mask=[0, 1]), {}, "datum 0 has mask, which this server does not read for ppo"),
    ("ppo", shifted([7, 8, 9], **RL | {"advantages": [1.0]}), {}, "advantages has 1 number for 2 positions"),
    ("ppo", shifted([7, 8, 9], **RL | {"logprobs": [0.0, np.inf]}), {}, "logprobs has a number that is not finite"),
    ("ppo", shifted([7, 8, 9], **RL), {"eps": 1}, "ppo has no setting eps. It has clip_low_threshold"),
    ("ppo", shifted([7, 8, 9], **RL), {"clip_low_threshold": 1.5}, "the clip from 1.5 to 1.2 does not contain 1"),
    ("dro", shifted([7, 8, 9], **RL), {"beta": -1}, "beta=-1.0 is not a number of at least 0"),
    ("gspo", shifted([7, 8, 9], **RL), {}, "datum 0 has no sequence_ratio_mask"),
    ("gspo", shifted([7, 8, 9], **RL, sequence_ratio_mask=[0, 1]), {}, "position 0 has an advantage, but it is not in"),
    ("cross_entropy", {"input": [7, 8], "target_tokens": [9, 9]}, {}, "the target at position 0 is not the next input"),
    (
        "dro",
        {"input": [7, 8], "target_tokens": [9, 9], **RL | {"advantages": [0, 1]}},
        {},
        "target at position 0 is not",
    ),
    ("stable_reinforce", shifted([7, 8]), {}, "stable_reinforce: its formula is not published"),
    ("custom", shifted([7, 8]), {}, "custom: there is no such loss. There are cross_entropy"),
]


@pytest.mark.parametrize(("loss", "datum", "settings", "reason"), WRONG)
def test_a_request_that_cannot_be_trained_on_is_refused(loss, datum, settings, reason):
    given = asked(loss, datum, **settings)
    with pytest.raises(BadRequest, match=reason):
        to_batch(given, named_loss(loss), 260, 8)
        named_loss(loss).request(given.settings)


def test_tensors_of_other_forms_are_refused():
    wrong = to_message(shifted([7, 8, 9]))
    for change, reason in (
        ({"shape": [1, 2]}, "has the shape"),
        ({"dtype": 4}, "not a dense tensor"),
        ({"sparse": {}}, "not a dense tensor"),
        ({"dtype": FLOAT32}, "has 2 numbers for 2 positions"),
    ):
        tensor = {"dense": np.array([8, 9], "<i8").tobytes(), "dtype": INT64, "shape": [2]} | change
        given = Pass.of(encode(REQUEST, {"data": [wrong | {"numbers": {"target_tokens": tensor}}], "loss_fn": "ppo"}))
        with pytest.raises(BadRequest, match=reason):
            to_batch(given, LOSSES["cross_entropy"], 260, 8)
    image = Pass.of(encode(REQUEST, {"data": [{"input": [{"image": {}}]}]}))
    with pytest.raises(BadRequest, match="an image or audio"):
        to_batch(image, LOSSES["cross_entropy"], 260, 8)
