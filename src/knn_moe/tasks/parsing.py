"""Parse a model's output: a choice, a number or a program, or None if it does not give one.

Knows text only: neither the question nor the right answer. A model's reasoning is not its answer:
nothing in an unfinished reasoning block counts. (If the block was opened in the prompt and never
ends, it cannot be told from an answer and is parsed as one.) In doubt the result is None, never a
guess, and counts as wrong.
"""

from __future__ import annotations

import ast
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from knn_moe.reference.quiz import LETTERS

# GPT-OSS, with its special tokens, and without them.
_FINAL: Final = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_BARE_CHANNEL: Final = re.compile(r"\s*analysis(?=\w)")
_TOKEN: Final = re.compile(r"<\|[a-z_]+\|>")
_LEADING_TOKENS: Final = re.compile(r"(?:\s*<\|[a-z_]+\|>)*")
_DASHES: Final = str.maketrans("−–‐‑", "----")

# A base model often continues after its answer, with a question in the form of the prompt.
_NEXT_QUESTION: Final = re.compile(
    r"^[^\S\n]*(?:Q:|Question(?:\s+\d+)?\s*:|What is the correct answer to this question:)", re.M
)

# "The correct answer is", "Answer:", "the best option would be", up to the letter.
_CUE: Final = re.compile(
    r"""
    (?i:
        (?: \banswer (?:\s+(?:choice|option|letter))?
          | \b(?:correct|right|best) \s+ (?:option|choice|letter|one|response|statement) )
        ["']?
        (?: \s*,[^,.\n]{1,30}, | \s+(?:to|for|of|here)\b [^.\n:()]{0,80}? )?
        \s* (?: \bis\b | : | =
              | \b(?:would|should|must|will|has\s+to)\s+(?:(?:then|thus|therefore)\s+)?be\b )
      | 答案 \s* (?:应该|应)? (?:是|为|选|:)
      | (?m:^)[^\S\n]*A:  # for "Answer:"
    )
    \s* (?:[:\-]\s*)?
    (?i: (?: therefore | thus | hence | (?:most\s+)?likely | probably | definitely | clearly
           | indeed | actually | simply | still | option | choice | letter | the ) [,:]?\s+ )*
    """,
    re.X,
)
_DENIED: Final = re.compile(
    r"""
    (?: \b(?:if|whether|unless|suppose|assuming)
      | (?:\bnot|n['’]t) \s+ (?:think|believe|say|mean|claim|true|sure) ) \s+
    (?:that\s+)? (?:(?:the|my|correct|right|best|final|only)\s+)* \Z
    | \b(?:wrong|incorrect|worst) \s+ \Z
    """,
    re.X | re.I,
)
_EITHER: Final = re.compile(r"(?:either|both|neither)\b", re.I)

# What may follow a letter without brackets. Only words that cannot follow an article: "Answer: B
# cells" and "A patient" are the texts of choices.
_AFTER: Final = r"""(?=
    \s*(?: [)\],;:!?"”/&}] | \.(?!\w) | \n | \Z )
  | \s+(?: \( | -\s | (?i:because|since|as|due|for|in|and|or|are|here|given|based|which)\b )
)"""
_LETTER: Final = rf"""
    (?: [(\["'“‘] \s* (?P<quoted>[A-Za-z]) \s* (?: [)\]"'”’.:]+ | \Z )
      | (?P<bare>[A-Zb-z] {_AFTER} | a(?=[.)\]:])) [)\]"”]* )
"""
_CHOICE: Final = re.compile(_LETTER, re.X)
_AND_CHOICE: Final = re.compile(
    rf"""
    (?: [^\S\n]* (?: ,[^\S\n]*(?:and\b|or\b)? | and\b | or\b | & | / ) [^\S\n]*
      | (?<=\)) [^\S\n]* (?=\() )
    (?i:option\s+|choice\s+)? {_LETTER} {_AFTER}
    """,
    re.X,
)
_VERDICT: Final = re.compile(
    r"""
    (?: ^(?:[^\S\n]|[-•])* | (?<=[.!?:]\s) )
    (?i: (?: so | thus | therefore | hence | option | choice | answer ) ,?\s+ )*
    [(\["']? ([A-Z]) [)\]"']? \s+
    (?i: is \s+ (?:the\s+)? (?:most\s+)? (?:correct|right|best) (?:\s+(?:answer|option|choice))? )
    \s* (?= [.!,;\n] | \Z | (?:because|since|as)\b )
    """,
    re.X | re.M,
)
# Not "A:", which opens an answer as often as it names the first choice.
_LONE: Final = re.compile(
    r"""
    [\s\#>\-]* (?i:option\s+|choice\s+)?
    (?: [(\["'] \s* (?P<quoted>[A-Za-z]) \s* [)\]"'] [.:]?
      | (?P<bare>[A-Z]) (?: [).](?=\s|\Z) | (?<!A):(?=\s) | \s+-(?=\s) | (?=,|\s*\Z) ) )
    """,
    re.X,
)

