"""Verifier `robust`, the default: the last stated answer, in any dress, equal to the ground truth in value."""

import re
from dataclasses import replace
from functools import lru_cache
from string import ascii_letters

from reward.answer import symbolic
from reward.answer.compare import as_list, by_name, compare, is_equation
from reward.answer.extract import LINE_LIMIT, Statement, last_statement
from reward.answer.number import split_unit, unit_name
from reward.answer.read import Answer, read, read_raw
from reward.answer.text import WORDS, Rewriting, clean, compact, patterns, plain_characters
from reward.verdict import EXTRACTED_LIMIT, Deferred, Judgement, Rule, VerificationRequest, VerifierError, check_length
from reward.verifiers.choice import OPTION, labelled, option

_PATTERNS = patterns("comparison")
_PLAIN_INTEGER = _PATTERNS["plain_integer"]
_PLACEHOLDERS = frozenset(WORDS["placeholders"]["texts"].split())
_PROMPT_LIMIT = 20_000
_one_spelling = Rewriting("spelling")


def judge(request: VerificationRequest) -> Judgement | Deferred:
    """Right if the last statement of the response equals the ground truth; see `Rule` for how that was decided.

    Takes linear time. Where only algebra could tell, the result is a `Deferred`.

    Raises:
        VerifierError: the ground truth is empty or longer than `TRUTH_LIMIT`.
    """
    check_length(request.ground_truth)
    _, _, form = request.verifier.partition(":")  # of `robust:#### {answer}`; a verifier of the user's may ask here too
    statement = last_statement(request.response, request.prompt, form if "{answer}" in form else "")
    if statement is None:
        _truth(request.ground_truth)  # an unusable ground truth is an error whatever the response
        return Judgement(accuracy=False, extracted=None, rule=Rule.NONE)
    if not statement.rivals and len(statement.text) <= LINE_LIMIT:
        plain, wanted = map(_PLAIN_INTEGER.fullmatch, (statement.text, request.ground_truth))
        if plain and wanted:
            return Judgement(accuracy=int(plain[1]) == int(wanted[1]), extracted=plain[1], rule=Rule.INTEGER)
    return _judge_statement(statement, _truth(request.ground_truth), request.prompt[-_PROMPT_LIMIT:])


def _truth(ground_truth: str) -> Answer:
    stated = last_statement(ground_truth) if "\\boxed" in ground_truth else None
    truth = read_raw(stated.text if stated else ground_truth)
    if not truth.text:
        raise VerifierError(f"ground truth {ground_truth[:40]!r} holds no answer")
    return truth


def _judge_statement(statement: Statement, truth: Answer, prompt: str) -> Judgement | Deferred:
    if len(statement.text) > LINE_LIMIT:
        return Judgement(accuracy=False, extracted=clean(statement.text[:EXTRACTED_LIMIT]), rule=Rule.UNREADABLE)
    stated = read_raw(statement.text, sentences=True)
    extracted = stated.text[:EXTRACTED_LIMIT]
    if _is_placeholder(stated.text, truth, prompt):
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.PLACEHOLDER)
    answer = _without_label(_with_rivals(stated, statement, truth), truth)
    if answer is None:
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.HEDGE)
    if not statement.rivals and compact(clean(statement.text)) == compact(truth.text):
        return Judgement(accuracy=True, extracted=extracted, rule=Rule.TEXT)  # whatever a remark in it may say
    extracted = answer.body[:EXTRACTED_LIMIT] if answer.number is not None else extracted
    answer, truth = _as_meant(answer, truth, prompt)
    answer, truth = _as_asked(answer, truth, prompt), _as_asked(truth, answer, prompt)
    ordered = truth.items and (_PATTERNS["parts"].fullmatch(truth.text) or _PATTERNS["ordered"].search(prompt))
    if ordered and not (truth.brackets or answer.brackets):
        answer, truth = (replace(each, text=f"({each.text})", brackets="()") for each in (answer, truth))
    equal, rule = compare(answer, truth) or (None, Rule.UNREADABLE)
    form = symbolic_form(answer, truth) if equal is None else None
    if not equal and form is None:
        return Judgement(accuracy=False, extracted=extracted, rule=rule)
    if rule is not Rule.TEXT and _is_echo(answer, truth, prompt):
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.ECHO)
    if form is not None:
        return Deferred(answer=form[0], truth=form[1], extracted=extracted)
    if _is_of_another(answer, truth, prompt):
        return Judgement(accuracy=False, extracted=extracted, rule=Rule.EQUATION)
    return Judgement(accuracy=True, extracted=extracted, rule=rule)


