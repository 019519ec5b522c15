"""The table of the matrix, for the documentation: what is found in every model, and what is left out.

    python tests/matrix/table.py            prints it
    python tests/matrix/table.py --write    puts it into docs/models.md, between its markers

A test of the matrix fails where the page says something else than is found.
"""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
import oracles
from models import MODELS

if TYPE_CHECKING:
    from test_matrix import Run

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- foreign models: begin -->", "<!-- foreign models: end -->"
KINDS = ("stem", "msa", "conv", "mlp", "subsample")

# What `skipped` says, in few words.
WORDS = {
    "no patch does": "only class tokens attend",
    "rows sum to one": "rows do not sum to one",
    "different grids": "queries and keys on different grids",
    "different places": "queries and keys at different places",
    "over channels": "over channels",
    "more than one position": "no one stream",
    "convolutions in a row": "several convolutions in one unit",
    "something leads around": "several attentions in one unit",
    "no attention map was seen": "linear attention",
}


def row(name: str) -> str:
    """One row, of a model that is measured for it."""
    from test_matrix import measure

    return line(name, measure(name))


def line(name: str, run: "Run") -> str:
    """One row: units by kind, attention maps with their grids, what was left out and why."""
    kinds = Counter(unit.kind for unit in run.units)
    counts = " | ".join(str(kinds[kind] or "") for kind in KINDS)
    maps = "; ".join(text.replace(" x ", " of ", 1) for text in oracles.say_maps(run.maps))
    return f"| {name} | {counts} | {maps or 'none'} | {left_out(run)} |"


def left_out(run: "Run") -> str:
    """Attention that is no map between patches, and streams without units, by the reason."""
    skipped = json.loads(run[next(iter(run.found))].attrs["skipped"])
    reasons = Counter(next((WORDS[piece] for piece in WORDS if piece in reason), reason) for reason in skipped)
    return "; ".join(f"{count}: {reason}" for reason, count in reasons.items())


def table(rows: list[str]) -> str:
    """The whole table in Markdown."""
    head = f"| model | {' | '.join(KINDS)} | attention maps | left out |"
    return "\n".join([head, f"|---|{'---|' * len(KINDS)}---|---|", *rows])


def main() -> None:
    """Print the table, or write it."""
    warnings.simplefilter("ignore")
    text = table([row(name) for name in MODELS])
    if "--write" not in sys.argv:
        print(text)
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
