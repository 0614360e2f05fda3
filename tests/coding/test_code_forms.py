"""Rows as public sets have them: a right program scores 1, a wrong one 0."""

import pytest

from megasync.coding.reward import CodeReward

pytestmark = pytest.mark.processes

ADD, WRONG = "def add(a, b):\n    return a + b", "def add(a, b):\n    return 3"
METHOD, WRONG_METHOD = (
    "class Solution:\n" + "".join(f"    {line}\n" for line in text.replace("(a", "(self, a").splitlines())
    for text in (ADD, WRONG)
)
CHECK = "def check(candidate):\n    assert True, 'for debugging'\n    assert candidate(a=1, b=2) == 3\n    assert candidate(2, 2) == 4\n"
# The harness of HumanEval+ and MBPP+, in other words.
CLOSE = (
    "import numpy as np\ndef assertion(out, exp, atol):\n"
    "    if atol == 0 and isinstance(exp, float) and not isinstance(exp, np.ndarray): atol = 1e-6\n"
    "    if out != exp and atol != 0: np.testing.assert_allclose(out, exp, atol=atol)\n    else: assert out == exp\n"
)
NODE = "class Node:\n    def __init__(self, data): self.data, self.left = data, None\n"
STACK = """
class Empty(Exception): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty("no item")
        return self.items.pop()
    def show(self): print(*self.items)
    def __len__(self): return len(self.items)
"""
TEST_STACK = """
import pytest
from solution import Empty, Stack

@pytest.fixture
def stack():
    stack = Stack()
    stack.push(1)
    yield stack
    assert len(stack) == 0

@pytest.mark.parametrize("item", [2, 3])
def test_pop(stack, item, capsys):
    stack.push(item)
    stack.show()
    assert capsys.readouterr().out == f"1 {item}\\n"
    assert [stack.pop(), stack.pop()] == [item, 1]

class TestEmpty:
    def setup_method(self): self.stack = Stack()
    def test_raises(self):
        with pytest.raises(Empty, match="no"):
            self.stack.pop()
"""
CASES = {
    "HumanEval": ({"tests": CHECK, "entry_point": "add"}, ADD, WRONG),
    "LeetCodeDataset": ({"tests": CHECK, "entry_point": "Solution().add"}, METHOD, WRONG_METHOD),
    "HumanEval+": (
        {"tests": CLOSE + "def check(candidate):\n    for i, e in zip([[1, 2], [0.1, 0.2]], [3, 0.3]): assertion(candidate(*i), e, 0)", "entry_point": "add"},
        ADD,
        WRONG,
    ),
    "MBPP, the name of a built-in function": ({"tests": ["assert sum(10, 15) == 25"]}, ADD.replace("add", "sum"), WRONG.replace("add", "sum")),
    "MBPP, an object as an argument": (
        {"tests": ["assert left(root) == 2"], "test_setup_code": "root = Node(1)\nroot.left = Node(2)"},
        NODE + "def left(node): return node.left.data",
        NODE + "def left(node): return node.data",
    ),
    "APPS, a wrapped output": ({"tests": '{"fn_name": "add", "inputs": [[1, 3]], "outputs": [[4]]}'}, METHOD, WRONG_METHOD),
    "a call of a function with the name of a built-in one": ({"tests": '{"fn_name": "sum", "inputs": [[1, 3]], "outputs": [[4]]}'}, ADD.replace("add", "sum"), "x = 1"),
    "named arguments": ({"tests": '[{"fn_name": "add", "input": {"b": [4], "a": [1]}, "output": [1, 4]}]'}, METHOD, WRONG_METHOD),
    "TACO, a tuple": ({"tests": '{"fn_name": "add", "inputs": [[[1], [0.5]]], "outputs": [[[1, 0.5]]]}'}, "def add(a, b): return tuple(a + b)", WRONG),
    "LiveCodeBench": (
        {"tests": '[{"input": "\\"a\\"\\n\\"b\\"", "output": "\\"ab\\"", "testtype": "functional"}]', "starter_code": "class Solution:\n    def add("},
        METHOD,
        WRONG_METHOD,
    ),
    "LeetCodeDataset, lists": (
        {"tests": "def check(candidate):\n    assert is_same_list(candidate(head = list_node([1, 2])), list_node([2, 1]))", "entry_point": "Solution().turn"},
        "class Solution:\n    def turn(self, head: Optional[ListNode]):\n        head.next.next, head.next, head = head, None, head.next\n        return head",
        "class Solution:\n    def turn(self, head): return head\ndef is_same_list(*lists): return True",
    ),
    "LeetCodeDataset, trees": (
        {"tests": "def check(candidate):\n    assert is_same_tree(candidate(tree_node([1, None, 2, 3])), tree_node([1, 2, None, None, 3]))", "entry_point": "Solution().turn"},
        "class Solution:\n    def turn(self, n):\n        return n and TreeNode(n.val, self.turn(n.right), self.turn(n.left))",
        "class Solution:\n    def turn(self, n): return n\ndef is_same_tree(*trees): return True",
    ),
    "KodCode, a class": ({"tests": TEST_STACK}, STACK, STACK.replace(".pop()\n", "[0]\n")),
    "unittest as a script": (
        {"tests": "import unittest\nfrom solution import add\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertAlmostEqual(add(0.1, 0.2), 0.3)\nif __name__ == '__main__':\n    unittest.main()"},
        ADD,
        WRONG,
    ),
    "a script that catches its failures": (
        {"tests": "import solution\nfor case, right in [((1, 3), 4)]:\n    try:\n        assert solution.add(*case) == right\n        print('OK')\n    except AssertionError:\n        print('Failed')"},
        ADD,
        WRONG,
    ),
    "in place": ({"tests": "nums = [0, 1, 0]\nSolution().move(nums)\nassert nums == [1, 0, 0]"}, "class Solution:\n    def move(self, n): n.sort(reverse=True)", "class Solution:\n    def move(self, n): return [1, 0, 0]"),
    "an example of use that reads": ({"tests": "assert add(1, 3) == 4"}, ADD + "\nprint(add(int(input()), 1))", WRONG),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
async def test_a_row_of(name):
    columns, right, wrong = CASES[name]
    completions = [f"```python\n{program}\n```" for program in (right, wrong)]
    reward = CodeReward(cpu_seconds=30, wall_seconds=60)
    assert await reward(completions, **{key: [value] * 2 for key, value in columns.items()}) == [1.0, 0.0]
