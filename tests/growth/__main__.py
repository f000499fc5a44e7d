"""Print the tables of counts: `python -m tests.growth`, some minutes on one core."""

from recipes.benchmark.tools import format_table
from tests.growth.growth import TABLES, count_row

if __name__ == "__main__":
    for table in TABLES:
        rows = [count_row(count, table.sizes) for count in table.rows]
        print(f"by {table.by}\n\n{format_table(rows)}\n")
