"""What the functions of a generated module can be: for each form its names, its wording, its body and the bugs it can have.

In wordings and bodies ``{a} {b} {c}`` are arguments, ``{k} {m}`` constants with k < m. A fault replaces the one place where
``good`` stands in the body by ``bad``. Bodies are indented by four spaces when they are written.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a form goes wrong."""

    kind: str
    good: str
    bad: str


@dataclass(frozen=True, slots=True)
class Form:
    """``inputs`` has one letter per argument: i number, p positive number, l list, s string, t short string, b truth."""

    names: tuple[str, ...]
    inputs: str
    docs: tuple[str, ...]
    body: str
    faults: tuple[Fault, ...]


OPERATOR, COMPARE, SWAP, CONSTANT = "wrong operator", "wrong comparison", "swapped arguments", "wrong constant"
OFF_BY_ONE, INVERTED, RETURN, CALL = "off by one", "inverted condition", "missing return", "wrong function"
START, RESULT = "wrong start value", "wrong result"


def _form(names: str, inputs: str, docs: tuple[str, ...], body: str, *faults: tuple[str, str, str]) -> Form:
    """A form; one that is a single return statement can also lose its ``return``."""
    every = [Fault(*fault) for fault in faults]
    if body.startswith("return ") and "\n" not in body:
        every.append(Fault(RETURN, body, body.removeprefix("return ")))
    return Form(tuple(names.split()), inputs, docs, body, tuple(every))