def _as_meant(answer: Answer, truth: Answer, prompt: str) -> tuple[Answer, Answer]:
    """Both in one form where the question says that the difference is none."""
    answer, truth = _residues(answer, truth, prompt)
    product = _PATTERNS["product"].fullmatch(truth.text)
    if product and re.search(rf"(?<![A-Za-z\\]){product[1]}(?![A-Za-z])", prompt):
        truth = replace(truth, number=None)  # of a mass `m`, no milligrams
    mine, theirs = (set(_PATTERNS["integers"].findall(each.text)) for each in (answer, truth))
    if "\\pi" in truth.text and len(mine) == len(theirs) == 1 and not _PATTERNS["integers"].search(prompt):
        answer = read(_PATTERNS["integers"].sub(min(theirs), answer.text))
    if _PATTERNS["integral"].search(prompt) and all(_PATTERNS["constant"].fullmatch(x.text) for x in (answer, truth)):
        answer = read(answer.text[:-1] + truth.text[-1])
    if truth.number and not answer.contradicts and _PATTERNS["rounding"].search(prompt):
        stated = read(answer.text.removeprefix("\\approx").strip())
        checked = answer.number is not None or "." in truth.body  # to a whole number it may be far away
        rounded = answer.rounded if answer.rounded and checked else stated
        answer = rounded if (compare(rounded, truth) or (False,))[0] else answer
    return answer, truth


def _residues(answer: Answer, truth: Answer, prompt: str) -> tuple[Answer, Answer]:
    """Both as numbers where both are residues of one modulus, or the truth is a number and the question names it."""
    given, wanted = (_PATTERNS["residue"].fullmatch(each.text) for each in (answer, truth))
    if given is None or not (wanted or truth.number):
        return answer, truth
    of, value, modulus = given["of"] or "", int(given["value"]), int(given["modulus"])
    known = (of.endswith("^{-1}") and "inverse" in prompt) or (of.isdigit() and (int(of) - value) % modulus == 0)
    if len(of) > 1 and not known and _spelling(of) not in _spelling(prompt):
        return answer, truth
    if wanted:
        alike = given["modulus"] == wanted["modulus"] and (not of or of == (wanted["of"] or of))
        return (answer, truth) if not alike else (read(str(value % modulus)), read(str(int(wanted["value"]) % modulus)))
    digits = str(modulus).strip("0") == "1" < str(modulus) and _PATTERNS["last_digits"].search(prompt)
    named = digits or given["modulus"] in _PATTERNS["moduli"].findall(prompt)
    return (read(given["value"]) if named and 0 <= value < modulus else answer), truth


def _with_rivals(answer: Answer, statement: Statement, truth: Answer) -> Answer | None:
    """The answer, joined with its rivals to a list if a list was asked for; None if the rivals make it a hedge."""
    texts = statement.rivals + (statement.parts if truth.items else ())
    rivals = [read_raw(rival, sentences=True) for rival in reversed(texts)]
    if rivals and truth.items:
        items = tuple(item for each in (*rivals, answer) for item in ((not each.brackets and each.items) or (each,)))
        return Answer(text=", ".join(item.text for item in items), body="", items=items)
    return answer if all((compare(rival, answer) or (False,))[0] for rival in rivals) else None


def _without_label(answer: Answer | None, truth: Answer) -> Answer | None:
    """The letter of a stated option where a letter was asked for, else the text of that option. The truth, where that
    has both and either is stated."""
    wanted, asked = labelled(truth.text), OPTION["alone"].fullmatch(truth.text)
    if answer is None or not answer.text or (answer.number is not None and not (wanted or asked)):
        return answer
    label = labelled(answer.text)
    if asked:
        in_words = option(answer.text) if OPTION["in_words"].fullmatch(answer.text) else None
        return read(asked[1]) if asked[1] in (label and label[0], in_words) else answer
    if wanted and (answer.text.strip("()") == wanted[0] or (compare(answer, read(wanted[1])) or (False,))[0]):
        return truth
    return read(label[1]) if label and wanted is None else answer


