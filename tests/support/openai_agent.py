"""An agent written for the OpenAI API: it takes `base_url` and `api_key`, streams, and calls two tools."""

import json

import openai
from tool_model import LETTERS, QUESTION, add, look
from transformers.utils import get_json_schema

TOOLS = {"look": look, "add": add}


def schemas():
    found = [get_json_schema(tool) for tool in TOOLS.values()]
    for schema in found:
        schema["function"].pop("return", None)
    return found


def play(base_url, api_key, sample, model):
    """Returns the fraction of a's in the last answer as the reward, and the total number of chunks as a metric."""
    chunks, messages = 0, [QUESTION]
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=60.0) as client:
        while True:
            options = {"model": model, "messages": messages, "tools": schemas(), "max_tokens": 80}
            message, count = put_together(client.chat.completions.create(stream=True, **options))
            chunks += count
            messages.append(message)
            if "tool_calls" not in message:
                break
            for call in message["tool_calls"]:
                function = call["function"]
                result = TOOLS[function["name"]](**json.loads(function["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    text = message["content"]
    return {"reward": text.count(LETTERS[0]) / max(1, len(text)), "chunks": chunks}


def put_together(stream):
    """(message, number of chunks) of a streamed answer."""
    content, calls, count = "", {}, 0
    for chunk in stream:
        count += 1
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"type": "function", "function": {"name": "", "arguments": ""}})
            call["id"] = part.id or call["id"]
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": list(calls.values())} if calls else {}), count
