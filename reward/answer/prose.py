"""The English around an answer: words that offer another one, deny it, take it back or make it a condition."""

import re

# Between statements on a par: words that offer another one. A plain "and the answer is" goes on to the answer.
_OFFERS = "or|maybe|perhaps|possibly|alternatively|otherwise|else"
CONNECTIVE = re.compile(
    rf"[\W_]*(?:(?:{_OFFERS}|and|either|if not|even)[\W_]*){{1,4}}|(?=.*\b(?:{_OFFERS}|could|might|may)\b)[\W_]*"
    rf"(?:(?:{_OFFERS}|it|that|the|final|answer|is|could|might|may|be|also|equally|even)(?:[\W_]+|$)){{1,9}}",
    re.IGNORECASE | re.DOTALL,
)
# Beside a box. Not `may` and its like: they also stand in sentences about the problem.
DOUBT = re.compile(r"\b(?:or|and|either|neither|nor|not|no|maybe|perhaps|possibly|unless|if)\b", re.IGNORECASE)
DENIED_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot|than|wrong|incorrect)|n['\u2019]t)"
    r"(?: (?:be|equal|possibly|really|the answer))*[\s:$*_(\\]*$"
    r"|\b(?:if|suppose|assum\w{1,3}|imagine|unless|whether)(?: that)?(?: the| my| our)? (?:final )?answer "
    r"(?:is|was|were|be|equals)[\s:$*_(\\]*$",
    re.IGNORECASE,
)
DENIED_AFTER = re.compile(
    r"[\s$*_}).,\\\]]*(?:is|was|would be|seems|looks)\s+(?:clearly |obviously )?"
    r"(?:wrong|incorrect|not|false|impossible)\b|[\s$*_}]*\(?(?:wrong|incorrect|(?:is|was)n['\u2019]t)\b"
    r"|[\s$*_)\]\\]*\?",
    re.IGNORECASE,
)
# In front of `answer:`. Not `than` and its like: they end a sentence whose formula was left out.
DENIED_MARKER = re.compile(
    r"\b(?:wrong|incorrect|not(?: the| an| my| a)?|(?:if|suppose|assum\w{1,3}|whether)(?: that)?(?: the| my)?)"
    r"(?: final)?[\s*_]*$"
)
_ANSWER = r"(?:the|my|this|that) (?:last |final |previous |above |boxed )?(?:answer|result|value)"
_WRONG = r"(?:clearly |obviously |probably |actually )?(?:wrong|incorrect|not (?:right|correct|the answer)|a mistake)\b"
_IS = r"(?:'s|\u2019s| is| was| must be| seems| looks| can't be| cannot be)"
_INTERJECTION = r"(?:wait|hold on|no|hmm+|actually|oops|sorry|oh|but)\b[^.?\n]{0,30}?"
RETRACTION = re.compile(
    rf"(?:\b{_ANSWER}|\b{_INTERJECTION}\b(?:that|this|it)){_IS}\s+{_WRONG}(?!\s*\?|\s+(?:to|that|for)\b)"
    rf"|\bI (?:retract|withdraw|take (?:that|this|it) back|made an? (?:\w+ )?(?:mistake|error))\b"
    rf"|\b(?:scratch|ignore|disregard|forget) (?:that|this|it|{_ANSWER})\b",
    re.IGNORECASE,
)
CONDITION = re.compile(
    r"\b(?:if|whether|would|were|had|not|never|common|check|verify|unless)\b[^.!?\n]*$", re.IGNORECASE
)
