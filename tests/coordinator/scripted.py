"""Prompts for scripted servers, which know a prompt by its ids."""

from collections import Counter

from megatron_dapo.data.order import Span
from megatron_dapo.data.prompts import Prompt, PromptSet
from tests.rollout.script import prompt_ids


def scripted_prompts(count: int, *, answer: str, verifier: str, environment: str | None = None) -> PromptSet:
    """The prompts 0 .. count - 1 of the script, in one source."""
    return PromptSet(
        prompts=tuple(
            Prompt(
                text="",
                answer=answer,
                ids=prompt_ids(index),
                place="",
                source="script",
                verifier=verifier,
                environment=environment,
            )
            for index in range(count)
        ),
        spans=(Span(start=0, count=count, weight=1.0),),
        counts=Counter(rows=count),
        content_hash="",
    )
