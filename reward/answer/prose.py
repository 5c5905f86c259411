"""The English around an answer: words that offer another one, deny it, take it back or make it a condition.

Every pattern is built of the same classes of words, so that a word belongs to a class in all of them.
"""

import re

_OFFERS = "or|maybe|perhaps|possibly|alternatively|otherwise|else|could|might|may"
_NOT = r"not|never|cannot|than|\w{0,9}n['\u2019]t"
_WRONG = r"(?:clearly |obviously |probably |actually )?(?:wrong|incorrect|false|impossible|a mistake)"
_IF = r"if|suppose|assum\w{1,3}|imagine|unless|whether"
_IS = r"(?:is|was|were|be|equals|must be|would be|seems|looks|can(?:'t|not) be)"
_ANSWER = r"(?:the|my|our|this|that) (?:last |final |correct |previous |above |boxed )?(?:answer|result|value)"

# Between statements on a par: words that offer another one. A plain "and the answer is" goes on to the answer.
CONNECTIVE = re.compile(
    rf"[\W_]*(?:and|either)[\W_]*|(?=.*\b(?:{_OFFERS})\b)[\W_]*"
    rf"(?:(?:{_OFFERS}|and|either|if|not|even|also|equally|it|that|the|final|answer|is|be)(?:[\W_]+|$)){{1,9}}",
    re.IGNORECASE | re.DOTALL,
)
DOUBT = re.compile(rf"\b(?:{_OFFERS}|and|either|neither|nor|not|no|{_IF})\b", re.IGNORECASE)
# In front of a box or of the word `answer`.
DENIED_BEFORE = re.compile(
    rf"(?:(?<!\w)(?:{_NOT}|wrong|incorrect)(?: (?:be|equal|possibly|really|an?|my|the))*"
    rf"|\b(?:{_IF})(?: that)?(?: the| my| our)?(?: final)?(?: answer {_IS})?)(?: final)?[\s:$*_(\\]*$",
    re.IGNORECASE,
)
DENIED_AFTER = re.compile(
    rf"[\s$*_}}).,\\\]]*(?:{_IS}\s+(?:not\b|{_WRONG}\b)|\(?(?:wrong|incorrect|(?:is|was)n['\u2019]t)\b|\?)",
    re.IGNORECASE,
)
_INTERJECTION = r"(?:wait|hold on|no|hmm+|actually|oops|sorry|oh|but)\b[^.?\n]{0,30}?\b(?:that|this|it)"
RETRACTION = re.compile(
    rf"\b(?:{_ANSWER}|{_INTERJECTION})(?:['\u2019]s| {_IS})\s+(?:{_WRONG}|not (?:right|correct|the answer))\b"
    r"(?!\s*\?|\s+(?:to|that|for)\b)"
    r"|\bI (?:retract|withdraw|take (?:that|this|it) back|made an? (?:\w+ )?(?:mistake|error))\b"
    rf"|\b(?:scratch|ignore|disregard|forget) (?:that|this|it|{_ANSWER})\b",
    re.IGNORECASE,
)
CONDITION = re.compile(rf"\b(?:{_IF}|would|were|had|not|never|common|check|verify)\b[^.!?\n]*$", re.IGNORECASE)
