"""The file of expert load: what is written is read, what is cut off is skipped, and the figures against definitions."""

from __future__ import annotations

import numpy as np
import pytest

from mindspeed_lite.json_file import JsonFileError
from mindspeed_lite.parallel.balance import record

HEADER = record.LoadHeader(experts=4, topk=2, expert_parallel=2, replicas=1, decoder_layers=2, layers=(2, 3))


def step(number, first=(4, 0, 2, 2), second=(2, 2, 2, 2)):
    rows = [[*first], [*second]]
    return record.LoadStep(number, [4, 4], rows, [[row[0] + row[1], row[2] + row[3]] for row in rows])


def test_what_is_written_is_read_and_a_later_step_takes_the_place_of_an_earlier(tmp_path):
    file = tmp_path / "load"
    record.append(file, [step(1), step(2)], HEADER)
    record.append(file, [step(3)], None)
    # A run that resumes: its header and the steps since its checkpoint, again.
    resumed = record.LoadHeader(**{**vars(HEADER), "expert_parallel": 1, "replicas": 2})
    record.append(file, [step(3, (0, 0, 4, 4)), step(4)], resumed)
    read = record.read(file)
    assert read.header == resumed
    assert read.steps == (step(1), step(2), step(3, (0, 0, 4, 4)), step(4))
    assert read.last(2).steps == read.steps[2:]


def test_a_line_that_was_cut_off_is_skipped_and_what_follows_is_read(tmp_path):
    file = tmp_path / "load"
    record.append(file, [step(1), step(2)], HEADER)
    file.write_text(file.read_text()[:-20])
    assert [each.step for each in record.read(file).steps] == [1]
    assert record.why_not_writable(file) is None
    record.append(file, [step(2)], HEADER)
    assert [each.step for each in record.read(file).steps] == [1, 2]


@pytest.mark.parametrize("text", ["", "weights\n", "3\n", "\x00\xff", '{"loss": 1}\n', '{"format": "other"}\n'])
def test_what_is_no_record_is_one_line(tmp_path, text):
    file = tmp_path / "load"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(JsonFileError, match=r"holds no step|is not|want the header|want \"mindspeed_lite") as error:
        record.read(file)
    assert "\n" not in str(error.value)
    reason = record.why_not_writable(file)
    assert reason is None if not text else "something else" in str(reason)


def test_only_a_header_may_follow_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "load"
    record.append(file, [step(1), step(2), step(3)], HEADER)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]))
    with pytest.raises(JsonFileError, match="line 2: is not JSON"):
        record.read(file)


def test_records_of_different_models_are_refused(tmp_path):
    file = tmp_path / "load"
    record.append(file, [step(1)], HEADER)
    record.append(file, [step(2)], record.LoadHeader(**{**vars(HEADER), "experts": 8}))
    with pytest.raises(JsonFileError, match="line 4: is of another model"):
        record.read(file)


def test_asking_whether_a_file_can_be_written_leaves_nothing(tmp_path):
    assert record.why_not_writable(tmp_path / "load") is None and not [*tmp_path.iterdir()]
    assert record.why_not_writable("/dev/null") is None


def test_figures_are_those_of_their_definitions():
    steps = [step(1), step(2, (0, 0, 3, 3), (0, 0, 0, 0))]
    first, second = record.LoadRecord(HEADER, tuple(steps)).balance()
    rows = np.array([[4, 0, 2, 2], [0, 0, 3, 3]])
    assert first.layer == 2 and first.idle == 1
    assert first.imbalance == pytest.approx((rows.max(1) / rows.mean(1)).mean())
    assert first.worst == pytest.approx(2.0)
    assert first.variation == pytest.approx((rows.std(1) / rows.mean(1)).mean())
    assert first.rank_imbalance == pytest.approx((1.0 + 2.0) / 2)
    # 4 tokens and 2 choices in each of 2 steps.
    assert first.dropped == pytest.approx(2 / 16)
    assert second.idle == 0 and second.imbalance == 1.0 and second.dropped == pytest.approx(0.5)
