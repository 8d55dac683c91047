"""The table itself: rows that can be told apart, and the page that shows them."""

from helpers import REPOSITORY
from table import GROUPS, counts, load

PAGE = REPOSITORY / "docs" / "reliability.md"


def test_every_case_has_a_group_and_a_name_of_its_own():
    cases = load()
    assert {each.group for each in cases} == GROUPS.keys()
    names = [(each.group, each.name) for each in cases]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert all(each.done and each.seen for each in cases)


def test_the_page_shows_how_many_there_are():
    """Anew: what tests/faults/table.py prints first, between the two marks of the page."""
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- of tests/faults/table.py -->\n")
    shown, end, _ = rest.partition("<!-- end -->")
    assert before and mark and end
    assert shown == counts(load())
