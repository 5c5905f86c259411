"""Which extracted answers are the same, as a key to count by."""

from collections.abc import Hashable

from reward.answer.read import read
from reward.answer.text import clean, compact


def answer_key(extracted: str) -> Hashable:
    """Equal for answers that are equal numbers (`0.5`, `1/2`) or equal texts up to spacing and LaTeX layout.

    Finer than the verifiers: answers that only algebra would find equal have different keys.
    """
    answer = read(clean(extracted))
    return answer.number.value if answer.number is not None else compact(answer.text)
