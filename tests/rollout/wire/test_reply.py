"""Answers of /generate become the arrays that plain `json` would give; what cannot be read is an error."""

import json

import numpy as np
import pytest

from rollout.generation import FinishReason
from rollout.wire.reply import StreamedError, read_part
from tests.rollout.script import Script


def answer(entries: str, ids: str | None, reason: str = '{"type":"stop","matched":2}', more: str = "") -> bytes:
    words = "" if ids is None else f'"output_ids":[{ids}],'
    return f'{{"text":"x",{words}"meta_info":{{"finish_reason":{reason},{more}{entries}}}}}'.encode()


def test_a_long_answer_is_read_as_plain_json_reads_it() -> None:
    script = Script()
    entries, ids = (part.decode() for part in script.body(5, 77, 0, script.response(5, 77)[0]))
    content = answer(f'"output_token_logprobs":[{entries}],"e2e_latency":1.5', ids, more='"weight_version":"7",')
    reply, plain = read_part(content)[0], json.loads(content)
    drawn = plain["meta_info"]["output_token_logprobs"]
    assert reply.token_ids.dtype == np.int32
    assert reply.log_probs.dtype == np.float32
    assert len(drawn) > 1000
    np.testing.assert_array_equal(reply.token_ids, plain["output_ids"])
    np.testing.assert_array_equal(reply.log_probs, np.array([entry[0] for entry in drawn], np.float32))
    assert (reply.finish_reason, reply.weight_label) == (FinishReason.STOP, "7")


def test_text_in_the_entries_and_ids_that_are_not_sent_do_no_harm() -> None:
    reply, _ = read_part(answer('"output_token_logprobs":[[-0.5,3,"a"],[0,4,null]]', None, more='"weight_version":3,'))
    assert reply.token_ids.tolist() == [3, 4]
    assert reply.log_probs.tolist() == [-0.5, 0.0]
    assert reply.weight_label == "3"


def test_ids_may_be_written_with_spaces_or_as_null() -> None:
    name = '"output_token_logprobs"'
    for ids in ("9, 2", " 9,2 "):
        np.testing.assert_array_equal(
            read_part(answer(f"{name}:[[-1.5,9,null],[-0.5,2,null]]", ids))[0].token_ids, [9, 2]
        )
    content = answer(f"{name}:[[-1.5,9,null]]", "9").replace(b'"output_ids":[9]', b'"output_ids":null')
    np.testing.assert_array_equal(read_part(content)[0].token_ids, [9])


def test_an_abort_before_the_first_token_is_empty() -> None:
    reply, ends = read_part(answer('"id":"r"', "", reason='{"type":"abort","message":"Abort"}'))
    assert ends
    assert reply.finish_reason is FinishReason.ABORT
    assert reply.token_ids.size == reply.log_probs.size == 0
    assert reply.weight_label is None


@pytest.mark.parametrize(
    "content",
    [
        b"{not json",
        b"[]",
        b'{"text":"x"}',
        answer('"id":"r"', "1"),  # no log-probs though it was not aborted
        answer('"output_token_logprobs":[[-0.5,3,null]]', "4"),
        answer('"output_token_logprobs":[[null,3,null]]', "3"),
        answer('"output_token_logprobs":[[-0.5,3,null]]', "3", reason='{"type":"tired"}'),
    ],
)
def test_what_cannot_be_read_is_an_error(content: bytes) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_part(content)


def test_an_abort_with_a_status_is_the_server_s_failure() -> None:
    reason = '{"type":"abort","message":"no room","status_code":503,"err_type":null}'
    with pytest.raises(StreamedError, match="no room") as caught:
        read_part(answer('"output_token_logprobs":[[-0.5,3,null]]', "3", reason=reason))
    assert caught.value.status == 503
