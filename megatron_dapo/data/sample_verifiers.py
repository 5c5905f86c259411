"""Which verifier judges which sample."""

from difflib import get_close_matches

from megatron_dapo.data.field_mapping import PromptFile
from megatron_dapo.data.records import DataError, Row
from reward.check import check_ground_truth
from reward.config import RewardConfig
from reward.registry import VERIFIERS, find
from reward.verdict import VerifierError


class VerifierChoice:
    """The verifier of each row, first that is given: the row's own, its file's, its source's, `reward.verifier`."""

    def __init__(self, reward: RewardConfig, files: tuple[PromptFile, ...]) -> None:
        self._reward = reward
        self._named = {reward.verifier, *reward.by_source.values()}
        self._named |= {file.verifier for file in files if file.verifier is not None}
        self._sources: set[str] = set()

    def of(self, row: Row, file: PromptFile, place: str) -> str:
        """The verifier's name.

        Raises:
            DataError: the row names one that is not known, or code that the config does not name.
        """
        self._sources.add(row.source)
        name = row.verifier or file.verifier or self._reward.by_source.get(row.source, self._reward.verifier)
        try:
            find(name)
        except VerifierError as error:
            raise DataError(f"{place} ({file.columns.verifier_key}): {error}") from None
        if row.verifier and name not in VERIFIERS and name not in self._named:
            raise DataError(
                f"{place}: names verifier {name!r}, which is code that the config does not name; a data file may not "
                "choose code to run: give it in reward.by_source, reward.verifier or the file's data.mixture entry"
            )
        return name

    def check(self, row: Row, verifier: str, place: str) -> None:
        """Whether the verifier can use the row's ground truth. Raises DataError."""
        if row.structured and verifier in VERIFIERS and find(verifier).fast:
            raise DataError(f"{place}: the ground truth is an object or a list; verifier {verifier!r} wants a text")
        try:
            check_ground_truth(verifier, row.answer)
        except VerifierError as error:
            raise DataError(f"{place}: {error}") from None

    def unread_sources(self) -> str | None:
        """What is wrong with `reward.by_source`: a source that no row has; None if nothing is."""
        for source in self._reward.by_source:
            if source not in self._sources:
                near = get_close_matches(source, self._sources, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted(self._sources))}"
                return f"reward.by_source.{source}: no prompt has this source; {hint}"
        return None
