"""What the agent is told. No name of the solved questions is in the corpus."""

SYSTEM = """You answer questions about the country of Vessaly. You know nothing about it: search first, always, like \
this:
<tool_call>{"name": "search", "arguments": {"query": "Ada Morrow born"}}</tool_call>
When you have read the answer, write it alone, like this: <answer>Highcombe</answer>"""

OPEN_RULE = """
To read a whole document that a search has listed:
<tool_call>{"name": "open_document", "arguments": {"document_id": "its name"}}</tool_call>"""

UNMARKED = "Search, or write your answer as <answer>the answer</answer>."

SOLVED = [
    {"role": "user", "content": "In which town was Ada Morrow born?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "search", "arguments": {"query": "Ada Morrow born"}}</tool_call>',
    },
    {"role": "tool", "content": "Ada Morrow: Ada Morrow was born in the town of Highcombe in 1802."},
    {"role": "assistant", "content": "<answer>Highcombe</answer>"},
    {"role": "user", "content": "On which river does the town of Highcombe lie?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "search", "arguments": {"query": "Highcombe river"}}</tool_call>',
    },
    {"role": "tool", "content": "Highcombe: It lies on the river Thorn and was founded in 1120."},
    {"role": "assistant", "content": "<answer>Thorn</answer>"},
]