def _as_asked(one: Answer, other: Answer, prompt: str) -> Answer:
    """Values under names as a tuple in the order in which the question lists the names, else as written, where the
    other answer has values alone. Neighbours of the alphabet stay: `y=2, x=1` is `x=1, y=2` whatever the question."""
    names = [item.name for item in one.items]
    distinct = len({"", *names}) > len(names) and len({_PATTERNS["index"].sub("", name) for name in names}) > 1
    if not (prompt and other.items and distinct) or any(item.name for item in other.items):
        return one
    if "".join(sorted(names)) in ascii_letters:
        return one
    name, gap = f"({'|'.join(map(re.escape, names))})", r"[\s,$&\\(){}]{0,6}(?:and)?[\s,$&\\(){}]{1,6}"
    listed = re.findall(r"(?<![A-Za-z\\'])" + name + (gap + name) * (len(names) - 1) + "(?![A-Za-z])", prompt)
    # Words that are not listed: as the question first has them.
    words = all(len(name) > 2 for name in names)
    asked = sorted(names, key=lambda name: prompt.lower().find(name.lower())) if words else names
    order = next((each for each in reversed(listed) if len(set(each)) == len(names)), tuple(asked))
    values = [read(item.body) for item in sorted(one.items, key=lambda item: order.index(item.name))]
    return replace(one, text=f"({', '.join(value.text for value in values)})", items=tuple(values), brackets="()")


def _is_placeholder(text: str, truth: Answer, prompt: str) -> bool:
    """`$Answer`, `N` and the like. If that is the ground truth too, it counts unless the prompt shows `Answer: N`."""
    bare = compact(text).lower()
    if bare not in _PLACEHOLDERS or bare != compact(truth.text).lower():
        return not bare or bare in _PLACEHOLDERS
    return text in [clean(shown.group(1)) for shown in _PATTERNS["shown"].finditer(prompt)]


def _is_of_another(answer: Answer, truth: Answer, prompt: str) -> bool:
    """Whether the value is stated of something for which the question does not ask: of an expression in one unknown, of
    `f(3)` where it has `f(4)`, of minutes where it asks for seconds."""
    bare = truth.number and not truth.number.unit and not {"in", "per"} & set(answer.body.split())  # `4 in total`
    unit = answer.number.unit if answer.number and bare else ""
    pairs = _PATTERNS["asked"].findall(prompt) if unit else ()
    names = {unit_name(word.partition("/")[0]) or "" for pair in pairs for word in pair}
    asked = {name.partition("/")[0] for name in names} - {"", "degree"}
    if unit == "degree" and asked & {"celsius", "fahrenheit"}:
        return False
    if asked and unit.partition("/")[0].rstrip("0123456789") not in asked:
        return True
    if answer.name == truth.name or _spelling(answer.name) in _spelling(prompt):
        return False
    argument = _PATTERNS["argument"].fullmatch(answer.name)
    of_unknown = _PATTERNS["in_one_unknown"].fullmatch(answer.name) is not None
    if of_unknown or argument is None:
        return of_unknown
    # `f(2) = 5` is the maximum of `f(x)`, and `R_{eq}` none of `R_1`, `R_2`.
    other = r"-?\d" if argument["value"] and _PATTERNS["extreme"].search(prompt) else ""
    other = r"\{?(?:\\[a-z]{4,6}\{)?[a-z]{2}" if argument["word"] else other
    return re.search(re.escape(argument[1]) + other, prompt) is not None


