"""What tests read of metrics is that metric's alone."""

from tests.support.metric_lines import summed

TEXT = """# TYPE sessions gauge
sessions 3.0
sessions_by_share{share="0"} 4.0
ends{end="done",way="a"} 1.0
ends{end="done",way="b"} 2.0
ends{end="done_late",way="a"} 8.0
"""


def test_a_metric_whose_name_only_begins_so_is_another() -> None:
    assert summed(TEXT, "sessions") == 3.0
    assert summed(TEXT, "session") == 0.0
    assert summed(TEXT, "ends") == 11.0
    assert summed(TEXT, 'ends{end="done"') == 3.0
    assert summed(TEXT, 'ends{end="done",way="b"') == 2.0
    assert summed(TEXT, 'ends{end="done",way="b"}') == 2.0
