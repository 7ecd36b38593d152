"""What a template that stands for the last message names of a row."""

import pytest

from valor.errors import UserError
from valor.trainer.prompt_templates import columns_of, filled

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]


def test_the_last_message_is_the_template():
    told = filled("{prompt} It is {ground_truth}, {hint}.", "key", ASKED, columns_of("s", 2, {"hint": 0}))
    assert told == [ASKED[0], {"role": "user", "content": "1+1= It is 2, 0."}]


@pytest.mark.parametrize("columns", [columns_of("s", "2", {"other": 1}), columns_of("s", "2", {"hint": None})])
def test_a_row_that_lacks_a_column_or_has_null_there_is_refused(columns):
    with pytest.raises(
        UserError, match=r"key has \{hint\} in it, and a row has no such column, or null there: it has data_source"
    ):
        filled("{prompt} {hint}", "key", ASKED, columns)
