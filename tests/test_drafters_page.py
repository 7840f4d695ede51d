"""docs/drafters.md keeps to the kinds that there are."""

import re

from adapter.drafters.kinds import KINDS
from adapter.drafters.ngram import Ngram
from tests.test_packages import CHECKOUT

PAGE = CHECKOUT / "docs" / "drafters.md"


def test_the_first_table_has_a_row_for_every_kind() -> None:
    table = PAGE.read_text().partition("| kind |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [*KINDS, Ngram.kind]
