"""Settings declared on the fields of a class."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import pytest

from headrace.base.setting import Setting, check_numbers, declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A dataclass with declared and internal fields."""

    name: Annotated[str, Setting("A name.")]
    size: Annotated[int, Setting("A size.", least=1, most=9)] = 3
    wait_s: Annotated[float | None, Setting("A wait.", least=0)] = None
    words: Annotated[tuple[str, ...], Setting("Words.")] = field(default_factory=lambda: ("a",))
    internal: int = -1

    def __post_init__(self) -> None:
        check_numbers(self)


class Pair(NamedTuple):
    """A NamedTuple with a declared field."""

    left: Annotated[int, Setting("The left one.")]
    right: Annotated[int, Setting("The right one.")] = 2
    internal: int = 0


def test_declared_fields_come_with_type_and_default_in_order() -> None:
    assert [(one.field, one.type, one.default) for one in declared(Sample)] == [
        ("name", str, None),
        ("size", int, 3),
        ("wait_s", float | None, None),
        ("words", tuple[str, ...], ("a",)),
    ]
    assert [(one.field, one.default) for one in declared(Pair)] == [("left", None), ("right", 2)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 0}, "size must be above 0, got 0"),
        ({"size": 10}, "size must be at most 9, got 10"),
        ({"wait_s": -1.0}, "wait_s must be 0 or more, got -1.0"),
        ({"wait_s": float("nan")}, "wait_s must be 0 or more, got nan"),
    ],
)
def test_numbers_that_cannot_be_are_refused_naming_field_and_value(given: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sample(name="n", **given)  # type: ignore[arg-type]


def test_numbers_that_can_be_are_accepted() -> None:
    Sample(name="n", size=9, wait_s=0.0)


def test_annotations_that_are_not_evaluated_are_refused() -> None:
    class Unevaluated(NamedTuple):
        size: "Annotated[int, Setting('A size.')]" = 1

    Unevaluated.__annotations__["size"] = "int"
    with pytest.raises(TypeError, match=r"Unevaluated\.size"):
        list(declared(Unevaluated))
