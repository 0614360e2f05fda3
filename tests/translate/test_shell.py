"""A shell script is read as bash would expand it, nothing of it runs, and what only a run could tell is a reason."""

import pytest

from megasync.errors import ConfigError
from megasync.translate.shell import read_commands


def words(script: str) -> list[str]:
    """The words of the last command."""
    return [word.text for word in read_commands(script)[-1].words]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a 'b c' \"d e\" f\\ g", ["run", "a", "b c", "d e", "f g"]),
        ("run a \\\n  b # c\n", ["run", "a", "b"]),
        ("run 'a'\\\n    b", ["run", "a", "b"]),
        ("N=2; run a=$N ${N}b '$N' \"$N\" \\$N", ["run", "a=2", "2b", "$N", "2", "$N"]),
        ("export A=1 B=2\nrun $A$B", ["run", "12"]),
        ("run $((2 * (3 + 4) / 5 - -1))", ["run", "3"]),
        ("A=5\nB=$((A * 1024))\nrun $((B/2))", ["run", "2560"]),
        ('run ${A:-1} ${B:-${C:-x y}} ${D-"q"}', ["run", "1", "x", "y", "q"]),
        ('A=\nrun ${A:-1} "${A-2}"', ["run", "1", ""]),
        (': "${N:=4}"\nrun $N', ["run", "4"]),
        (
            "ARGS=(--lr 1 # a comment\n  #--no\n  --name 'a b'\n)\nrun ${ARGS[@]}",
            ["run", "--lr", "1", "--name", "a", "b"],
        ),
        ("ARGS=('a b' c)\nrun \"${ARGS[@]}\" ${ARGS[*]}", ["run", "a b", "c", "a", "b", "c"]),
        ("ARGS=(a)\nARGS+=(b c)\nrun ${ARGS[@]}", ["run", "a", "b", "c"]),
        ("A=a\nA+=b\nrun $A", ["run", "ab"]),
        ("EMPTY=(\n  # --flag\n)\nrun ${EMPTY[@]} a", ["run", "a"]),
        ("A='--x 1 --y'\nrun $A \"$A\"", ["run", "--x", "1", "--y", "--x 1 --y"]),
        ("run a=\"['$HOME/x', '$HOME/y']\"", ["run", "a=['~/x', '~/y']"]),
        ("run $BASE/x", ["run", "${oc.env:BASE}/x"]),
        ("cat <<EOF > out\nrun heredoc $(\nEOF\nrun a", ["run", "a"]),
        ("run a 2>&1 > log.txt", ["run", "a"]),
        ("f() {\n  other\n}\nrun a", ["run", "a"]),
        ("A=1 run $B{rollout_id}", ["run", "${oc.env:B}{rollout_id}"]),
    ],
)
def test_words_are_expanded(script, expected):
    assert words(script) == expected


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("run $(seq 1 2)", "the output of a command"),
        ("run `date`", "the output of a command"),
        ("run $1", "an argument of the script"),
        ("run ${1:-x}", "an argument of the script"),
        ('run "$@"', "an argument of the script"),
        ("run ${ARGS[@]}", "ARGS is not set in this file"),
        ("run $((N + 1))", "N is not set in this file"),
        ("run ${A##*/}", "a form of"),
        ("if [ x ]; then\n  A=1\nfi\nrun $A", "A depends on a condition"),
        ("A=0\nwhile x; do\n  A=1\ndone\nrun $A", "A depends on a condition"),
        ("[ x ] && A=1\nrun $A", "A depends on a condition"),
        ("case x in\n  a) A=1;;\n  *) A=2;;\nesac\nrun $A", "A depends on a condition"),
        ("set_up() {\n  A=1\n}\nrun $A", "A depends on a condition"),
        ("(A=1)\nrun $A", "A depends on a condition"),
        ("for A in 1 2; do\n  run $A\ndone", "a for sets A"),
        ("read A\nrun $A", "read sets A"),
        ("run $((1 / 0))", "arithmetic"),
    ],
)
def test_what_only_a_run_could_tell_is_a_reason(script, reason):
    (command,) = [each for each in read_commands(script) if each.words[0].text == "run"]
    assert [word for word in command.words[1:] if any(reason in each for each in word.unknown)]


def test_a_condition_that_changes_nothing_is_no_reason():
    command = read_commands("A=1\nif x; then\n  A=1\nfi\nrun $A")[-1]
    assert [word.text for word in command.words] == ["run", "1"] and not command.words[1].unknown


def test_commands_of_all_places_are_found_with_their_lines():
    script = "set -x\nif a; then\n  first b &&\n  second c | third\nfi\n\nmain() {\n  fourth\n}\n"
    lines = {command.words[0].text: command.line for command in read_commands(script)}
    assert lines == {"set": 1, "a": 2, "first": 3, "second": 4, "third": 4, "fourth": 8}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("run 'a", "' is never closed"),
        ('a\nrun "b', 'line 2: " is never closed'),
        ("run $(a", "( is never closed"),
        ("run ${a", "{ is never closed"),
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 20, "expands to more than"),
        ("A=(a a a a)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 20, "more than 10,000 words"),
        ("run " + "${A:-" * 200 + "}" * 200, "nested more than 50"),
    ],
)
def test_bad_scripts_are_refused(script, said):
    with pytest.raises(ConfigError, match="never closed|expands|words|nested") as error:
        read_commands(script)
    assert said in str(error.value)
