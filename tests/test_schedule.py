"""Layer schedules: what each spelling selects, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posenc.errors import PosencError
from hf_posenc.schedule import Auto, auto_layers, select_layers


def chosen(schedule, num_layers, **options):
    picked = select_layers(schedule, num_layers, **options)
    assert len(picked) == num_layers
    return [index for index, selected in enumerate(picked) if selected]


@pytest.mark.parametrize(
    ("schedule", "num_layers", "expected"),
    [
        ("all", 3, [0, 1, 2]),
        ("every:4", 8, [3, 7]),
        ("every:4", 7, [3]),
        ("every:1", 3, [0, 1, 2]),
        ("every: 2", 4, [1, 3]),
        ("0-3,8", 9, [0, 1, 2, 3, 8]),
        (" 8 , 0 - 1 ", 9, [0, 1, 8]),
        ("2,2,1-2", 3, [1, 2]),
        ([0, 8, 3], 9, [0, 3, 8]),
        ((4,), 5, [4]),
        (range(2, 4), 5, [2, 3]),
    ],
)
def test_selects(schedule, num_layers, expected):
    assert chosen(schedule, num_layers) == expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("auto:7", Auto(7)),
        (" auto: 7 ", Auto(7)),
        ("auto:12:norm", Auto(12, "norm")),
        ("every:4", None),
        ([0, 1], None),
        (None, None),
    ],
)
def test_auto_is_left_to_a_calibration(schedule, expected):
    assert auto_layers(schedule) == expected


def test_offset_counts_from_the_first_layer():
    assert chosen("every:4", 9, offset=0) == [0, 4, 8]
    assert chosen("every:4", 9, offset=3) == chosen("every:4", 9) == [3, 7]
    assert chosen("every:1", 2, offset=0) == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("auto:7", "layers='auto:7' needs a calibration of the model; make one with"),
        ("auto:7:sensitivity", "`hf-posenc calibrate MODEL calibration.json`"),
        ("auto", "'auto:N'"),
        ("auto:0", "at least 1"),
        ("auto:-1", "at least 1"),
        ("auto:7:", "'auto:N'"),
        ("auto:7:norms", "did you mean 'norm'?"),
        ("every:0", "at least 1"),
        ("every:-1", "at least 1"),
        ("every:x", "at least 1"),
        ("every", "at least 1"),
        ("every:9", "selects no layer"),
        ("", "cannot read ''"),
        ("0-3,", "cannot read ''"),
        ("3-1", "runs backwards"),
        ("-1", "cannot read '-1'"),
        ("1.5", "cannot read '1.5'"),
        ("²", "cannot read"),
        ("evrey:4", "cannot read 'evrey:4'"),
        ("0-999999999", "out of range"),
        ("8", "layers 0 to 7"),
        ([8], "layer 8"),
        ([-1], "-1 is no layer number"),
        ([True], "True is no layer number"),
        ([1.0], "1.0 is no layer number"),
        ([float("nan")], "nan is no layer number"),
        (["1"], "'1' is no layer number"),
        ([], "selects no layer"),
        (3, "write [3]"),
        (None, "is no schedule"),
        ({1, 2}, "is no schedule"),
    ],
)
def test_refuses(schedule, words):
    with pytest.raises(PosencError) as error:
        select_layers(schedule, 8)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("offset", [-1, 4, True, 1.0, "1"])
def test_refuses_an_offset_outside_the_period(offset):
    with pytest.raises(PosencError, match="0 to 3 with every=4"):
        select_layers("every:4", 8, offset=offset)


def test_refuses_an_offset_without_a_period():
    with pytest.raises(PosencError, match="every:N"):
        select_layers("all", 8, offset=1)


@settings(derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=1), st.integers(41, 60))
def test_text_and_list_agree(numbers, num_layers):
    text = ",".join(map(str, numbers))
    assert select_layers(text, num_layers) == select_layers(numbers, num_layers)
    assert chosen(numbers, num_layers) == sorted(set(numbers))


@settings(derandomize=True)
@given(st.integers(1, 12), st.integers(12, 50))
def test_offsets_of_one_period_partition_the_layers(every, num_layers):
    picks = [chosen(f"every:{every}", num_layers, offset=offset) for offset in range(every)]
    assert sorted(index for pick in picks for index in pick) == list(range(num_layers))
