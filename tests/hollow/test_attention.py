"""The table of attention kernels in the docs is what torch chooses."""

from tests.hollow.attention import BEGIN, END, PAGE, table


def test_the_table_of_the_docs_is_what_torch_chooses() -> None:
    text = PAGE.read_text()
    assert text.split(BEGIN)[1].split(END)[0] == table(), "python -m tests.hollow.attention --write"
