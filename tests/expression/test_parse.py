"""What the language takes, and what it refuses."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FunctionType

import pytest

from autoflash.errors import ExpressionError, InvalidProblemError
from autoflash.expression import limits
from autoflash.expression.expression import Role, of_line, parse
from autoflash.expression.nodes import Kind, Parameter

T = Parameter(name="t", kind=Kind.FLOAT, rank=0)
SLOPES = Parameter(name="slopes", kind=Kind.FLOAT, rank=1)
TABLE = Parameter(name="table", kind=Kind.FLOAT, rank=2)
DOC = Parameter(name="doc", kind=Kind.INT, rank=2)
KEEP = Parameter(name="keep", kind=Kind.BOOL, rank=1)


def text(source: str | Callable[..., object], *parameters: Parameter, role: Role = Role.SCORE_MOD) -> str:
    return parse(source, parameters, role).text


@pytest.mark.parametrize(
    ("source", "canonical"),
    [
        ("score", "score"),
        ("  ( score )  ", "score"),
        ("+score + 0", "score"),
        ("score*2", "score * 2.0"),
        ("2. * score", "score * 2.0"),
        ("-(-score)", "score"),
        ("score - -1", "score + 1.0"),
        ("h + score", "score + float(h)"),
        ("score / 1 ** 3", "score"),
        ("score * (3 - 2)", "score"),
        ("score**1", "score"),
        ("score**-2", "score**-2"),
        ("score**2.0", "score**2"),
        ("score**-1", "1.0 / score"),
        ("(score + 1) * 2 - (3 - score)", "(score + 1.0) * 2.0 - (3.0 - score)"),
        ("score if q_idx >= kv_idx else -inf", "where(kv_idx <= q_idx, score, -inf)"),
        ("where(not (q_idx < kv_idx), score, -inf)", "where(kv_idx <= q_idx, score, -inf)"),
        ("where(~(score < 0), 1, score)", "where(score < 0.0, score, 1.0)"),
        ("where(True and h > 1, score, 0)", "where(1 < h, score, 0.0)"),
        ("score + abs(-q_idx)", "score + float(abs(q_idx))"),
        ("score + (7 // -2) + 7 % -2", "score - 4.0 - 1.0"),
        ("score + 2147483647 + (2147483647 + 1)", "score + 2147483647.0 - 2147483648.0"),
        ("score + floor(q_idx) + floor(2.5) + floor(score)", "score + float(q_idx) + 2.0 + float(floor(score))"),
        ("score + t * t", "score + t * t"),
        ("score + slopes[h]*(q_idx-kv_idx)", "score + slopes[h] * float(q_idx - kv_idx)"),
        ("score + table[h, -1]", "score + table[h, -1]"),
        ("exp(log(tanh(sigmoid(sqrt(sin(cos(score)))))))", "exp(log(tanh(sigmoid(sqrt(sin(cos(score)))))))"),
        ("minimum(maximum(2, score), 3)", "minimum(maximum(score, 2.0), 3.0)"),
        ("score * -2147483648", "score * -2147483648.0"),
        ("h + -2147483648", "float(h + -2147483648)"),
        ("1e-5 * score", "score * 1e-05"),
    ],
)
def test_equal_spellings_have_one_canonical_text(source: str, canonical: str) -> None:
    declared = [each for each in (T, SLOPES, TABLE) if f"{each.name}[" in source or f"{each.name} *" in source]

    assert text(source, *declared) == canonical
    assert text(canonical, *declared) == canonical


@pytest.mark.parametrize(
    ("source", "canonical"),
    [
        ("0 <= q_idx - kv_idx < 5", "q_idx - kv_idx < 5 and 0 <= q_idx - kv_idx"),
        ("(q_idx>=kv_idx) & (h<2) | ~(b==1)", "b != 1 or h < 2 and kv_idx <= q_idx"),
        ("keep[kv_idx] and (doc[b,kv_idx] == doc[b,q_idx])", "doc[b, kv_idx] == doc[b, q_idx] and keep[kv_idx]"),
        ("(h < 2) == (b < 1)", "(b < 1) == (h < 2)"),
        ("not (keep[h] or keep[b])", "not (keep[b] or keep[h])"),
        ("q_idx / 2 > kv_idx", "float(kv_idx) < float(q_idx) / 2.0"),
        ("False", "False"),
    ],
)
def test_masks_are_expressions_too(source: str, canonical: str) -> None:
    declared = [each for each in (DOC, KEEP) if f"{each.name}[" in source]

    assert text(source, *declared, role=Role.MASK_MOD) == canonical
    assert text(canonical, *declared, role=Role.MASK_MOD) == canonical


HOSTILE = [
    "import os",
    "__import__('os').system('true')",
    "score.__class__.__bases__",
    "score.real",
    "(lambda: 0)()",
    "lambda score, b, h, q_idx, kv_idx: score",
    "[score for score in (1, 2)]",
    "{score: 1}",
    "f'{score}'",
    "'score'",
    "b'1'",
    "None",
    "...",
    "1j * score",
    "score\0",
    "score; score",
    "score = 1",
    "(score := 1)",
    "score\nscore",
    "yield score",
    "await score",
    "*score",
    "score @ score",
    "score << 1",
    "score ^ score",
    "score is score",
    "score in (1, 2)",
    "exp(x=score)",
    "exp(*score)",
    "exp(score, score)",
    "exp()",
    "exp",
    "exp[1]",
    "where(h < 1, score)",
    "eval('1')",
    "open('/etc/passwd')",
    "getattr(score, 'real')",
    "slopes[h]",
    "score[0]",
    "exp(score)[0]",
    "torch.where(h < 1, score, 0)",
    "unknown",
    "__builtins__",
    "score ** score",
    "score ** 0.5",
    "score ** 1000",
    "score ** 10**9",
    "score ** 1e999",
    "score ** True",
    "2 ** 9999999 * score",
    "16 ** 16.0 ** 16",
    "99999999999 * score",
    "1e39 * score",
    "1e38 * 1e38 * score",
    "1e999 * score",
    "inf - inf + score",
    "9" * 5000,
    "9" * 4000,
    "a" * 10_000_000,
    "score + " * 100 + "score",
    "(" * 4000,
    "-" * 4000 + "score",
    "not " * 1000 + "score",
    "exp(" * 180 + "score" + ")" * 180,
    "exp(a=" * 90 + "score" + ")" * 90,
    "score" + ".a" * 1000,
    "score" + "[0]" * 1000,
    "(lambda x=" * 90 + "1" + ": 1)" * 90,
    "1 if 1 else " * 300 + "1",
    "\ud800",
    "\u0455core",
    "",
    "   ",
    "# score",
    "score + True",
    "where(score, 1, 2)",
    "where(h < 1, h < 2, score)",
    "score and h < 1",
    "not score",
    "~h",
    "score // 2",
    "score % 2",
    "h // 0 + score",
    "h % 0 + score",
    "score / 0",
    "-True",
    "h < 1",
    "(h < 1) == 1",
    "minimum(h < 1, score)",
]


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_whatever_is_not_of_the_language_is_refused_in_one_line_at_once(source: str) -> None:
    start = time.perf_counter()

    with pytest.raises(ExpressionError) as refusal:
        parse(source)

    # Milliseconds; but machines that run tests are busy.
    assert time.perf_counter() - start < 0.5
    message = str(refusal.value)
    assert 0 < len(message) <= 300
    assert message.isprintable()


def test_a_refusal_is_a_problem_that_is_not_valid() -> None:
    assert issubclass(ExpressionError, InvalidProblemError)


@pytest.mark.parametrize(
    ("source", "role", "reason"),
    [
        ("score.exp()", Role.SCORE_MOD, "is no function of the language: it has abs, cos"),
        ("score.real", Role.SCORE_MOD, "no attributes; functions are called by their name alone"),
        ("float('-inf') + score", Role.SCORE_MOD, "constants are numbers, True, False and inf"),
        ("score + bias", Role.SCORE_MOD, "bias is not known here: .* pass anything else as a parameter by that name"),
        ("score > 0", Role.MASK_MOD, "score is not known here"),
        ("score > 0", Role.SCORE_MOD, "score_mod must give a number, got a bool"),
        ("q_idx - kv_idx", Role.MASK_MOD, "mask_mod must give a truth such as q_idx >= kv_idx, got a int"),
        ("score * (q_idx >= kv_idx)", Role.SCORE_MOD, r"use where\(condition, 1.0, 0.0\)"),
        ("score // 2", Role.SCORE_MOD, r"// takes integers, got a float: use floor\(x / y\)"),
        ("3000000000 + score", Role.SCORE_MOD, "write it as a float"),
    ],
)
def test_a_refusal_says_what_to_write(source: str, role: Role, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        parse(source, (), role)


@pytest.mark.parametrize(
    ("source", "parameters", "reason"),
    [
        ("score", [T], "score_mod does not depend on t"),
        ("score + t * 0 + h * 0", [SLOPES, T], "does not depend on slopes"),
        ("score + slopes", [SLOPES], "slopes is a tensor of rank 1"),
        ("score + slopes[h, 0]", [SLOPES], "slopes takes 1 indices, got 2"),
        ("score + slopes[score]", [SLOPES], "an index of slopes must be an integer, got a float"),
        ("score + slopes[h < 1]", [SLOPES], "an index of slopes must be an integer, got a bool"),
        ("score + slopes[0:1]", [SLOPES], "is not of the language"),
        ("score + t[0]", [T], "t takes 0 indices, got 1"),
        ("score + t", [T, T], "the parameter t is declared twice"),
        ("score", [Parameter(name="score", kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score", [Parameter(name="exp", kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score", [Parameter(name="__x", kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score", [Parameter(name="a b", kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score", [Parameter(name="lambda", kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score", [Parameter(name="\u0455", kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score", [Parameter(name="a" * 33, kind=Kind.INT, rank=0)], "is no name for a parameter"),
        ("score + x", [Parameter(name="x", kind=Kind.INT, rank=5)], "rank 5: at most 4"),
        ("score", [Parameter(name=f"x{i}", kind=Kind.INT, rank=0) for i in range(17)], "at most 16 parameters, got 17"),
    ],
)
def test_parameters_are_what_they_were_declared_to_be(source: str, parameters: list[Parameter], reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        parse(source, parameters)


def test_an_expression_may_be_as_large_as_it_says() -> None:
    deep = "exp(" * (limits.DEPTH - 3) + "score" + ")" * (limits.DEPTH - 3)
    wide = f"({' + '.join(['score'] * 16)})"
    many = f"{wide} * {wide} * {wide} * {wide}"

    assert text(deep) == deep
    assert text(many).count("score") == 64


def test_parameters_are_named_in_one_order() -> None:
    one, other = parse("score + t + slopes[h]", [T, SLOPES]), parse("score + t + slopes[h]", [SLOPES, T])

    assert one == other
    assert one.key == other.key
    assert [parameter.name for parameter in one.parameters] == ["slopes", "t"]


def test_one_line_holds_all_of_an_expression() -> None:
    expression = parse("doc[b, q_idx] == doc[b, kv_idx] or keep[h]", [DOC, KEEP], Role.MASK_MOD)

    assert str(expression) == "mask_mod(doc: int 2, keep: bool 1) = doc[b, kv_idx] == doc[b, q_idx] or keep[h]"
    assert of_line(str(expression)) == expression


@pytest.mark.parametrize(
    "line",
    [
        "",
        "score",
        "score_mod() = 2 * score",
        "score_mod(t: float 0) = score",
        "score_mod(t: double 0) = score + t",
        "score_mod(t) = score + t",
        "value_mod() = score",
        "mask_mod() = score",
        "score_mod() = score.real",
        "score_mod() = " + "score + " * 10_000,
    ],
)
def test_a_line_that_was_never_written_is_refused(line: str) -> None:
    with pytest.raises(ExpressionError, match="is no recorded expression"):
        of_line(line)


SIX = 6.0


def test_a_lambda_is_read_and_not_called() -> None:
    assert text(lambda score, b, h, q_idx, kv_idx: where(q_idx >= kv_idx, score, -inf)) == (  # noqa: F821
        "where(kv_idx <= q_idx, score, -inf)"
    )
    assert text(lambda s, batch, head, q, kv: s * 2 + (q - kv)) == "score * 2.0 + float(q_idx - kv_idx)"
    assert text(lambda b, h, q, kv: q >= kv, role=Role.MASK_MOD) == "kv_idx <= q_idx"


def test_lambdas_of_one_line_are_told_apart() -> None:
    one, other = (lambda score, b, h, q, kv: score + 1), (lambda score, b, h, q, kv: score + 1.5)

    assert (text(one), text(other)) == ("score + 1.0", "score + 1.5")


def test_a_lambda_may_stand_in_many_lines_and_in_the_middle_of_one() -> None:
    mods = [
        lambda score, b, h, q_idx, kv_idx: (
            score
            # between two
            + q_idx
        ),
        4,
    ]
    assert text(mods[0]) == "score + float(q_idx)"


def test_parameters_of_a_lambda_are_names_or_arguments() -> None:
    slopes = object()

    assert text(lambda score, b, h, q, kv: score + slopes[h], SLOPES) == "score + slopes[h]"  # type: ignore[index]
    assert text(lambda score, b, h, q, kv, t: score + t, T) == "score + t"
    assert text(lambda score, b, h, q, kv: score + table[h, q], TABLE) == "score + table[h, q_idx]"  # noqa: F821


def test_a_function_that_returns_an_expression_serves_as_well() -> None:
    def relative(score, b, h, q, kv):
        """The distance, added."""
        return score + (q - kv)

    assert text(relative) == "score + float(q_idx - kv_idx)"


def test_what_a_lambda_captured_is_refused_by_name() -> None:
    seven = 7.0

    with pytest.raises(ExpressionError, match=r"seven is not known here: .* pass anything else as a parameter"):
        text(lambda score, b, h, q, kv: score + seven)
    with pytest.raises(ExpressionError, match="SIX is not known here"):
        text(lambda score, b, h, q, kv: score + SIX)


def statements(score, b, h, q, kv):
    score = score * 2
    return score + h


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda score: score, r"takes \(score, b, h, q_idx, kv_idx\) and parameters, got \(score\)"),
        (lambda score, b, h, q, kv, extra: score, "got .*extra"),
        (lambda score, b, h, q, kv=1: score, "have no defaults"),
        (lambda *score: score, "plain names"),
        (lambda score, b, h, q, kv: (lambda: score)(), "is no function of the language"),
        (lambda score, b, h, q, kv: score.exp(), "is no function of the language"),
        (statements, "statements does more than return an expression"),
        (len, "is a string or a lambda, got builtin_function_or_method"),
        (3, "is a string or a lambda, got int"),
        (None, "is a string or a lambda, got NoneType"),
        (b"score", "is a string or a lambda, got bytes"),
    ],
)
def test_other_functions_are_refused(function: Callable[..., object], reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        parse(function)


def test_a_lambda_without_a_file_is_refused() -> None:
    with pytest.raises(ExpressionError, match=r"there is no source of a function in '<nowhere>': give .* as a string"):
        parse(eval(compile("lambda score, b, h, q, kv: score", "<nowhere>", "eval")))


def test_a_lambda_whose_file_has_changed_is_refused(tmp_path) -> None:
    path = tmp_path / "mods.py"
    path.write_text("mod = lambda score, b, h, q, kv: score + 1\n")
    names: dict[str, FunctionType] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)

    path.write_text("mod = lambda score, b, h, q, kv: score + 2\n")
    with pytest.raises(ExpressionError, match="is not there any more: give the expression as a string"):
        parse(names["mod"])
    path.write_text("mod = 3\n")
    with pytest.raises(ExpressionError, match="is no lambda: give the expression as a string"):
        parse(names["mod"])