_DIGITS: Final = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,30}(?![0-9])|[0-9]{1,100}(?![0-9]))"
_NUMERAL: Final = rf"""
    (?P<sign>(?<![\w)])[-+])?
    (?: (?<!\w)(?<![0-9]\.) (?P<whole>{_DIGITS})
        (?: \.(?P<part>[0-9]{{1,100}}) | /(?P<under>(?=0*[1-9])[0-9]{{1,18}}(?![0-9])) )?
      | (?<![\w.])\.(?P<only>[0-9]{{1,100}}) )
"""
_NUMBER: Final = re.compile(_NUMERAL, re.X)
_RESULT: Final = re.compile(rf"=\s*{_NUMERAL}", re.X)
_STATEMENT: Final = re.compile(
    r"""
    (?: \banswer (?: \s*,[^,.\n]{1,30}, | \s+(?:to|for)\b [^.\n:]{0,80}? )?
        \s* (?: \bis\b | \b(?:would|should|must)\s+be\b | : | = )
      | \#{4} | 答案 \s* (?:是|为|:) )
    (?! \s*not\b ) \s*
    """,
    re.X | re.I,
)
_CLAUSE_END: Final = re.compile(r"\n|[.!?](?=\s|\Z)|(?<=[\w%])\s*\(")
_CLAUSE: Final = 200  # characters at most: a model may repeat itself endlessly

