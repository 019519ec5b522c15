"""What papers published: statements that a number can contradict, and numbers that were read off their figures.

No torch here.
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any


@dataclasses.dataclass(frozen=True)
class Claim:
    """A published statement, in a form that a number can contradict.

    Attributes:
        id: its short name, e.g. `"E14"`.
        paper: where it was published.
        statement: what is claimed.
        statistic: the number that decides, in words.
        published: the value published, in words.
        source: where in the paper, and how the value was read.
        counter_evidence: what others, or the paper itself, found against it, and what confounds it.
        parts: the names of its parts that decide together, each judged by a study of its own, e.g. `("accuracy",)` for
            `"E8 accuracy"`; none where one study judges the whole.
    """

    id: str
    paper: str
    statement: str
    statistic: str
    published: str
    source: str
    counter_evidence: str = ""
    parts: tuple[str, ...] = ()


@functools.cache
def park_kim_2022() -> dict[str, Any]:
    """The numbers of Park & Kim, How Do Vision Transformers Work? (ICLR 2022), as read off its figures.

    Returns:
        By figure; `"source"` says where all of them are from, `"notes"` how each entry was read. All callers share
        it: copy what you change.
    """
    text = resources.files(__name__).joinpath("park_kim_2022.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
