"""How the second rule for mathematics judges a response: `exact` where the verifier is `robust`, and the reverse."""

from reward.verdict import Judgement, VerificationRequest, VerifierError
from reward.verifiers import exact, robust


def other_accuracy(request: VerificationRequest) -> bool | None:
    """The accuracy by `exact` of a response judged by `robust`, and the reverse. Takes linear time, no process.

    None where there is no second rule: the verifier is not for mathematics, the ground truth is unusable, or only
    algebra could tell. Example: True for `Answer: 42` under `robust`, False for `Answer: 42.`, which `exact` refuses.
    """
    rules = {"robust": exact.judge, "exact": robust.judge}
    rule = rules.get(request.verifier)
    if rule is None:
        return None
    try:
        judged = rule(request)
    except VerifierError:
        return None
    return judged.accuracy if isinstance(judged, Judgement) else None
