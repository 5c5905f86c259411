"""What the last groups of each prompt say, and whether it is sent when its turn comes: retirement and difficulty pools.

What a step finds out holds from the next one on. Whether a prompt is sent follows from its history and its position
alone, so a resumed run sends the same prompts.
"""

import hashlib

from megatron_dapo.config.algorithm_config import DynamicSamplingConfig
from megatron_dapo.experience.groups import PromptRates, ScoredGroup


class PromptHistory:
    """Kept only where `retire_at` or `pools` asks for it."""

    def __init__(self, config: DynamicSamplingConfig, groups: PromptRates) -> None:
        self._config, self.groups = config, dict(groups)
        self._turns: dict[int, tuple[float, float]] = {}
        """Prompt that is not sent at every turn in this step -> its share of turns, and its pass rate."""
        self.passed: dict[int, float] = {}
        """Position that was passed over in this step -> the pass rate of its prompt."""

    def begin_step(self, rollout_step: int) -> None:
        """Decide what holds in this step."""
        self.passed, self._turns = {}, {}
        for prompt, (step, rates) in self.groups.items():
            rate = sum(rates) / len(rates)
            if len(rates) == self._config.retire_groups and (share := self._share(rate, rollout_step - step)) < 1:
                self._turns[prompt] = share, rate

    def add(self, group: ScoredGroup, rollout_step: int) -> None:
        """A group that was decided in `rollout_step`."""
        if self._config.retire_at is not None or self._config.pools:
            _, before = self.groups.get(group.prompt_index, (0, ()))
            rates = (*before, group.correct / len(group.responses))[-self._config.retire_groups :]
            self.groups[group.prompt_index] = rollout_step, rates

    def passes_over(self, prompt: int, position: int) -> bool:
        """Whether the prompt is not sent at this position; counted in `passed`. As if drawn at random."""
        share, rate = self._turns.get(prompt, (1.0, 0.0))
        drawn = int.from_bytes(hashlib.blake2b(str(position).encode(), digest_size=8).digest()) / 2.0**64
        over = share < 1 and drawn >= share
        if over:
            self.passed[position] = rate
        return over

    def most_passed(self, prompts: int) -> float:
        """Positions that are passed over at most while so many prompts are sent, unless another file has others; after
        more, hardly any is left."""
        shares = [pool.share for pool in self._config.pools if pool.share > 0]
        return 10 * len(self._turns) + ((40 + 2 * prompts) / min(shares) if shares else 0)  # by chance: once in e^40

    def _share(self, rate: float, age: int) -> float:
        """Share of its turns at which a prompt of this pass rate is sent, `age` steps after its last group."""
        config = self._config
        comes_back = config.retire_for is not None and age > config.retire_for
        if config.retire_at is not None and rate >= config.retire_at and not comes_back:
            return 0.0
        reached = [(pool.at_least, pool.share) for pool in config.pools if rate >= pool.at_least]
        return max(reached)[1] if reached else 1.0
