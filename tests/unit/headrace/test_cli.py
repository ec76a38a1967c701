"""A mistyped command line is answered by one line that says what was probably meant, and by exit code 2."""

from __future__ import annotations

import pytest

from headrace.cli import main


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up --wokers 2", "headrace up: there is no option --wokers; did you mean --workers?"),
        ("up --prot=80", "headrace up: there is no option --prot; did you mean --port?"),
        ("--versoin", "headrace: there is no option --versoin; did you mean --version?"),
        ("wroker", "headrace: there is no command 'wroker'; did you mean worker?"),
        ("worker drian w-1", "headrace worker: there is no command 'drian'; did you mean drain?"),
        ("worker drain --gracee 3 w-1", "headrace worker drain: there is no option --gracee; did you mean --grace?"),
        ("worker --nam a drain w-1", "headrace worker: there is no option --nam; did you mean --name?"),
        ("chaos --minuts 3", "headrace chaos: there is no option --minuts; did you mean --minutes?"),
        ("up extra", "headrace up: unexpected argument 'extra'"),
        ("up --port", "headrace up: --port: expected one argument"),
        ("worker drain", "headrace worker drain: the following arguments are required: ID"),
        ("config rooter", "headrace config: command: expected one of up, frontend, worker, router, streams, got 'rooter'"),
        ("up --qqqqqqq", "headrace up: there is no option --qqqqqqq"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(said)
    assert err.endswith(" --help)\n")


def test_what_only_looks_like_an_option_is_left_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """After `--` all words are values, and so are negative numbers."""
    with pytest.raises(SystemExit):
        main(["worker", "drain", "--grace", "-5", "--", "--wokers", "more"])
    assert "unexpected argument 'more'" in capsys.readouterr().err


def test_an_unknown_section_of_a_file_is_named_with_the_nearest_one(
    tmp_path,
    capsys: pytest.CaptureFixture[str],  # type: ignore[no-untyped-def]
) -> None:
    file = tmp_path / "h.toml"
    file.write_text("[frontent]\nport = 1\n")
    assert main(["config", "--config", str(file)]) == 78
    assert "unknown setting 'frontent'; did you mean frontend" in capsys.readouterr().err
