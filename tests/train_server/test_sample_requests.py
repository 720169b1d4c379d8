"""What a request for samples may say."""

from __future__ import annotations

import pytest

from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.sampling import SampleRequest

pytestmark = pytest.mark.quick
END = 9  # the end of sequence of the model


def settings(stop):
    asked = SampleRequest.of({"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"stop": stop}})
    return asked.settings((END,))


@pytest.mark.parametrize(
    ("stop", "texts", "tokens"),
    [(None, (), (END,)), ("a", ("a",), (END,)), (["a", "b"], ("a", "b"), (END,)), ([5, 6], (), (5, 6)), ([], (), ())],
)
def test_what_ends_a_response_is_what_the_request_says(stop, texts, tokens):
    given = settings(stop)
    assert (given.stop, given.stop_token_ids) == (texts, tokens)


@pytest.mark.notices(
    "token ids that are beside texts in `stop` are dropped without an error",
    "train_server/sampling.py",
    "(kinds <= {str} or kinds <= {int})",
    "kinds <= {str, int}",
    cases="mixed",
)
@pytest.mark.parametrize(
    "stop",
    [["a", 5], [True], [1.5], {"a": 1}, "", ["a", ""], 5],
    ids=["mixed", "bool", "float", "table", "empty", "empty2", "number"],
)
def test_stops_of_another_kind_are_refused(stop):
    with pytest.raises(BadRequest, match=r"asample: stop=.* is not a text, a list of texts or one of token ids"):
        settings(stop)
