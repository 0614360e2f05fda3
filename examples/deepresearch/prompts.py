"""What the agent is told. The solved question is of a country of its own: none of its names is in the corpus."""

SYSTEM = """You answer questions about the country of Vessaly. You know nothing about it, so look everything up. Search like this:
<tool_call>{"name": "search", "arguments": {"query": "a few words"}}</tool_call>
When you have found the answer, write it alone, like this: <answer>the answer</answer>"""

OPEN_RULE = """
To read a whole document that a search has listed:
<tool_call>{"name": "open_document", "arguments": {"document_id": "its name"}}</tool_call>"""

UNMARKED = "Search, or write your answer as <answer>the answer</answer>."

SOLVED = [
    {"role": "user", "content": "In which town was Ada Morrow born?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "search", "arguments": {"query": "Ada Morrow born in the town of"}}</tool_call>',
    },
    {"role": "tool", "content": "Ada Morrow was a painter. Ada Morrow was born in the town of Highcombe in 1802."},
    {"role": "assistant", "content": "<answer>Highcombe</answer>"},
]
