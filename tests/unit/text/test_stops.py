"""Stop texts are never shown, whatever pieces they arrive in."""

from hypothesis import given
from hypothesis import strategies as st

from master.text.stops import StopFilter


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_what_is_shown_is_the_text_up_to_the_first_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    filter_, shown, rest = StopFilter(stops), "", text
    while rest and not filter_.stopped:
        size = data.draw(st.integers(1, len(rest)))
        shown += filter_.push(rest[:size])
        rest = rest[size:]
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
    ends = [text.find(stop) for stop in stops if stop in text]
    if filter_.stopped:
        assert ends
        assert len(shown) <= max(ends)
    else:
        assert shown + filter_.flush() == text
        assert not ends