FORMS: tuple[Form, ...] = (
    _form(
        "add plus combine join_up put_together",
        "ii",
        ("Return {a} plus {b}.", "Return the sum of {a} and {b}.", "Add {a} and {b}."),
        "return {a} + {b}",
        (OPERATOR, "{a} + {b}", "{a} - {b}"),
        (OPERATOR, "{a} + {b}", "{a} * {b}"),
    ),
    _form(
        "minus subtract difference remaining take_away",
        "ii",
        ("Return {a} minus {b}.", "Subtract {b} from {a}.", "Return what is left of {a} without {b}."),
        "return {a} - {b}",
        (OPERATOR, "{a} - {b}", "{a} + {b}"),
        (SWAP, "{a} - {b}", "{b} - {a}"),
    ),
    _form(
        "times multiply area scale product_of",
        "ii",
        ("Return {a} times {b}.", "Return the product of {a} and {b}.", "Multiply {a} by {b}."),
        "return {a} * {b}",
        (OPERATOR, "{a} * {b}", "{a} + {b}"),
        (OPERATOR, "{a} * {b}", "{a} - {b}"),
    ),
    _form(
        "fits whole_parts divide share_out boxes",
        "ip",
        (
            "Return how often {b} fits in {a}.",
            "Divide {a} by {b}, rounded down.",
            "Return the whole part of {a} over {b}.",
        ),
        "return {a} // {b}",
        (OPERATOR, "{a} // {b}", "{a} % {b}"),
        (OPERATOR, "{a} // {b}", "{a} * {b}"),
    ),
    _form(
        "rest remainder left_over modulo spare",
        "ip",
        ("Return the rest of {a} divided by {b}.", "Return {a} modulo {b}.", "Return the remainder of {a} by {b}."),
        "return {a} % {b}",
        (OPERATOR, "{a} % {b}", "{a} // {b}"),
        (OPERATOR, "{a} % {b}", "{a} - {b}"),
    ),
    _form(
        "is_greater beats exceeds above wins",
        "ii",
        ("Tell whether {a} is greater than {b}.", "Tell whether {a} is more than {b}.", "Check that {a} is above {b}."),
        "return {a} > {b}",
        (INVERTED, "{a} > {b}", "{a} < {b}"),
        (COMPARE, "{a} > {b}", "{a} >= {b}"),
    ),
    _form(
        "is_smaller below loses precedes under",
        "ii",
        ("Tell whether {a} is smaller than {b}.", "Tell whether {a} is less than {b}.", "Check that {a} is below {b}."),
        "return {a} < {b}",
        (INVERTED, "{a} < {b}", "{a} > {b}"),
        (COMPARE, "{a} < {b}", "{a} <= {b}"),
    ),
    _form(
        "enough is_full passes reaches allowed",
        "i",
        ("Tell whether {a} is at least {k}.", "Tell whether {a} is {k} or more.", "Check that {a} reaches {k}."),
        "return {a} >= {k}",
        (COMPARE, "{a} >= {k}", "{a} > {k}"),
        (INVERTED, "{a} >= {k}", "{a} <= {k}"),
        (CONSTANT, "{a} >= {k}", "{a} >= {m}"),
    ),
    _form(
        "fits_in within is_cheap affordable light",
        "i",
        ("Tell whether {a} is at most {k}.", "Tell whether {a} is {k} or less.", "Check that {a} stays within {k}."),
        "return {a} <= {k}",
        (COMPARE, "{a} <= {k}", "{a} < {k}"),
        (INVERTED, "{a} <= {k}", "{a} >= {k}"),
        (CONSTANT, "{a} <= {k}", "{a} <= {m}"),
    ),
    _form(
        "in_range between valid is_normal inside",
        "i",
        ("Tell whether {a} is from {k} to {m}.", "Check that {a} is between {k} and {m}, ends included."),
        "return {k} <= {a} <= {m}",
        (COMPARE, "{k} <= {a} <= {m}", "{k} < {a} <= {m}"),
        (COMPARE, "{k} <= {a} <= {m}", "{k} <= {a} < {m}"),
    ),
    _form(
        "is_even even balanced pairs_up splits",
        "i",
        ("Tell whether {a} is even.", "Check that {a} is an even number."),
        "return {a} % 2 == 0",
        (INVERTED, "{a} % 2 == 0", "{a} % 2 == 1"),
        (CONSTANT, "{a} % 2 == 0", "{a} % 3 == 0"),
    ),
    _form(
        "is_odd odd uneven unpaired alternates",
        "i",
        ("Tell whether {a} is odd.", "Check that {a} is an odd number."),
        "return {a} % 2 == 1",
        (INVERTED, "{a} % 2 == 1", "{a} % 2 == 0"),
        (CONSTANT, "{a} % 2 == 1", "{a} % 3 == 1"),
    ),
    _form(
        "raise_by bump increase lift shift",
        "i",
        ("Return {a} plus {k}.", "Raise {a} by {k}.", "Add {k} to {a}."),
        "return {a} + {k}",
        (OPERATOR, "{a} + {k}", "{a} - {k}"),
        (CONSTANT, "{a} + {k}", "{a} + {m}"),
    ),
    _form(
        "lower_by reduce decrease cut_down shrink",
        "i",
        ("Return {a} minus {k}.", "Lower {a} by {k}.", "Take {k} from {a}."),
        "return {a} - {k}",
        (OPERATOR, "{a} - {k}", "{a} + {k}"),
        (CONSTANT, "{a} - {k}", "{a} - {m}"),
    ),
    _form(
        "stretch amplify convert to_units enlarge",
        "i",
        ("Return {k} times {a}.", "Multiply {a} by {k}.", "Return {a} times {k}."),
        "return {a} * {k}",
        (OPERATOR, "{a} * {k}", "{a} + {k}"),
        (CONSTANT, "{a} * {k}", "{a} * {m}"),
    ),
    _form(
        "smaller lowest lesser cheaper_of shorter",
        "ii",
        ("Return the smaller of {a} and {b}.", "Return {a} or {b}, whichever is less."),
        "return min({a}, {b})",
        (CALL, "min({a}, {b})", "max({a}, {b})"),
    ),
    _form(
        "larger greatest bigger taller_of longer",
        "ii",
        ("Return the larger of {a} and {b}.", "Return {a} or {b}, whichever is more."),
        "return max({a}, {b})",
        (CALL, "max({a}, {b})", "min({a}, {b})"),
    ),
    _form(
        "pick_low low_of minimum floor_of first_price",
        "ii",
        ("Return the smaller of {a} and {b}.", "Return {a} or {b}, whichever is less."),
        "if {a} < {b}:\n    return {a}\nreturn {b}",
        (INVERTED, "{a} < {b}", "{a} > {b}"),
        (RESULT, "\nreturn {b}", "\nreturn {a}"),
    ),
    _form(
        "pick_high high_of maximum top_of best_price",
        "ii",
        ("Return the larger of {a} and {b}.", "Return {a} or {b}, whichever is more."),
        "if {a} > {b}:\n    return {a}\nreturn {b}",
        (INVERTED, "{a} > {b}", "{a} < {b}"),
        (RESULT, "\nreturn {b}", "\nreturn {a}"),
    ),
    _form(
        "total sum_up add_all collect whole",
        "l",
        ("Return the sum of {a}.", "Add up all of {a}."),
        "total = 0\nfor item in {a}:\n    total += item\nreturn total",
        (START, "total = 0", "total = 1"),
        (OPERATOR, "total += item", "total -= item"),
        (RESULT, "return total", "return item"),
    ),
    _form(
        "multiply_all product compound chain volume",
        "l",
        ("Return the product of {a}.", "Multiply all of {a}."),
        "total = 1\nfor item in {a}:\n    total *= item\nreturn total",
        (START, "total = 1", "total = 0"),
        (OPERATOR, "total *= item", "total += item"),
        (RESULT, "return total", "return item"),
    ),
    _form(
        "count_high count_above how_many_over peaks",
        "l",
        ("Count the entries of {a} above {k}.", "Return how many of {a} are more than {k}."),
        "count = 0\nfor item in {a}:\n    if item > {k}:\n        count += 1\nreturn count",
        (INVERTED, "item > {k}", "item < {k}"),
        (COMPARE, "item > {k}", "item >= {k}"),
        (START, "count = 0", "count = 1"),
        (OFF_BY_ONE, "count += 1", "count += 2"),
    ),
    _form(
        "keep_low only_below filter_low small_ones",
        "l",
        ("List the entries of {a} below {k}.", "Return those of {a} that are less than {k}."),
        "return [item for item in {a} if item < {k}]",
        (INVERTED, "item < {k}", "item > {k}"),
        (COMPARE, "item < {k}", "item <= {k}"),
    ),
    _form(
        "first head front opening earliest",
        "l",
        ("Return the first of {a}.", "Return the first entry of {a}."),
        "return {a}[0]",
        (OFF_BY_ONE, "{a}[0]", "{a}[1]"),
        (CONSTANT, "{a}[0]", "{a}[-1]"),
    ),
    _form(
        "last tail end_of closing latest",
        "l",
        ("Return the last of {a}.", "Return the last entry of {a}."),
        "return {a}[-1]",
        (OFF_BY_ONE, "{a}[-1]", "{a}[-2]"),
        (CONSTANT, "{a}[-1]", "{a}[0]"),
    ),
    _form(
        "take leading first_few top_part",
        "l",
        ("Return the first {k} of {a}.", "Return {a} up to entry {k}."),
        "return {a}[:{k}]",
        (INVERTED, "{a}[:{k}]", "{a}[{k}:]"),
        (CONSTANT, "{a}[:{k}]", "{a}[:{m}]"),
    ),
    _form(
        "drop skip without_first later_part",
        "l",
        ("Return {a} without its first {k}.", "Leave out the first {k} of {a}."),
        "return {a}[{k}:]",
        (INVERTED, "{a}[{k}:]", "{a}[:{k}]"),
        (CONSTANT, "{a}[{k}:]", "{a}[{m}:]"),
    ),
    _form(
        "count_up numbers_to steps ladder",
        "p",
        ("List the numbers from 1 to {a}.", "Return 1 up to {a} as a list."),
        "return list(range(1, {a} + 1))",
        (OFF_BY_ONE, "range(1, {a} + 1)", "range(1, {a})"),
        (OFF_BY_ONE, "range(1, {a} + 1)", "range(0, {a} + 1)"),
    ),
    _form(
        "spread span width_of extent",
        "l",
        ("Return the largest minus the smallest of {a}.", "Return how far apart the ends of {a} are."),
        "return max({a}) - min({a})",
        (SWAP, "max({a}) - min({a})", "min({a}) - max({a})"),
        (OPERATOR, "max({a}) - min({a})", "max({a}) + min({a})"),
    ),
    _form(
        "mean average typical level",
        "l",
        ("Return the mean of {a}.", "Return the average of {a}."),
        "return sum({a}) / len({a})",
        (OPERATOR, "sum({a}) / len({a})", "sum({a}) * len({a})"),
        (SWAP, "sum({a}) / len({a})", "len({a}) / sum({a})"),
    ),
    _form(
        "absolute size distance magnitude",
        "i",
        ("Return {a} without its sign.", "Return the absolute value of {a}."),
        "if {a} < 0:\n    return -{a}\nreturn {a}",
        (INVERTED, "{a} < 0", "{a} > 0"),
        (RESULT, "\nreturn {a}", "\nreturn -{a}"),
    ),
    _form(
        "repeat echo copies print_times",
        "sp",
        ("Return {a} written {b} times.", "Repeat {a} {b} times."),
        "return {a} * {b}",
        (OPERATOR, "{a} * {b}", "{a} + {b}"),
        (OPERATOR, "{a} * {b}", "{a} % {b}"),
    ),
    _form(
        "begins has_prefix starts opens_with",
        "st",
        ("Tell whether {a} starts with {b}.", "Check that {b} opens {a}."),
        "return {a}.startswith({b})",
        (CALL, "{a}.startswith({b})", "{a}.endswith({b})"),
        (SWAP, "{a}.startswith({b})", "{b}.startswith({a})"),
    ),
    _form(
        "ends has_suffix finishes closes_with",
        "st",
        ("Tell whether {a} ends with {b}.", "Check that {b} closes {a}."),
        "return {a}.endswith({b})",
        (CALL, "{a}.endswith({b})", "{a}.startswith({b})"),
        (SWAP, "{a}.endswith({b})", "{b}.endswith({a})"),
    ),
    _form(
        "shout capitals loud to_upper",
        "s",
        ("Return {a} in capital letters.", "Write {a} in upper case."),
        "return {a}.upper()",
        (CALL, "{a}.upper()", "{a}.lower()"),
        (CALL, "{a}.upper()", "{a}.strip()"),
    ),
    _form(
        "whisper quiet plain to_lower",
        "s",
        ("Return {a} in small letters.", "Write {a} in lower case."),
        "return {a}.lower()",
        (CALL, "{a}.lower()", "{a}.upper()"),
        (CALL, "{a}.lower()", "{a}.strip()"),
    ),
    _form(
        "is_empty nothing_in blank vacant",
        "e",
        ("Tell whether {a} is empty.", "Check that {a} has no entries."),
        "return len({a}) == 0",
        (INVERTED, "len({a}) == 0", "len({a}) != 0"),
        (CONSTANT, "len({a}) == 0", "len({a}) == 1"),
    ),
    _form(
        "contains has includes holds",
        "li",
        ("Tell whether {b} is in {a}.", "Check that {a} contains {b}."),
        "return {b} in {a}",
        (INVERTED, "{b} in {a}", "{b} not in {a}"),
        (SWAP, "{b} in {a}", "{a} in {b}"),
    ),
    _form(
        "both ready agreed all_set",
        "bb",
        ("Tell whether {a} and {b} both hold.", "Check that {a} and also {b} is true."),
        "return {a} and {b}",
        (OPERATOR, "{a} and {b}", "{a} or {b}"),
    ),
    _form(
        "either some_set any_of one_holds",
        "bb",
        ("Tell whether {a} or {b} holds.", "Check that one of {a} and {b} is true."),
        "return {a} or {b}",
        (OPERATOR, "{a} or {b}", "{a} and {b}"),
    ),
    _form(
        "border perimeter fence outline",
        "ii",
        ("Return the perimeter of {a} by {b}.", "Return twice the sum of {a} and {b}."),
        "return 2 * ({a} + {b})",
        (OPERATOR, "({a} + {b})", "({a} - {b})"),
        (CONSTANT, "2 * ({a} + {b})", "3 * ({a} + {b})"),
    ),
    _form(
        "square power_two tile squared",
        "i",
        ("Return {a} squared.", "Return {a} times itself."),
        "return {a} * {a}",
        (OPERATOR, "{a} * {a}", "{a} + {a}"),
        (OPERATOR, "{a} * {a}", "{a} - {a}"),
    ),
    _form(
        "percent part_of tax interest",
        "ii",
        ("Return {b} percent of {a}.", "Return {b} hundredths of {a}."),
        "return {a} * {b} / 100",
        (OPERATOR, "{a} * {b} / 100", "{a} + {b} / 100"),
        (CONSTANT, "{a} * {b} / 100", "{a} * {b} / 10"),
    ),
    _form(
        "cap limit clip at_most",
        "i",
        ("Return {a}, but at most {k}.", "Return {a} cut to {k} from above."),
        "return min({a}, {k})",
        (CALL, "min({a}, {k})", "max({a}, {k})"),
        (CONSTANT, "min({a}, {k})", "min({a}, {m})"),
    ),
    _form(
        "at_floor ensure no_less fill_up",
        "i",
        ("Return {a}, but at least {k}.", "Return {a} lifted to {k} from below."),
        "return max({a}, {k})",
        (CALL, "max({a}, {k})", "min({a}, {k})"),
        (CONSTANT, "max({a}, {k})", "max({a}, {m})"),
    ),
    _form(
        "grade label judge sort_out",
        "i",
        ("Return 'high' if {a} is at least {k}, else 'low'.", "Call {a} 'high' from {k} on, else 'low'."),
        "if {a} >= {k}:\n    return 'high'\nreturn 'low'",
        (COMPARE, "{a} >= {k}", "{a} > {k}"),
        (INVERTED, "{a} >= {k}", "{a} <= {k}"),
        (CONSTANT, "{a} >= {k}", "{a} >= {m}"),
        (RESULT, "\nreturn 'low'", "\nreturn 'high'"),
    ),
)

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "i": ("a", "b", "x", "y", "n", "left", "right", "price", "amount", "width", "height", "score", "speed", "age"),
    "p": ("n", "size", "step", "limit", "count", "pieces"),
    "l": ("items", "values", "numbers", "row", "data", "marks", "prices", "scores"),
    "e": ("items", "values", "numbers", "row", "data", "marks", "prices", "scores"),
    "s": ("text", "word", "name", "line", "title", "message"),
    "t": ("part", "sign", "piece", "key"),
    "b": ("first", "second", "open", "paid", "done", "signed"),
}

PACKAGES: tuple[str, ...] = (
    "shop", "bank", "clock", "garden", "music", "school", "train", "weather", "kitchen", "library", "sport", "travel",
    "garage", "market", "museum", "office", "farm", "harbor", "studio", "cinema", "bakery", "forest", "tower", "bridge",
)  # fmt: skip