_FENCE: Final = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n`]*\n", re.M)
_PYTHON: Final = frozenset({"", "python", "python3", "py"})
_DEFINITION: Final = re.compile(r"^[ \t]*(?:async[ \t]+)?(?:def|class)\b", re.M)


def _visible_text(output: str) -> str:
    """Return the output without reasoning and without special tokens."""
    output = output.replace("\r\n", "\n")
    if "<|channel|>" in output:
        _, *finals = _FINAL.split(output)
        output = finals[-1] if finals else ""
    elif _BARE_CHANNEL.match(output):
        output = output.partition("assistantfinal")[2]
    output = re.split(r"(?i)</think(?:ing)?>", output)[-1]
    output = re.split(r"(?i)<think(?:ing)?>", output)[0]
    leading = _LEADING_TOKENS.match(output)
    return _TOKEN.split(output[leading.end() if leading else 0 :])[0]


def parse_letter(output: str, count: int) -> int | None:
    """Return the index of the choice that the output claims is right, or None.

    The last claim ("the correct answer is (B)", "Answer: B", \\boxed{B}) decides. Without a claim,
    verdicts ("Option B is correct") decide if they agree, then a letter that opens the output. A
    claim of several letters, or of a letter beyond the `count` choices, gives None.
    """
    for part in _split_questions(output):
        # The "(X)" of the prompt, repeated, is not a claim.
        has_x = count > LETTERS.index("X")
        claims = [letter for letter in _find_claims(part) if letter != "X" or has_x]
        letter = claims[-1] if claims else _find_verdict(part)
        letter = _find_opening_letter(part) if letter is None else letter
        if letter is not None:
            index = LETTERS.index(letter) if letter else count
            return index if index < count else None
    return None


def parse_number(output: str) -> str | None:
    """Return the number that the output ends with, in a normal form, or None.

    The number of the last statement ("The answer is", "####", \\boxed{}) decides, then the one
    after the last "=", then the last number. The normal form has no commas, no signs of currency or
    percent, and no needless zeros; a fraction is in lowest terms.
    """
    for part in _split_questions(output):
        stated = [number for text in _find_statements(part) if (number := _first_number(text))]
        numbers = stated or list(_RESULT.finditer(part)) or list(_NUMBER.finditer(part))
        if numbers:
            return _format_number(numbers[-1])
    return None


def same_number(first: str, second: str) -> bool:
    """Return whether two texts have exactly the same value, as "1/2" and "0.50" have."""
    one, other = parse_number(first), parse_number(second)
    return one is not None and other is not None and Fraction(one) == Fraction(other)


def parse_program(output: str) -> str | None:
    """Return the last ```python block that defines something, or else the last block.

    Complete blocks are preferred to an unfinished one, and marked blocks to plain ones. Without a
    block, the whole output is the program if it compiles and is more than an expression (a single
    word would be one). Otherwise the result is None.
    """
    text = _visible_text(output)
    blocks = _find_blocks(text)
    if not blocks:
        tree = _parse_python(_dedent(text))
        is_program = tree is not None and any(not isinstance(line, ast.Expr) for line in tree.body)
        return _dedent(text) if is_program else None
    return _dedent(next((code for code in blocks if _DEFINITION.search(code)), blocks[0]))


def complete_function(prompt: str, output: str, entry_point: str) -> str:
    """Return the whole function `entry_point` that `prompt` begins.

    If the output defines the function, the definition follows the prompt's imports and helpers.
    Otherwise the output is taken for the body, up to the first line that is not part of it.
    """
    text = _visible_text(output)
    blocks = _find_blocks(text)
    definition = re.compile(rf"^def {re.escape(entry_point)}\b", re.M)
    for code in map(_dedent, blocks or [_extract_function(text, definition)]):
        if _defines(code, entry_point, definition):
            begun = definition.search(prompt)
            return f"{prompt[: begun.start()] if begun else ''}{code}\n"
    return _add_body(prompt, (blocks[0] if blocks else text).strip("\n"))


def _split_questions(output: str) -> Iterator[str]:
    """Return the normalised output, split where a new question begins."""
    return iter(_NEXT_QUESTION.split(_strip_markup(_normalise(_visible_text(output)))))


def _normalise(text: str) -> str:
    """Replace full-width and styled characters by plain ones, and drop invisible ones."""
    if text.isascii():
        return text
    # GPT-OSS groups digits with narrow spaces.
    text = re.sub("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))", ",", text)
    kept = (
        # ² and ½ (category No) would change the number next to them.
        letter if unicodedata.category(letter) == "No" else unicodedata.normalize("NFKC", letter)
        for letter in text
        if unicodedata.category(letter) != "Cf"
    )
    return "".join(kept).translate(_DASHES)


def _strip_markup(text: str) -> str:
    """Remove Markdown, HTML and LaTeX; a box becomes a claim on a line of its own."""
    text = re.sub(r"-\s?\\?\$(?=\s?[0-9.])", "-", text.replace("{,}", ","))
    text = re.sub(r"\\[,!;]", "", text)
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm|sf))\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)(?:\}|\Z)", r"\nanswer: \1\n", text)
    return re.sub(r"\\[()\[\]$]|[*_`$]|</?(?:b|i|u|em|strong|p|br|span)\s*/?>", " ", text)


def _find_claims(text: str) -> list[str]:
    """Return the letter that each claim names, or "" if it names several."""
    found = []
    for cue in _CUE.finditer(text):
        if _DENIED.search(text, max(0, cue.start() - 60), cue.start()):
            continue
        choice = _CHOICE.match(text, cue.end())
        if _EITHER.match(text, cue.end()):
            found.append("")
        elif choice:
            found.append(_only_letter(choice, text))
    return found


def _only_letter(choice: re.Match[str], text: str) -> str:
    """Return the letter, or "" if another one follows, as in "(A) or (B)" or "A, C and D"."""
    letter = _letter(choice)
    following: re.Match[str] | None = choice
    while following and (following := _AND_CHOICE.match(text, following.end())):
        if _letter(following) != letter:
            return ""
    return letter


def _letter(choice: re.Match[str]) -> str:
    return (choice["quoted"] or choice["bare"]).upper()


def _find_verdict(text: str) -> str | None:
    """Return the only letter that is called correct, or "" if several are."""
    letters = set(_VERDICT.findall(text))
    return None if not letters else letters.pop() if len(letters) == 1 else ""


def _find_opening_letter(text: str) -> str | None:
    """Return the letter that opens the text, or "" if other lines open with other letters."""
    lines = [line for line in text.splitlines() if line.strip()]
    choices = [(choice, line) for line in lines if (choice := _LONE.match(line))]
    if not choices or not _LONE.match(lines[0]):
        return None
    letters = {_only_letter(choice, line) for choice, line in choices}
    return letters.pop() if len(letters) == 1 else ""


def _find_statements(text: str) -> Iterator[str]:
    """Yield the rest of the clause after each "The answer is"."""
    for statement in _STATEMENT.finditer(text):
        yield _CLAUSE_END.split(text[statement.end() : statement.end() + _CLAUSE], 1)[0]


def _first_number(clause: str) -> re.Match[str] | None:
    """Return the first number of a clause, or its result if the clause is a calculation."""
    return _NUMBER.search(clause.rpartition("=")[2]) or _NUMBER.search(clause)


def _format_number(number: re.Match[str]) -> str:
    sign = "-" if number["sign"] == "-" else ""
    whole = (number["whole"] or "").replace(",", "")
    if number["under"]:
        return str(Fraction(int(sign + whole), int(number["under"])))
    part = (number["part"] or number["only"] or "").rstrip("0")
    digits = (whole.lstrip("0") or "0") + (f".{part}" if part else "")
    return digits if digits == "0" else sign + digits


def _find_blocks(text: str) -> list[str]:
    """Return the blocks of code, the best first: complete, then marked as Python, then late."""
    found = []
    at = 0
    while fence := _FENCE.search(text, at):
        language, end = fence[1].lower(), text.find("```", fence.end())
        code = text[fence.end() : end if end >= 0 else len(text)]
        if language in _PYTHON and code.strip():
            found.append((end >= 0, bool(language), code))
        if end < 0:
            break
        at = end + 3
    found.sort(key=lambda block: block[:2])
    return [code for *_, code in reversed(found)]


def _dedent(code: str) -> str:
    return textwrap.dedent(code).strip("\n").rstrip()


def _parse_python(code: str) -> ast.Module | None:
    """Return the syntax tree of the code, or None if it does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
            compile(tree, "<output>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree


def _defines(code: str, name: str, definition: re.Pattern[str]) -> bool:
    tree = _parse_python(code)
    if tree is None:  # truncated or wrong, but meant as the function
        return definition.search(code) is not None
    names = {line.name for line in tree.body if isinstance(line, ast.FunctionDef | ast.ClassDef)}
    assigned = [line for line in tree.body if isinstance(line, ast.Assign)]
    names |= {at.id for line in assigned for at in line.targets if isinstance(at, ast.Name)}
    return name in names


def _extract_function(text: str, definition: re.Pattern[str]) -> str:
    """Return a text that compiles unchanged; of another, the function in it, if there is one."""
    begun = definition.search(text)
    if begun is None or _parse_python(text) is not None:
        return text
    first, _, rest = text[begun.start() :].partition("\n")
    return f"{first}\n{_take_body(rest)}"


def _take_body(text: str) -> str:
    """Return the lines up to the first unindented one, ignoring closing brackets and comments."""
    lines = text.split("\n")
    leaves = (at for at, line in enumerate(lines) if re.match(r"[^\s)\]}#]", line))
    return "\n".join(lines[: next(leaves, len(lines))]).rstrip() + "\n"


def _add_body(prompt: str, text: str) -> str:
    """Return the prompt and the body, whose indentation the model may have omitted."""
    begun = prompt if prompt.endswith("\n") else prompt + "\n"
    if text[:1].isspace():
        return begun + _take_body(text)
    whole = begun + textwrap.indent(text, "    ") + "\n"
    return whole if _parse_python(whole) is not None else begun + _take_body("    " + text)
