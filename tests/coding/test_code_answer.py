"""The program is found in answers as people and models write them."""

import pytest

from megasync.coding.answer import program_of

ADD = "def add(a, b):\n    return a + b"
MAIN = "print(int(input()) * 2)"


def block(text, info="python", marks="```"):
    return f"{marks}{info}\n{text}\n{marks}\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (block(ADD), ADD),
        (f"Here it is:\n{block(ADD)}It adds.", ADD),
        (block(ADD).replace("\n", "\r\n"), ADD),
        *((block(ADD, info), ADD) for info in ("", "py", "Python", "python3", " python", "python {.x}", "{.python .n}")),
        *((block(ADD, info), ADD) for info in ('python title="a.py"', "python:main.py", "python showLineNumbers")),
        (block(ADD, marks="~~~"), ADD),
        (block(f"{ADD}\n# ```", marks="````"), f"{ADD}\n# ```"),
        (block(ADD)[:-4], ADD),
        (f"```python\n{ADD}```", ADD),
        (f"Solution: {block(ADD)}", ADD),
        ("1. So:\n\n" + "".join(f"   {line}\n" for line in block(ADD).splitlines()), ADD),
        ("".join(f"> {line}\n" for line in block(ADD).splitlines()), ADD),
        (ADD, ADD),
        (f"<answer>{block(ADD)[:-1]}</answer>", ADD),
        (f"{block(ADD)[:-1]}It adds.", ADD),
        # The prompt ends with the start of the block, or the end of a block is missing.
        (f"{ADD}\n```\nIt adds.", ADD),
        (block("pass")[:-4] + block(ADD), ADD),
        (block('def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """'), 'def add(a, b):\n    """\n    ```\n    add(1, 2)\n    ```\n    """'),
        # Other languages, what was printed, and how to run it.
        (block(ADD) + block("int add();", "c++") + block("python add.py", "bash") + block("3", "") + block("3", "text"), ADD),
        (f"Call ```add(1, 2)``` like this.\n{block(ADD)}", ADD),
        # Names of languages that are Python, or none.
        *((block(ADD, info), ADD) for info in ("Python 3", "python3.11", "ipython", "python-exec", "text", "plaintext", "code")),
        # Marks in place of a fence.
        *((f"Here:\n{opening}\n{ADD}\n{closing}\nDone.", ADD) for opening, closing in (
            ("[PYTHON]", "[/PYTHON]"), ("<code>", "</code>"), ("<python>", "</python>"), ("<answer>", "</answer>"),
            ('<pre><code class="language-python">', "</code></pre>"),
        )),
        (f"[PYTHON]\n{ADD}", ADD),
        # The last definition counts, not an example of its use.
        (block(ADD.replace("+", "-")) + "No, wrong.\n" + block(ADD), ADD),
        (block(ADD) + "For example:\n" + block("print(add(1, 2))"), ADD),
        # Blocks that build on each other.
        (block("import math") + block("def add(a, b):\n    return math.fsum([a, b])"), "import math\n\ndef add(a, b):\n    return math.fsum([a, b])"),
        (block("def one():\n    return 1") + block("print(2)") + block("def add(a, b):\n    return one()"), "def one():\n    return 1\n\ndef add(a, b):\n    return one()"),
        (block("def one():\n    return 1") + block(ADD), ADD),
        # Reasoning is no answer.
        (f"<think>{block(ADD.replace('+', '-'))}</think>\n{block(ADD)}", ADD),
        (f"Try {block(ADD.replace('+', '*'))}</think>\n{block(ADD)}", ADD),
        (f"<think>\n{block(ADD)}", None),
        (f"\u25c1think\u25b7\n{block(ADD)}", None),
        (f"[THINK]{block(ADD)}", None),
        (f"<|channel|>analysis<|message|>{block(ADD)}", None),
        (f"<THINK>{block(ADD.replace('+', '-'))}</THINK>\n{block(ADD)}", ADD),
        (f"<think>{block(ADD)}</think>I do not know.", None),
        ("I do not know.", None),
        ("", None),
        (block("int add();", "c"), None),
    ],
)  # fmt: skip
def test_the_program_whose_functions_are_tested(answer, expected):
    found = program_of(answer, {"add"})
    assert found is None if expected is None else found.strip() == expected


def test_functions_in_blocks_of_their_own_are_all_found():
    program = program_of(
        block("def encode(): ...") + block("print(encode())", "bash") + block("def decode(): ..."), {"encode", "decode"}
    )
    assert program == "def encode(): ...\n\ndef decode(): ...\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (block("print(1)") + block(MAIN, ""), MAIN),
        (block(MAIN) + "Example:\n" + block("print(solve(3))"), MAIN),
        (block("def main():\n    " + MAIN) + "and then\n" + block("main()"), f"def main():\n    {MAIN}\n\nmain()"),
        (block("print('hello')"), "print('hello')"),
        (block("print('hello')") + block("for each word: print it\nif it is new\n- with `set`", ""), "print('hello')"),
        (block(MAIN) + "Input:\n" + block("21", "") + "Output:\n" + block("42", ""), MAIN),
    ],
)
def test_the_program_that_is_run(answer, expected):
    found = program_of(answer)
    assert found is not None
    assert found.strip() == expected


def test_the_search_is_linear_in_the_answer():
    """A model's text of any kind is read; a parser would exhaust the stack."""
    for text in (
        "(" * 10**6,
        "`" * 10**6,
        "```\n" * 10**5,
        "=" * 10**6,
        "def " * 10**5,
        "import " + "a," * 10**5,
        "<code>" * 10**5,
        " " * 10**6,
    ):
        program_of(text, {"add"})
        program_of(block(text), {"add"})