def _is_echo(answer: Answer, truth: Answer, prompt: str) -> bool:
    """Whether the answer is an unworked expression that the question already holds, as `84/2` for "What is 84/2?".

    Sums and products of the question's own numbers in their order are that too, however they are padded: `6*(7)*1`.
    """
    if converted := _PATTERNS["converted"].search(prompt):
        given = clean(converted["given"] or converted["number"])
        marks = (_PATTERNS["form"].findall(text.replace("\\frac", "/")) for text in (answer.body, truth.body, given))
        own, wanted, before = map(set, marks)
        if own == before != wanted:
            return True
    unreduced = [each.number is not None and each.number.unreduced for each in (answer, truth)]
    if unreduced == [True, False] and _PATTERNS["reduced"].search(prompt):
        return True
    body = _spelling(answer.body) if prompt and (answer.number is None or answer.number.unreduced) else ""
    if not _PATTERNS["operators"].search(body):
        return False
    return body in _spelling(prompt) or (bool(_PATTERNS["arithmetic"].fullmatch(body)) and _in_order(body, prompt))


def _in_order(body: str, prompt: str) -> bool:
    """Whether the numbers of `body` other than 1, two at least, follow each other in the question."""
    own = [numeral for numeral in _numerals(body) if numeral != "1"]
    asked = _numerals(prompt)
    return len(own) >= 2 and any(asked[at : at + len(own)] == own for at in range(len(asked) - len(own) + 1))


def _numerals(text: str) -> list[str]:
    """`84`, `84.0` and `084` are one."""
    return [found[0].lstrip("0").removesuffix(".0") or "0" for found in _PATTERNS["numerals"].finditer(text)]


@lru_cache(maxsize=256)
def _spelling(text: str) -> str:
    """Without spaces, dollars and layout, so that one expression has one spelling in a question and in an answer."""
    return compact(_one_spelling(plain_characters(text)))


def symbolic_form(answer: Answer, truth: Answer) -> tuple[str, str] | None:
    """Both expressions for math-verify to read, None if algebra has nothing to work on."""
    if len(answer.text) > symbolic.LENGTH_LIMIT:
        return None
    answer, truth = as_list(answer, truth), as_list(truth, answer)
    if any(item.name for item in answer.items) and "=" not in truth.text:  # `x = 1, y = 2` of `(1, 2)`
        values = ", ".join(item.body for item in by_name(answer.items))
        answer = replace(answer, text=f"{truth.brackets[:1]}{values}{truth.brackets[1:]}", body="")
    elif "=" not in answer.text and truth.name and not is_equation(truth):  # `\\sqrt3` of `f(2) = \\sqrt3`
        truth = replace(truth, text=truth.body)
    answered = answer.text if "=" in truth.text else answer.body or answer.text
    factors = set(symbolic.letters(answered))
    if (answer.number is None) != (truth.number is None) and factors == set(symbolic.letters(truth.text)) != set():
        answer = replace(answer, number=None)  # no unit: `\frac13ML^2` of `\frac{ML^2}{3}`
        (truth_text, truth_unit), (answer_text, answer_unit) = (truth.text, ""), (answered, "")
    else:
        truth_text, truth_unit = split_unit(truth.text.lstrip("$"))
        answer_text, answer_unit = split_unit(answered.lstrip("$").replace(" ", "  " if truth_unit else " "))
    if answer_unit and not truth_unit and answer_unit[0] in symbolic.letters(truth_text):
        answer_text, answer_unit = answered, ""  # `\sqrt3\, s^2` of `s^2\sqrt3`
    if answer.number is not None and not answer.number.percent and "=" not in truth.text and "°" not in answer_text:
        answer_text = str(answer.number.value)
    if truth_unit and answer_unit and truth_unit != answer_unit:
        return None
    wanted, given = symbolic.normalise(truth_text, answer_text), symbolic.normalise(answer_text, truth_text)
    if not symbolic.fits(given, wanted) or not symbolic.fits(wanted, wanted):
        return None
    return symbolic.without_capitals(given, wanted), symbolic.without_capitals(wanted, wanted)


def finish(deferred: Deferred) -> Judgement:
    """The verdict of algebra. May never end: call it where it can be killed."""
    equal = symbolic.equivalent(deferred.answer, deferred.truth)
    return Judgement(accuracy=equal, extracted=deferred.extracted, rule=Rule.SYMBOLIC)
